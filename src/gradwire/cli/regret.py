"""`gradwire regret`: auto beside DDP and every scheme that it may use; exit status 1 where a bar is missed."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from gradwire.bench.regret import RATES, WORKLOADS, below_the_bars, cell_of, measure_regret, read_records, train_as_rank
from gradwire.report.regret import draw_step_times


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], metavar="N")
    parser.add_argument("--rate", nargs="+", default=list(RATES), metavar="RATE")
    parser.add_argument("--fidelity", nargs="+", default=["exact", "close", "any"])
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="of each contender (default: 300)")
    parser.add_argument("--seconds", type=float, default=60, help="of auto and of DDP, at most (default: 60)")
    parser.add_argument(
        "--quick", action="store_true", help="gpt and many-tensors, 2 ranks, 100mbit and none, exact, 60 steps"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/regret.jsonl"), metavar="FILE", help="resumed if it exists"
    )
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="measure nothing; draw the records in --out")


def run(args: argparse.Namespace) -> int:
    """Measure what is not in the file yet; print a line a cell."""
    if args.picture is not None:
        print(draw_step_times(read_records(args.out), args.picture))
        return 0
    if "RANK" in os.environ:
        train_as_rank(args.workload[0], args.fidelity[0], args.steps, args.seconds)
        return 0
    if args.quick:
        args.workload, args.ranks, args.rate, args.fidelity = (
            ["gpt", "many-tensors"],
            [2],
            ["100mbit", "none"],
            ["exact"],
        )
        args.steps, args.seconds = min(args.steps, 60), min(args.seconds, 20)
    records = read_records(args.out)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    wanted = measure_regret(
        args.workload, args.ranks, args.rate, args.fidelity, args.steps, args.seconds, list(records)
    )
    with args.out.open("a") as file:
        for record in wanted:
            file.write(json.dumps(record) + "\n")
            file.flush()
            records.append(record)
            workload, n_ranks, rate, fidelity = cell_of(record)
            print(
                f"{workload:15} {n_ranks} ranks {rate:8} {fidelity:6} {record['x_ddp']:.3f} x DDP, second half "
                f"{record['x_best_last_half']:.3f} of the best ({record['best']}); ends with {record['ends_with']}",
                flush=True,
            )
    missed = below_the_bars(records)
    for line in missed:
        print(f"below the bar: {line}")
    return 1 if missed else 0
