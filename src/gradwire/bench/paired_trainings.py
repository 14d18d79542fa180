"""Many small trainings of the same seeds and folds under several schemes: planned, run in one set of ranks, resumable.

Ranks are started once and train one case after another; each finished case is a line in cases.jsonl, and is not trained
again.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire import workloads
from gradwire.bench.launching import DEFAULT_RANKS, add_rank_arguments, check_rank_arguments, is_rank, run_in_ranks
from gradwire.errors import InvalidArgument
from gradwire.registry import parse_spec
from gradwire.results.console import make_console
from gradwire.results.records import RecordLog, write_json, write_text

FULL = "full precision"
_FOLDED = ("resnet", "vgg")  # workloads whose data is cut into folds
# Of a scheme's spec, what is DDP's: schemes that work by block want buckets no larger than their blocks.
_BUCKET_MB = "bucket_mb"

Record = dict[str, Any]
Summarize = Callable[[Sequence["Case"], Mapping[str, Record]], list[Record]]


@dataclass(frozen=True)
class Case:
    """One training: `part`, `group` and `name` say where it is shown; `scheme` and `workload` are specs.

    `bucket_mb=SIZE` in a scheme's spec is DDP's bucket_cap_mb.
    """

    part: str
    group: str
    name: str
    scheme: str
    workload: str
    seed: int

    @property
    def key(self) -> str:
        return f"{self.workload}|{self.scheme}|{self.seed}"


def add_arguments(
    parser: argparse.ArgumentParser, workload: Sequence[str], out: Path, steps: int = 300, seeds: int = 10
) -> None:
    """The options that every comparison of this kind has, with its defaults."""
    add_rank_arguments(parser)
    parser.add_argument("--workload", nargs="+", default=list(workload), metavar="SPEC",
                        help=f"what to train ({' '.join(workload)}); {' and '.join(_FOLDED)} run on every fold. With "
                        "rate_scaling=linear or square-root the learning rate follows the ranks' batch")  # fmt: skip
    parser.add_argument("--steps", type=int, default=steps, metavar="N", help=f"steps a training ({steps})")
    parser.add_argument("--folds", type=int, default=5, metavar="N", help="folds of the digits (5)")
    parser.add_argument("--seeds", type=int, default=seeds, metavar="N", help=f"seeds a fold ({seeds})")
    parser.add_argument("--gpt-seeds", type=int, default=3, metavar="N", help="seeds of every other workload (3)")
    parser.add_argument("--out", type=Path, default=out, metavar="DIR", help=f"cases, numbers and plot ({out})")
    parser.add_argument("--report", action="store_true", help="train nothing: report on what is finished")


def folds_and_seeds(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """(workload spec, seed) of every training of one scheme; seeds outermost, so that any moment is a fair comparison."""
    for seed in range(max(args.seeds, args.gpt_seeds)):
        for workload in args.workload:
            is_folded = parse_spec(workload)[0] in _FOLDED
            if seed >= (args.seeds if is_folded else args.gpt_seeds):
                continue
            for fold in range(args.folds if is_folded else 1):
                yield (
                    _with(workload, f"folds={args.folds},fold={fold}") if is_folded and args.folds > 1 else workload,
                    seed,
                )


def check_arguments(args: argparse.Namespace, *counts: str) -> None:
    """Raises: InvalidArgument; `counts` are more options that count from 1."""
    for name in ("steps", "folds", "seeds", "gpt_seeds", *counts):
        if getattr(args, name) < 1:
            raise InvalidArgument(f"--{name.replace('_', '-')} counts from 1")
    for spec in args.workload:
        if parse_spec(spec)[0] not in workloads.names():
            raise InvalidArgument(f"no workload is called {spec!r}; there are: {', '.join(workloads.names())}")
    if args.rate and len(args.rate) > 1:
        raise InvalidArgument("--rate: one network at a time here; run again with another rate and another --out")
    check_rank_arguments(args)


def run(bench: str, args: argparse.Namespace, cases: Sequence[Case]) -> tuple[int, dict[str, Record]] | None:
    """Train what is not finished; the status, and what is finished by case key. None on a rank, which only trains.

    Raises: PeerLost, GradwireError.
    """
    if is_rank():
        _train_all(args, cases)
        return None
    status = 0
    if not args.report:
        args.out.mkdir(parents=True, exist_ok=True)
        args.arguments = [word for word in args.arguments if word != "--report"]
        status = run_in_ranks(bench, args)
    return status, finished(args.out, args)


def write(bench: str, args: argparse.Namespace, records: list[Record], markdown: str, n_finished: int) -> None:
    """Numbers and table into the folder, and onto the screen."""
    write_json(args.out / f"{bench}.json", records)
    if args.json:
        write_json(args.json, records)
    write_text(args.out / f"{bench}.md", markdown)
    console = make_console()
    console.print(markdown, markup=False, highlight=False, soft_wrap=True)
    console.print(f"{n_finished} trainings; numbers and plot: {args.out}")


def finished(out: Path, args: argparse.Namespace) -> dict[str, Record]:
    """{case key: its record}, of the trainings with these steps, ranks and rate."""
    n_ranks, rate = args.ranks or DEFAULT_RANKS, _rate_of(args)
    return {
        record["key"]: record
        for record in RecordLog(out / "cases.jsonl").read()
        if (record["steps"], record["ranks"], record.get("rate", "none")) == (args.steps, n_ranks, rate)
    }


def _rate_of(args: argparse.Namespace) -> str:
    return str(args.rate[0]) if args.rate else "none"


def _train_all(args: argparse.Namespace, cases: Sequence[Case]) -> None:
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


def _train(case: Case, args: argparse.Namespace) -> Record:
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
    ddp_options = workload.ddp_options()
    if _BUCKET_MB in scheme_options:
        ddp_options["bucket_cap_mb"] = float(scheme_options.pop(_BUCKET_MB))
    ddp = DistributedDataParallel(model, **ddp_options)
    optimizer = workload.build_optimizer(model)
    scheduler = workload.build_scheduler(optimizer)
    attachment = gradwire.attach(ddp, optimizer, schemes.by_name(scheme_name, **scheme_options))
    losses, ends_s = [], [time.perf_counter()]
    for batch in _first(workload.batches(rank, world_size, None, case.seed), args.steps):
        optimizer.zero_grad(set_to_none=True)
        loss = workload.loss(ddp, batch)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(float(loss.detach()))
        ends_s.append(time.perf_counter())
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
        "rate": _rate_of(args),
        "loss": float(mean_loss) / world_size if bool(mean_loss.isfinite()) else None,
        "iteration_s": statistics.median(end - start for start, end in itertools.pairwise(ends_s)),
        "ratio": stats["ratio"],
        "share_compressed": stats.get("share_compressed"),
        **{name: value if math.isfinite(value) else None for name, value in evaluation.items()},
    }


def _first(batches: Any, n: int) -> Any:
    for _, batch in zip(range(n), batches, strict=False):
        yield batch


def _with(spec: str, options: str) -> str:
    return f"{spec},{options}" if ":" in spec else f"{spec}:{options}"
