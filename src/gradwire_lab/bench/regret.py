"""gradwire bench regret: what `auto` loses, against DDP without gradwire and against every fixed scheme that it may use.

All train in the same processes in turns of ten steps, so a machine that is busy for a while is busy for all of them; `auto`
sees its own steps alone and pays for its own trials. Fixed schemes, whose steps are all alike, take every third turn,
and auto is compared with them in these.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gradwire.core.threads import use_fair_share_of_cores
from gradwire.errors import InvalidArgument
from gradwire.registry import parse_spec, spec_of
from gradwire.telemetry.environment import describe_environment
from gradwire_lab import workloads
from gradwire_lab.bench import driver
from gradwire_lab.bench.launching import check_changes, check_rank_arguments, is_rank, run_in_ranks
from gradwire_lab.bench.regret_figures import make_records
from gradwire_lab.bench.timing import Progress
from gradwire_lab.bench.train_methods import TrainMethod, describe
from gradwire_lab.ranks.network import Network
from gradwire_lab.results.experiment import Column, Table
from gradwire_lab.results.grids import tabulate
from gradwire_lab.results.records import RecordLog
from gradwire_lab.results.tables import Grid, print_grid

# The bars: against DDP over the whole run, and in its second half against the best fixed scheme allowed.
LEAST_X_DDP, LEAST_X_BEST = 0.98, 0.95
TURN_STEPS = 10
_FIXED_EVERY = 3  # turns


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
        name, options = parse_spec(args.workload)
        with driver.as_rank():
            use_fair_share_of_cores()
            _Regret(args, workloads.by_name(name, **options)).run()
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


class _Regret:
    """One run on a rank. Collective."""

    def __init__(self, args: argparse.Namespace, workload: workloads.Workload) -> None:
        self._args, self._workload = args, workload
        self._environment = describe_environment()
        self._links, self._records = driver.Links(args), driver.Records(args)
        self._named = {spec: TrainMethod(spec, workload, args.seed) for spec in dict.fromkeys(args.scheme)}
        self._autos = {spec: one for spec, one in self._named.items() if one.name == "auto"}
        allowed = [
            candidate["spec"]
            for auto in self._autos.values()
            for candidate in auto.own_stats()["auto"]["candidates"]
            if not candidate["excluded"] and candidate["spec"] not in ("plain", *self._named)
        ]
        self._fixed = {spec: TrainMethod(spec, workload, args.seed) for spec in dict.fromkeys(allowed)}
        self._all = {**self._named, **self._fixed}

    def run(self) -> None:
        """Every phase, whose records rank 0 writes."""
        for method in self._all.values():
            method.step()  # DDP cuts its buckets anew after the first
        for phase, network in enumerate(self._links.networks):
            self._links.enter(phase)
            self._write(phase, network, self._run_phase())
        for method in self._all.values():
            method.close()

    def _run_phase(self) -> list[dict[str, int]]:
        """How many steps each method has taken: before the first turn, and after each."""
        n_steps = [{spec: len(one.times) for spec, one in self._all.items()}]
        n_done, n_turns, spent_s = 0, 0, 0.0
        progress = Progress(f"{self._workload.name}, steps of each", self._args.steps, dist.get_rank() != 0)
        counted = [one for spec, one in self._named.items() if spec == "ddp" or spec in self._autos]
        while n_done < self._args.steps:
            methods = [*self._named.values(), *(self._fixed.values() if n_turns % _FIXED_EVERY == 0 else ())]
            for method in reversed(methods) if n_turns % 2 else methods:
                dist.barrier()
                started = time.perf_counter()
                for _ in range(TURN_STEPS):  # nothing is asked of auto in between: it would wait for what is under way
                    method.step()
                if method in counted:
                    spent_s += time.perf_counter() - started
            n_done, n_turns = n_done + TURN_STEPS, n_turns + 1
            progress.advance(TURN_STEPS)
            n_steps.append({spec: len(one.times) for spec, one in self._all.items()})
            if driver.largest_over_ranks([spent_s])[0] > len(counted) * self._args.seconds:
                break
        return n_steps

    def _write(self, phase: int, network: Network, n_steps: list[dict[str, int]]) -> None:
        turns_s, losses = {}, {}
        for spec, method in self._all.items():
            all_s = driver.largest_over_ranks([times.iteration_s for times in method.times])
            turns_s[spec] = [all_s[since[spec] : until[spec]] for since, until in itertools.pairwise(n_steps)]
            losses[spec] = driver.mean_over_ranks(method.losses)
        first = next((n_steps[0][spec] for spec in self._autos), 0)
        stats = {spec: auto.own_stats()["auto"] for spec, auto in self._autos.items()}
        found = make_records(turns_s, stats, first if phase else 0)
        shared = {
            "ranks": dist.get_world_size(),
            "rate_bps": network.rate_bps,
            "rates": driver.rates_of(network) or "none",
            "phase": phase,
            "shaped": network.shaped,
        }
        records: list[dict[str, Any]] = []
        for spec, method in self._named.items():
            strays = max(abs(mine - ddps) for mine, ddps in zip(losses[spec], losses["ddp"], strict=True))
            described = {"scheme": method.name, "options": describe(method), "loss_deviation": strays}
            records.append(described | shared | found[spec] | self._workload.describe() | self._environment)
        self._records.add(records)


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
    first = records[0]
    columns = [
        Column("iteration_s", "step ms", 1e3, ",.1f"),
        Column("x_ddp", "x DDP", form=".3f"),
        Column("x_best_last_half", "x best, 2nd half", form=".3f"),
        *(Column(name) for name in ("best", "ends_with", "good_after")),
    ]
    title = f"{first['workload']}, {first['ranks']} ranks, {first['n_steps']} steps"
    named = [{**record, "links": record["rates"], "method": spec_of(record)} for record in records]
    caption = "x DDP and x best: above 1 is faster; all trials are on auto's own bill"
    return tabulate(named, Table(columns, rows=("links", "method"), title=title), caption)
