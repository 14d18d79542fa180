"""gradwire bench compression-cost: what compressing one step's gradient costs a rank, without any network."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from gradwire import workloads
from gradwire.bench.compression_cost_steps import YARDSTICK, measure, rank_of
from gradwire.errors import InvalidArgument
from gradwire.registry import parse_spec
from gradwire.results.console import make_console
from gradwire.results.records import write_csv, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gradwire bench compression-cost`."""
    parser.add_argument("--scheme", nargs="+", default=["acp-sgd", "power-sgd", "power-sgd-overlap"], metavar="NAME",
                        help="schemes that sum or gather, as NAME:option=value,... (acp-sgd power-sgd power-sgd-overlap); "
                        "beside PyTorch's powerSGD_hook with the same rank")  # fmt: skip
    parser.add_argument("--workload", nargs="+", default=["resnet50", "bert-base"], metavar="NAME",
                        help="whose shapes, filled with random numbers (resnet50 bert-base)")  # fmt: skip
    parser.add_argument(
        "--rank", type=int, metavar="R", help="of all low-rank methods (the paper's: 32 for BERT, else 4)"
    )
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="steps that count (8; ACP-SGD's alternate)")
    parser.add_argument("--warmup", type=int, default=4, metavar="N", help="steps before them (4)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of torch and of gradwire (1)")
    parser.add_argument("--bucket-mb", type=float, default=25.0, metavar="MB", help="DDP's bucket size (25)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a list of flat records")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the records as a table")
    parser.add_argument("--out-here", type=Path, help=argparse.SUPPRESS)  # in the measuring process: where records go


def run(args: argparse.Namespace) -> int:
    """Measure in a process of its own, whose thread count is set before torch starts; print, write."""
    check(args)
    if args.out_here is not None:
        write_json(
            args.out_here, [one for name in args.workload for one in measure(name, args.rank or rank_of(name), args)]
        )
        return 0
    records = _measure_apart(args)
    make_console().print(make_table(records))
    if args.json:
        write_json(args.json, records)
    if args.csv:
        write_csv(args.csv, records)
    return 0


def _measure_apart(args: argparse.Namespace) -> list[dict[str, Any]]:
    import json
    import tempfile

    from gradwire.ranks.launch import start_ranks
    from gradwire.ranks.supervisor import end_on_signals

    with tempfile.TemporaryDirectory(prefix="gradwire-bench-") as folder:
        out = Path(folder) / "records.json"
        command = [sys.executable, "-m", "gradwire", "bench", "compression-cost", *args.arguments]
        # PyTorch's hook computes on the backend's threads, where OpenMP has its own idea of how many threads there are.
        environment = {"OMP_NUM_THREADS": str(args.threads), "MKL_NUM_THREADS": str(args.threads)}
        with end_on_signals(), start_ranks([*command, "--out-here", str(out)], 1, env=environment) as launch:
            launch.wait().raise_if_failed()
        records: list[dict[str, Any]] = json.loads(out.read_text())
    return records


def check(args: argparse.Namespace) -> None:
    """Raises: InvalidArgument, before anything is allocated."""
    from gradwire import schemes

    if args.steps < 1 or args.warmup < 2:
        raise InvalidArgument("--steps counts from 1 and --warmup from 2 (each of ACP-SGD's two kinds of step once)")
    if args.threads < 1 or args.threads > (os.cpu_count() or 1):
        raise InvalidArgument(f"--threads {args.threads}: expected 1 to {os.cpu_count()}")
    if args.rank is not None and args.rank < 1:
        raise InvalidArgument(f"--rank {args.rank}: expected at least 1")
    if not args.bucket_mb > 0:
        raise InvalidArgument(f"--bucket-mb {args.bucket_mb}: expected more than 0")
    for name in args.workload:
        if name not in workloads.names():
            raise InvalidArgument(f"no workload is called {name!r}; there are: {', '.join(workloads.names())}")
    for spec in args.scheme:
        name, options = parse_spec(spec)
        schemes.by_name(name, **options)


def make_table(records: Sequence[dict[str, Any]]) -> Table:
    """The records, for people."""
    first = records[0]
    table = Table(
        title=f"one step's compression on one rank, {first['n_threads']} thread(s), communication left out",
        caption="ms a step, medians (quartiles) of steps taken in turns; encode, decode and commit: parts of it",
    )
    for heading in ("workload", "scheme", "options"):
        table.add_column(heading)
    for heading in ("rank", "step", f"x {YARDSTICK}", "encode", "decode", "commit"):
        table.add_column(heading, justify="right")
    for record in records:
        table.add_row(
            record["workload"],
            record["scheme"],
            record["options"],
            str(record["rank"]),
            f"{record['step_s'] * 1e3:.1f} ({record['step_s_low'] * 1e3:.1f}-{record['step_s_high'] * 1e3:.1f})",
            f"{record['ratio']:.2f}",
            *(
                "-" if record[key] is None else f"{record[key] * 1e3:.1f}"
                for key in ("encode_s", "decode_s", "commit_s")
            ),
        )
    return table
