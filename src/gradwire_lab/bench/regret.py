"""gradwire bench regret: what `auto` loses, against DDP without gradwire and against every fixed scheme that it may use.

All train in the same processes in turns of ten steps, so a machine that is busy for a while is busy for all of them; `auto`
sees its own steps alone and pays for its own trials. Fixed schemes, whose steps are all alike, take every third turn,
and auto is compared with them in these.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.errors import InvalidArgument
from gradwire.registry import parse_spec, spec_of
from gradwire_lab import workloads
from gradwire_lab.bench.launching import check_rank_arguments, is_rank, run_in_ranks
from gradwire_lab.bench.train import check_changes
from gradwire_lab.results.records import RecordLog
from gradwire_lab.results.tables import Grid, print_grid

# The bars: against DDP over the whole run, and in its second half against the best fixed scheme allowed.
LEAST_X_DDP, LEAST_X_BEST = 0.98, 0.95


def run(args: argparse.Namespace) -> int:
    """Measure as a rank, or start the ranks that do; with `--check` status 1 where a bar is missed."""
    if args.steps < 20:
        raise InvalidArgument(f"--steps {args.steps}: auto needs 20 or more to try anything")
    workloads.check_name(parse_spec(args.workload)[0])
    if "ddp" not in args.scheme:
        raise InvalidArgument("--scheme has to name ddp: what auto loses is counted against it")
    check_rank_arguments(args)
    check_changes(args)
    if is_rank():
        from gradwire_lab.bench.regret_rank import train_as_rank

        train_as_rank(args)
        return 0
    with tempfile.TemporaryDirectory(prefix="gradwire-bench-") as folder:
        args.log = args.log or Path(folder) / "records.jsonl"
        run_in_ranks("regret", args)
        records = RecordLog(args.log).read()
    print_grid(make_grid(records), wide=True)
    missed = below_the_bars(records)
    for line in missed:
        print(f"below the bar: {line}")
    return 1 if missed and args.check else 0


def below_the_bars(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each record of auto that misses a bar."""
    lines = []
    for record in records:
        if record["scheme"] == "auto" and (record["x_ddp"] < LEAST_X_DDP or record["x_best_last_half"] < LEAST_X_BEST):
            lines.append(
                f"{record['workload']}, {record['ranks']} ranks, {record['rates']}, {record['fidelity']}: "
                f"{record['x_ddp']:.3f} x DDP, second half {record['x_best_last_half']:.3f} of the best "
                f"({record['best']}); ends with {record['ends_with']}"
            )
    return lines


def make_grid(records: Sequence[Mapping[str, Any]]) -> Grid:
    """For people: a line for each method and network."""
    rows = []
    for record in records:
        is_auto = record["scheme"] == "auto"
        rows.append(
            [
                record["rates"],
                spec_of(record),
                f"{1e3 * record['iteration_s']:.1f}",
                f"{record['x_ddp']:.3f}",
                f"{record['x_best_last_half']:.3f}" if is_auto else "",
                record["best"] if is_auto else "",
                record["ends_with"] if is_auto else "",
                str(record["good_after"]) if is_auto else "",
            ]
        )
    first = records[0]
    return Grid(
        f"{first['workload']}, {first['ranks']} ranks, {first['n_steps']} steps",
        ["links", "", "step ms", "x DDP", "x best, 2nd half", "best", "ends with", "good after"],
        rows,
        "x DDP and x best: above 1 is faster; all trials are on auto's own bill",
        2,
    )
