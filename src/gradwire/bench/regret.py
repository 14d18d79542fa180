"""gradwire bench regret: what `auto` loses, against DDP without gradwire and against every fixed scheme that it may use.

All train in the same processes in turns of ten steps, so a machine that is busy for a while is busy for all of them; `auto`
sees its own steps alone and pays for its own trials. Fixed schemes, whose steps are all alike, take every third turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire import workloads
from gradwire.bench.launching import check_rank_arguments, is_rank, run_in_ranks
from gradwire.bench.train import check_changes
from gradwire.errors import InvalidArgument
from gradwire.registry import parse_spec
from gradwire.results.records import RecordLog
from gradwire.results.tables import Grid, print_grid

# The bars: against DDP over the whole run, and in its second half against the best fixed scheme allowed.
LEAST_X_DDP, LEAST_X_BEST = 0.98, 0.95
_GOOD = 1.06  # of the best, is as good as the best
_OF_STEPS, _GOOD_STEPS = 20, 18


def run(args: argparse.Namespace) -> int:
    """Measure as a rank, or start the ranks that do; with `--check` status 1 where a bar is missed."""
    if args.steps < 20:
        raise InvalidArgument(f"--steps {args.steps}: auto needs 20 or more to try anything")
    if parse_spec(args.workload)[0] not in workloads.names():
        raise InvalidArgument(f"no workload is called {args.workload!r}; there are: {', '.join(workloads.names())}")
    if "ddp" not in args.scheme:
        raise InvalidArgument("--scheme has to name ddp: what auto loses is counted against it")
    check_rank_arguments(args)
    check_changes(args)
    if is_rank():
        from gradwire.bench.regret_rank import train_as_rank

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


def make_records(
    steps_s: Mapping[str, Sequence[float]], autos: Mapping[str, Mapping[str, Any]], first: int = 0
) -> dict[str, dict[str, Any]]:
    """{contender: its figures} of one phase of a run.

    Args:
        steps_s: every contender's seconds a step, "ddp" among them; fixed schemes may have fewer steps.
        autos: {contender: `stats()["auto"]` of it}.
        first: the number of auto's first step of the phase.

    `x_ddp`: over all steps. `x_best_last_half`: against `best`, which of DDP and the schemes that this auto may use takes least
    in the second half. Above 1 auto is faster. `good_after`: steps until 18 of 20 ran under a scheme within 6 % of the best.
    """
    mean = {spec: statistics.fmean(values) for spec, values in steps_s.items()}
    late = {spec: statistics.fmean(values[len(values) // 2 :]) for spec, values in steps_s.items()}
    found: dict[str, dict[str, Any]] = {}
    for spec, values in steps_s.items():
        ordered = sorted(values)
        found[spec] = {
            "iteration_s": statistics.median(ordered),
            "iteration_s_low": ordered[len(ordered) // 4],
            "iteration_s_high": ordered[len(ordered) * 3 // 4],
            "late_s": late[spec],
            "n_steps": len(values),
            "x_ddp": mean["ddp"] / mean[spec],
            "x_ddp_last_half": late["ddp"] / late[spec],
        }
    for spec, auto in autos.items():
        allowed = {c["spec"]: c for c in auto["candidates"] if not c["excluded"]}
        rivals = ["ddp", *(one for one in steps_s if one in allowed)]
        best = min(rivals, key=lambda one: (late[one], one))
        last = first + len(steps_s[spec])
        medians = {one: found[one]["iteration_s"] for one in rivals} | {"plain": found["ddp"]["iteration_s"]}
        errors = sorted(
            abs(1e-3 * c["predicted_ms"] / medians[one] - 1) for one, c in allowed.items() if medians.get(one)
        )
        found[spec] |= {
            "fidelity": auto["fidelity"],
            "x_best": min(mean[one] for one in rivals) / mean[spec],
            "x_best_last_half": late[best] / late[spec],
            "best": best,
            "ends_with": auto["scheme"],
            "good_after": steps_until_good(auto["schedule"], medians, first, last),
            "spent_s": auto["spent_s"],
            "model_error": statistics.median(errors),
            "model_error_most": errors[-1],
            "fixed_ms": json.dumps({one: round(1e3 * seconds, 2) for one, seconds in medians.items()}),
            "predicted_ms": json.dumps({one: round(c["predicted_ms"], 2) for one, c in allowed.items()}),
            "decisions": json.dumps([d for d in auto["decisions"] if first <= d["step"] < last]),
        }
    return found


def steps_until_good(schedule: Sequence[Sequence[Any]], step_s: Mapping[str, float], first: int, last: int) -> int:
    """Steps from `first` on until 18 of 20 run under a scheme that is within 6 % of the best; all of them if none do.

    Args:
        schedule: [(step, scheme from then on)]. step_s: seconds a step of every scheme, "plain" among them.
    """
    best_s = min(step_s.values())
    good = []
    for step in range(first, last):
        scheme = next((name for since, name in reversed(schedule) if since <= step), "plain")
        good.append(step_s.get(scheme, step_s["plain"]) <= _GOOD * best_s)
    starts = range(max(0, len(good) - _OF_STEPS + 1))
    return next((at for at in starts if sum(good[at : at + _OF_STEPS]) >= _GOOD_STEPS), len(good))


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
    """For people: a line for each contender and network."""
    rows = []
    for record in records:
        is_auto = record["scheme"] == "auto"
        rows.append(
            [
                record["rates"],
                record["scheme"] + (f":{record['options']}" if record["options"] else ""),
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
