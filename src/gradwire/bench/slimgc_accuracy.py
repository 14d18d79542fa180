"""gradwire bench slimgc-accuracy: SlimGC's Figs. 9 to 11, what its strategies give back of the accuracy that bits cost.

One command, resumable: ranks are started once and train one case after another; each finished case is a line in
cases.jsonl, and is not trained again.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire import workloads
from gradwire.bench.console import make_console
from gradwire.bench.launching import DEFAULT_RANKS, add_rank_arguments, check_rank_arguments, is_rank, run_in_ranks
from gradwire.bench.records import RecordLog, write_json
from gradwire.bench.specs import parse_spec
from gradwire.errors import InvalidArgument, Unsupported

FULL = "full precision"
_CODECS = {"1-bit": "one-bit", "2-bit": "two-bit"}
# Fig. 10: what a 2-bit value stands for, in mean magnitudes; 1 bit takes its scale from the values and has none.
_COMPRESSION_THRESHOLDS = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8)
_COMMUNICATION_THRESHOLDS = (0, 1_500, 15_000, 150_000)  # Fig. 11, bytes
PARTS = ("strategies", "compression", "communication")


@dataclass(frozen=True)
class Case:
    """One training: `group` and `name` say where it is plotted; `scheme` and `workload` are specs."""

    part: str
    group: str
    name: str
    scheme: str
    workload: str
    seed: int

    @property
    def key(self) -> str:
        return f"{self.workload}|{self.scheme}|{self.seed}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gradwire bench slimgc-accuracy`."""
    add_rank_arguments(parser)
    parser.add_argument("--workload", nargs="+", default=["resnet:width=16", "gpt"], metavar="SPEC",
                        help="what to train (resnet:width=16 gpt); resnet runs on every fold. With "
                        "rate_scaling=linear or square-root the learning rate follows the ranks' batch (Fig. 10)")  # fmt: skip
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=PARTS, help="figures 9, 10, 11 (all)")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="steps a training (300)")
    parser.add_argument("--folds", type=int, default=5, metavar="N", help="folds of the digits (5)")
    parser.add_argument("--seeds", type=int, default=10, metavar="N", help="seeds a fold (10)")
    parser.add_argument("--gpt-seeds", type=int, default=3, metavar="N", help="seeds of every other workload (3)")
    parser.add_argument("--sweep-seeds", type=int, default=2, metavar="N", help="seeds a fold in figures 10 and 11 (2)")
    parser.add_argument("--threshold-bytes", type=int, default=15_000, metavar="N",
                        help="communication threshold of figures 9 and 10 (15000, the paper's best)")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("runs/slimgc-accuracy"), metavar="DIR")
    parser.add_argument("--report", action="store_true", help="train nothing: report on what is finished")


def plan(args: argparse.Namespace) -> list[Case]:
    """Every case, the ones that all figures need first; seeds outermost, so that any moment is a fair comparison."""
    cases: dict[str, Case] = {}
    for seed in range(max(args.seeds, args.gpt_seeds)):
        for workload in args.workload:
            is_folded = parse_spec(workload)[0] == "resnet"
            if seed >= (args.seeds if is_folded else args.gpt_seeds):
                continue
            for fold in range(args.folds if is_folded else 1):
                spec = _with(workload, f"folds={args.folds},fold={fold}") if is_folded and args.folds > 1 else workload
                for part in args.part:
                    if part != "strategies" and seed >= args.sweep_seeds:
                        continue
                    for group, name, scheme in configurations(part, args.threshold_bytes):
                        case = Case(part, group, name, scheme, spec, seed)
                        cases.setdefault(f"{part}|{group}|{name}|{case.key}", case)
    return list(cases.values())


def configurations(part: str, threshold_bytes: int) -> list[tuple[str, str, str]]:
    """(group, name, scheme spec) of one figure."""
    found: list[tuple[str, str, str]] = []
    for bits, codec in _CODECS.items():
        bare = f"slimgc:codec={codec}"
        if part == "strategies":
            found += [
                (bits, FULL, "plain"),
                (bits, "bare", f"{bare},threshold_bytes=0"),
                (bits, "threshold", f"{bare},threshold_bytes={threshold_bytes}"),
                (bits, "everything", f"{bare},threshold_bytes={threshold_bytes},backup=true"),
            ]
        elif part == "compression" and bits == "2-bit":
            for value in _COMPRESSION_THRESHOLDS:
                for name, options in (
                    ("bare", "threshold_bytes=0"),
                    ("everything", f"threshold_bytes={threshold_bytes},backup=true"),
                ):
                    found.append((f"{bits}, {name}", f"{value:g}", f"{bare},threshold={value},{options}"))
        elif part == "communication":
            for value in _COMMUNICATION_THRESHOLDS:
                for name, options in (("threshold", ""), ("everything", ",backup=true")):
                    found.append((f"{bits}, {name}", f"{value}", f"{bare},threshold_bytes={value}{options}"))
    return found


