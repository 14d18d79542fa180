"""gradwire bench fidelity: how far each way of compressing moves the loss of real training, and what it sends."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from gradwire.bench.fidelity_runs import FinishedRun, PlannedRun, folder_name, run_planned
from gradwire.bench.figures import fidelity_numbers as numbers
from gradwire.bench.figures.numbers import Records
from gradwire.bench.gcomp_figures import make_table
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.registry import parse_spec
from gradwire.results.console import make_console
from gradwire.results.records import write_csv, write_json, write_text
from gradwire.training import TrainConfig, launching
from gradwire.training.session import PLAIN_DDP

# What the paper and the frontier need, the most telling first: a table that is not finished is of use from the top on.
CONFIGURATIONS = (
    numbers.BASELINE,
    numbers.PAPER,
    numbers.TRUNCATE,
    numbers.PERIODIC,
    *(f"gcomp:importance=uniform,bits={bits}" for bits in (10, 12, 8, 14, 6, 16)),
    numbers.STATIC,
    PLAIN_DDP,  # lossless in another order of summation: the floor of what a deviation can mean
    "gcomp:importance=paper,topology=direct",
)
# With ReLU instead of SiLU training is chaotic: one unit in the last place of one gradient grows to 1e-3 of loss within
# 40 steps, so that all deviations come to the same, lossless or not.
WORKLOADS = ("gpt", "resnet:activation=silu")
_TOPOLOGIES = ("ring", "direct")
_SHOWN = ("deviation_mean", "deviation_p50", "deviation_max", "below_truncate", "below_periodic", "ratio_mean",
          "ratio_last_10", "loss_last_10", "held_out_loss", "accuracy")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gradwire bench fidelity`."""
    parser.add_argument(
        "--workload",
        nargs="+",
        default=list(WORKLOADS),
        metavar="NAME",
        help=f"what to train, options as NAME:option=value,... ({' '.join(WORKLOADS)})",
    )
    parser.add_argument(
        "--scheme",
        nargs="+",
        default=["all"],
        metavar="NAME",
        help=f"configurations, as NAME:option=value,...; `all` is the {len(CONFIGURATIONS)} of the figures (default); "
        f"{numbers.BASELINE}, which all are compared with, is always run",
    )
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="ranks on this machine (4)")
    parser.add_argument("--rate", default="none", metavar="RATE", help="each rank's link, such as 1gbit (none)")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="steps a run (300)")
    parser.add_argument("--batch-size", type=int, metavar="N", help="samples a rank and step (the workload's own)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and batches (0)")
    parser.add_argument("--out", type=Path, default=Path("runs/fidelity"), metavar="DIR", help="folder of the runs, "
                        "plots and numbers (runs/fidelity); a run that is finished there is not run again")  # fmt: skip
    parser.add_argument("--dump-gradients", type=int, default=50, metavar="EVERY", help="steps between gradients that the "
                        "baseline saves for `bench gcomp-figures` and `bench codec` (50; 0: none)")  # fmt: skip
    parser.add_argument("--times", action="store_true", help="CPU load and time to a loss too: on a quiet machine only")
    parser.add_argument("--no-train", action="store_true", help="report on the runs that are finished, start none")
    parser.add_argument("--hashes", action="store_true", help="instead: parameters after training on 1 to N ranks, "
                        "ring and direct, equal bit by bit on all ranks")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here too")


def run(args: argparse.Namespace) -> int:
    """Train what is not there yet, then compute, print and write."""
    if args.ranks < 1:
        raise InvalidArgument(f"--ranks {args.ranks}: expected at least 1")
    if args.hashes:
        return _run_hashes(args)
    try:
        from gradwire.bench.figures import fidelity_plots
    except ImportError as error:
        raise Unsupported(f"the figures need matplotlib ({error}); pip install 'gradwire[report]'") from error
    console = make_console()
    planned = plan(args)
    if not args.no_train:
        run_planned(planned, console)
    by_workload = _load(planned)
    figures = measure(by_workload, args.times)
    fidelity_plots.plot_all(by_workload, figures, args.out)
    flat = [{"figure": name, **record} for name, records in figures.items() for record in records]
    write_json(args.out / "fidelity.json", flat)
    if args.json:
        write_json(args.json, flat)
    for name, records in figures.items():
        write_csv(args.out / f"{name}.csv", records)
    write_csv(args.out / "steps.csv", list_steps(by_workload))
    markdown = to_markdown(figures)
    write_text(args.out / "fidelity.md", markdown)
    console.print(markdown, markup=False, highlight=False, soft_wrap=True)
    console.print(f"plots and numbers: {args.out}")
    return 0


def plan(args: argparse.Namespace) -> list[PlannedRun]:
    """The runs in their order: every workload under one configuration before the next configuration.

    Raises: InvalidArgument, Unsupported (a workload, scheme or option that there is not).
    """
    asked = [one for spec in args.scheme for one in (CONFIGURATIONS if spec == "all" else [spec])]
    specs = list(dict.fromkeys([numbers.BASELINE, *asked]))
    planned = []
    for spec in specs:
        for workload in dict.fromkeys(args.workload):
            every = args.dump_gradients if spec == numbers.BASELINE else 0
            folder = args.out / folder_name(workload) / folder_name(spec)
            config = _configure(args, workload, spec, folder, every)
            planned.append(PlannedRun(spec, workload, config, args.ranks, args.rate))
            launching.check(planned[-1].config)
    return planned


