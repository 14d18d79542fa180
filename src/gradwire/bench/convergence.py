"""gradwire bench convergence: where training ends under each scheme, over several seeds, beside its own yardstick."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradwire.bench.fidelity_runs import PlannedRun, folder_name, run_planned
from gradwire.bench.figures import convergence_numbers as numbers
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.registry import parse_spec
from gradwire.results.console import make_console
from gradwire.results.records import write_csv, write_json, write_text
from gradwire.training import TrainConfig, launching

# Figs. 6 and 7 of the ACP-SGD paper: the methods, and ACP-SGD without each of its two mechanisms.
SCHEMES = ("plain", "power-sgd", "acp-sgd", "acp-sgd:error_feedback=false", "acp-sgd:reuse=false")
WORKLOADS = ("resnet", "gpt")
# What a scheme's spec may say about the workload, since the best learning rate is not the same for every scheme.
_WORKLOAD_PREFIX = "workload."
# And about DDP: its bucket_cap_mb, which schemes that work by block want no larger than a block.
_BUCKET_MB = "bucket_mb"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gradwire bench convergence`."""
    parser.add_argument(
        "--scheme",
        nargs="+",
        default=list(SCHEMES),
        metavar="NAME",
        help="schemes as NAME:option=value,...; `ddp` is DDP without gradwire; workload.OPTION=VALUE is for the "
        "workload, such as workload.learning_rate=1e-4, bucket_mb=MB for DDP's buckets. The first is what the others "
        f"are compared with ({' '.join(SCHEMES)})",
    )
    parser.add_argument(
        "--workload",
        nargs="+",
        default=list(WORKLOADS),
        metavar="NAME",
        help=f"what to train, options as NAME:option=value,... ({' '.join(WORKLOADS)})",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], metavar="N", help="of weights and batches")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="ranks on this machine (4)")
    parser.add_argument("--rate", nargs="+", default=["none"], metavar="RATE",
                        help="each rank's link, such as 1gbit (none); of several, each makes a table of its own")  # fmt: skip
    parser.add_argument("--times", action="store_true", help="iteration time, loss over time and time to a loss too: on a "
                        "quiet machine only")  # fmt: skip
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="steps a run (300)")
    parser.add_argument("--batch-size", type=int, metavar="N", help="samples a rank and step (the workload's own)")
    parser.add_argument("--out", type=Path, default=Path("runs/convergence"), metavar="DIR", help="folder of the runs, "
                        "plots and numbers (runs/convergence); a run that is finished there is not run again")  # fmt: skip
    parser.add_argument("--no-train", action="store_true", help="report on the runs that are finished, start none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here too")


def run(args: argparse.Namespace) -> int:
    """Train what is not there yet, then compute, print and write."""
    if args.ranks < 1:
        raise InvalidArgument(f"--ranks {args.ranks}: expected at least 1")
    try:
        from gradwire.bench.figures import convergence_plots
    except ImportError as error:
        raise Unsupported(f"the figures need matplotlib ({error}); pip install 'gradwire[report]'") from error
    console = make_console()
    planned = plan(args)
    if not args.no_train:
        run_planned(planned, console)
    by_workload = load(planned)
    records = [record for runs in by_workload.values() for record in numbers.describe_convergence(runs, args.scheme[0])]
    convergence_plots.plot_losses(by_workload, args.out)
    convergence_plots.plot_ends(records, args.out)
    write_json(args.out / "convergence.json", records)
    if args.json:
        write_json(args.json, records)
    write_csv(args.out / "convergence.csv", records)
    times: list[dict[str, Any]] = []
    if args.times:
        times = [record for runs in by_workload.values() for record in numbers.describe_times(runs, args.scheme[0])]
        convergence_plots.plot_losses_over_time(by_workload, args.out)
        write_csv(args.out / "times.csv", times)
        write_json(args.out / "times.json", times)
    steps = [record for runs in by_workload.values() for record in numbers.describe_steps(runs)]
    write_csv(args.out / "steps.csv", steps)
    markdown = numbers.to_markdown(records) + (numbers.times_to_markdown(times) if times else "")
    write_text(args.out / "convergence.md", markdown)
    console.print(markdown, markup=False, highlight=False, soft_wrap=True)
    console.print(f"plots and numbers: {args.out}")
    return 0


def plan(args: argparse.Namespace) -> list[PlannedRun]:
    """The runs in their order: all of one seed before the next, so that what is there early is of use.

    Raises: InvalidArgument, Unsupported (a workload, scheme or option that there is not).
    """
    planned, rates = [], list(dict.fromkeys(args.rate))
    for seed in dict.fromkeys(args.seeds):
        for spec in dict.fromkeys(args.scheme):
            for workload in dict.fromkeys(args.workload):
                for rate in rates:
                    # One rate alone is where it always was, so that what is finished there is found.
                    label, out = (workload, args.out) if len(rates) == 1 else (f"{workload} at {rate}", args.out / rate)
                    planned.append(
                        PlannedRun(spec, label, _configure(args, workload, spec, seed, out), args.ranks, rate)
                    )
    for one in planned:
        launching.check(one.config)
    return planned


def _configure(args: argparse.Namespace, workload: str, spec: str, seed: int, out: Path) -> TrainConfig:
    (workload_name, workload_options), (scheme, options) = parse_spec(workload), parse_spec(spec)
    for key in [key for key in options if key.startswith(_WORKLOAD_PREFIX)]:
        workload_options[key.removeprefix(_WORKLOAD_PREFIX)] = options.pop(key)
    bucket_mb = options.pop(_BUCKET_MB, None)
    return TrainConfig(
        workload=workload_name,
        workload_options=workload_options,
        scheme=scheme,
        scheme_options=options,
        steps=args.steps,
        batch_size=args.batch_size,
        seed=seed,
        bucket_cap_mb=None if bucket_mb is None else float(bucket_mb),
        out=out / folder_name(workload) / folder_name(spec) / f"seed-{seed}",
    )


def load(planned: Sequence[PlannedRun]) -> dict[str, numbers.Seeds]:
    """{workload: {configuration: its finished runs}}. Raises: InvalidArgument (no run is finished)."""
    by_workload: dict[str, numbers.Seeds] = {}
    for one in planned:
        finished = one.find_finished()
        if finished is not None:
            by_workload.setdefault(finished.workload, {}).setdefault(finished.name, []).append(finished)
    if not by_workload:
        raise InvalidArgument("no run is finished: leave --no-train out")
    return by_workload