def run(args: argparse.Namespace) -> int:
    """Train as a rank, or start the ranks and report."""
    for name in ("steps", "folds", "seeds", "gpt_seeds", "sweep_seeds"):
        if getattr(args, name) < 1:
            raise InvalidArgument(f"--{name.replace('_', '-')} counts from 1")
    for spec in args.workload:
        if parse_spec(spec)[0] not in workloads.names():
            raise InvalidArgument(f"no workload is called {spec!r}; there are: {', '.join(workloads.names())}")
    check_rank_arguments(args)
    cases = plan(args)
    if is_rank():
        return _train_all(args, cases)
    try:
        from gradwire.bench.figures import slimgc_accuracy as figures
    except ImportError as error:
        raise Unsupported(f"the figures need matplotlib ({error}); pip install 'gradwire[report]'") from error
    status = 0
    if not args.report:
        args.out.mkdir(parents=True, exist_ok=True)
        args.arguments = [word for word in args.arguments if word != "--report"]
        status = run_in_ranks("slimgc-accuracy", args)
    results = finished(args.out, args)
    records = figures.summarize(cases, results)
    write_json(args.out / "slimgc-accuracy.json", records)
    if args.json:
        write_json(args.json, records)
    figures.plot(records, args.out / "slimgc-accuracy.svg")
    console = make_console()
    console.print(figures.to_markdown(records), markup=False, highlight=False, soft_wrap=True)
    console.print(f"{len(results)} trainings; numbers and plot: {args.out}")
    return status


def finished(out: Path, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """{case key: its record}, of the trainings with these steps and ranks."""
    n_ranks = args.ranks or DEFAULT_RANKS
    return {
        record["key"]: record
        for record in RecordLog(out / "cases.jsonl").read()
        if record["steps"] == args.steps and record["ranks"] == n_ranks
    }


def _train_all(args: argparse.Namespace, cases: Sequence[Case]) -> int:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    args.ranks = dist.get_world_size()
    torch.set_num_threads(1)
    done: list[Any] = [None]
    if dist.get_rank() == 0:
        done[0] = sorted(finished(args.out, args))
    dist.broadcast_object_list(done)
    left = {case.key: case for case in cases if case.key not in set(done[0])}
    log, spent = RecordLog(args.out / "cases.jsonl"), []
    if dist.get_rank() == 0:
        print(f"{len(left)} trainings to do, {len(done[0])} done before", flush=True)
    for number, case in enumerate(left.values(), start=1):
        started = time.monotonic()
        record = _train(case, args)
        spent.append(time.monotonic() - started)
        if dist.get_rank() == 0:
            log.append([record])
            figure = record.get("accuracy", record.get("held_out_loss", record["loss"]))
            shown = "not finite" if figure is None else f"{figure:.4f}"
            left_s = statistics.fmean(spent[-20:]) * (len(left) - number)
            print(
                f"[{number}/{len(left)}] {case.workload}, {case.scheme}, seed {case.seed}: {shown} "
                f"({spent[-1]:.1f} s; about {left_s / 60:.0f} min left)",
                flush=True,
            )
    dist.destroy_process_group()
    return 0


def _train(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """One training on all ranks; the record is whole on rank 0."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import gradwire
    from gradwire import schemes

    rank, world_size = dist.get_rank(), dist.get_world_size()
    (name, options), (scheme_name, scheme_options) = parse_spec(case.workload), parse_spec(case.scheme)
    workload = workloads.by_name(name, **options)
    torch.manual_seed(1_000 * case.seed + rank)
    model = workload.build_model(case.seed)
    ddp = DistributedDataParallel(model, **workload.ddp_options())
    optimizer = workload.build_optimizer(model)
    scheduler = workload.build_scheduler(optimizer)
    attachment = gradwire.attach(ddp, optimizer, schemes.by_name(scheme_name, **scheme_options))
    losses = []
    for batch in _first(workload.batches(rank, world_size, None, case.seed), args.steps):
        optimizer.zero_grad(set_to_none=True)
        loss = workload.loss(ddp, batch)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss.detach()))
    attachment.flush()
    mean_loss = torch.tensor([statistics.fmean(losses[-10:])], dtype=torch.float64)
    dist.all_reduce(mean_loss)
    evaluation = workload.evaluate(model) if rank == 0 else {}
    stats = attachment.stats()
    attachment.close()
    dist.barrier()
    return {
        "key": case.key,
        "workload": case.workload,
        "scheme": case.scheme,
        "seed": case.seed,
        "steps": args.steps,
        "ranks": world_size,
        "loss": float(mean_loss) / world_size if bool(mean_loss.isfinite()) else None,
        "ratio": stats["ratio"],
        "share_compressed": stats.get("share_compressed"),
        **{name: value if math.isfinite(value) else None for name, value in evaluation.items()},
    }


def _first(batches: Any, n: int) -> Any:
    for _, batch in zip(range(n), batches, strict=False):
        yield batch


def _with(spec: str, options: str) -> str:
    return f"{spec},{options}" if ":" in spec else f"{spec}:{options}"