def _configure(args: argparse.Namespace, workload: str, spec: str, folder: Path, dump_every: int = 0) -> TrainConfig:
    (workload_name, workload_options), (scheme, options) = parse_spec(workload), parse_spec(spec)
    return TrainConfig(
        workload=workload_name,
        workload_options=workload_options,
        scheme=scheme,
        scheme_options=options,
        steps=args.steps,
        batch_size=args.batch_size,
        seed=args.seed,
        out=folder,
        dump_gradients_every=dump_every,
    )


def _load(planned: Sequence[PlannedRun]) -> dict[str, dict[str, FinishedRun]]:
    """{workload: {configuration: run}} of what is finished. Raises: InvalidArgument (a workload without baseline)."""
    by_workload: dict[str, dict[str, FinishedRun]] = {}
    for one in planned:
        finished = one.find_finished()
        if finished is not None:
            by_workload.setdefault(finished.workload, {})[finished.name] = finished
    for workload in dict.fromkeys(one.workload for one in planned):
        if numbers.BASELINE not in by_workload.get(workload, {}):
            raise InvalidArgument(f"{workload} has no finished run of {numbers.BASELINE}: leave --no-train out")
    return by_workload


def measure(by_workload: dict[str, dict[str, FinishedRun]], with_times: bool) -> dict[str, Records]:
    """{figure: flat records}, all workloads in one list."""
    functions = {"fidelity": numbers.describe_fidelity, "exponents": numbers.describe_exponents}
    if with_times:
        functions["times"] = numbers.describe_times
    found = {
        name: [record for runs in by_workload.values() for record in describe(runs)]
        for name, describe in functions.items()
    }
    return {name: records for name, records in found.items() if records}


def list_steps(by_workload: dict[str, dict[str, FinishedRun]]) -> Records:
    """Every step of every run: loss, deviation, ratio; for plots of one's own."""
    records: Records = []
    for workload, runs in by_workload.items():
        for name, finished in runs.items():
            deviations = numbers.loss_deviation(finished, runs[numbers.BASELINE])
            for step, deviation in zip(finished.steps, deviations, strict=True):
                figures = {key: step[key] for key in ("step", "loss", "ratio")}
                records.append({"workload": workload, "configuration": name, **figures, "deviation": float(deviation)})
    return records


def to_markdown(figures: dict[str, Records]) -> str:
    """The tables as Markdown, one a workload and figure."""
    lines: list[str] = []
    for name, records in figures.items():
        for workload in dict.fromkeys(record["workload"] for record in records):
            group = [record for record in records if record["workload"] == workload]
            if name == "fidelity":
                first = group[0]
                title = f"{workload}, {first['optimizer']}, {first['ranks']} ranks, {first['steps']} steps"
                columns = ["configuration", *_SHOWN, "replicas_equal"]
            else:
                title, columns = f"{name}, {workload}", [column for column in group[0] if column != "workload"]
            columns = [column for column in columns if any(record[column] is not None for record in group)]
            lines += [f"### {title}", "", "| " + " | ".join(column.replace("_", " ") for column in columns) + " |"]
            lines.append("|" + "---|" * len(columns))
            lines += ["| " + " | ".join(_cell(column, record[column]) for column in columns) + " |" for record in group]
            lines.append("")
    return "\n".join(lines)


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    if column.startswith("below_") or column.endswith(("_share", "_load")):
        return f"{100 * value:.2f} %"
    return f"{value:.2e}" if column.startswith("deviation") else f"{value:.4g}"


def _run_hashes(args: argparse.Namespace) -> int:
    console = make_console()
    records: Records = []
    for workload in dict.fromkeys(args.workload):
        folder = args.out / "hashes" / folder_name(workload)
        for topology in _TOPOLOGIES:
            spec = f"{numbers.PAPER},topology={topology}"
            planned = [
                PlannedRun(
                    spec,
                    workload,
                    _configure(args, workload, spec, folder / f"{topology}-{n_ranks}"),
                    n_ranks,
                    args.rate,
                )
                for n_ranks in range(1, args.ranks + 1)
            ]
            records += _hash_records(planned, topology, args, console)
    for workload in dict.fromkeys(record["workload"] for record in records):
        console.print(make_table(f"parameters, {workload}", [one for one in records if one["workload"] == workload]))
    write_json(args.out / "hashes.json", records)
    if args.json:
        write_json(args.json, records)
    return 0


def _hash_records(planned: Sequence[PlannedRun], topology: str, args: argparse.Namespace, console: Console) -> Records:
    if not args.no_train:
        run_planned(planned, console)
    return [
        {
            "workload": one.workload,
            "topology": topology,
            "ranks": one.n_ranks,
            "steps": one.config.steps,
            "n_parameters": finished.summary["n_parameters"],
            "replicas_equal": finished.summary["replicas_equal"],
            "parameters_sha256": finished.summary["parameters_sha256"],
        }
        for one in planned
        if (finished := one.find_finished()) is not None
    ]
