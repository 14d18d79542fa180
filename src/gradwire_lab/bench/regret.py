"""gradwire bench regret: what `auto` loses, against DDP or FSDP2 without gradwire and against every fixed scheme it may use.

All train in the same processes in turns of ten steps, so a machine that is busy for a while is busy for all of them; `auto`
sees its own steps alone and pays for its own trials. Fixed schemes, whose steps are all alike, take every third turn, in
the second half the fastest of them every turn, and auto is compared with them in these.
"""

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from gradwire.errors import InvalidArgument
from gradwire.registry import parse_spec, spec_of
from gradwire.telemetry.environment import describe_environment
from gradwire_lab import workloads
from gradwire_lab.bench import driver
from gradwire_lab.bench.driver import Progress, Timing
from gradwire_lab.bench.train_methods import TrainMethod, describe
from gradwire_lab.ranks.network import Network
from gradwire_lab.results.experiment import Column, Table
from gradwire_lab.results.records import Record
from gradwire_lab.results.tables import Grid, print_grid, tabulate

# The bars: against DDP over the whole run, and in its second half against the best fixed scheme allowed.
LEAST_X_DDP, LEAST_X_BEST = 0.98, 0.95
TURN_STEPS = 10
_FIXED_EVERY = 3  # turns
_BASES = ("ddp", "fully-shard")  # without gradwire
_GOOD = 1.06  # of the best, is as good as the best
_OF_STEPS, _GOOD_STEPS = 20, 18
N_BLOCKS, _SAMPLES = 10, 1000  # of the bootstrap

T = TypeVar("T")
Turns = Sequence[Sequence[float]]  # a method's seconds a step, turn by turn; a turn in which it paused is empty


def run(args: argparse.Namespace) -> int:
    """Measure as a rank, or start the ranks that do; with `--check` status 1 where a bar is missed."""
    if args.steps < 20:
        raise InvalidArgument(f"--steps {args.steps}: auto needs 20 or more to try anything")
    if base_of(args.scheme) is None:
        raise InvalidArgument("--scheme has to name ddp, or FSDP2's fully-shard: what auto loses is counted against it")
    workloads.check_name(parse_spec(args.workload)[0])

    records = driver.measure_in_ranks("regret", args, lambda: _Regret(args, workloads.by_name(args.workload)).run())
    if not records:  # a rank
        return 0
    print_grid(make_grid(records), wide=True)
    missed = below_the_bars(records)
    for line in missed:
        print(f"below the bar: {line}")
    return 1 if missed and args.check else 0


def base_of(specs: Sequence[str]) -> str | None:
    """The first of these methods that goes without gradwire."""
    return next((spec for spec in specs if parse_spec(spec)[0] in _BASES), None)


class _Regret:
    """One run on a rank. Collective."""

    def __init__(self, args: argparse.Namespace, workload: workloads.Workload) -> None:
        self._args, self._workload = args, workload
        self._environment = describe_environment()
        self._base = str(base_of(args.scheme))
        self._named = {
            spec: TrainMethod(spec, workload, args.seed, as_published=False) for spec in dict.fromkeys(args.scheme)
        }
        self._autos = {spec: one for spec, one in self._named.items() if "auto" in one.own_stats()}
        self._fixed: dict[str, TrainMethod] = {}
        self._allowed: dict[str, list[str]] = {}
        for name, auto in self._autos.items():
            candidates = auto.own_stats()["auto"]["candidates"]
            self._allowed[name] = [one["spec"] for one in candidates if not one.get("excluded")]
            for spec in self._allowed[name]:
                if spec not in ("plain", *self._named, *self._fixed):
                    as_auto = auto.fixed_as(spec)
                    self._fixed[spec] = TrainMethod(as_auto, workload, args.seed, as_published=False)
        self._all = {**self._named, **self._fixed}

    def run(self) -> Iterator[list[Record]]:
        """The records of every phase."""
        for method in self._all.values():
            method.step()  # DDP cuts its buckets anew after the first
        for phase, network in enumerate(driver.phases(self._args)):
            yield self._describe(phase, network, self._run_phase())
        for method in self._all.values():
            method.close()

    def _run_phase(self) -> list[dict[str, int]]:
        """How many steps each method has taken: before the first turn, and after each."""
        n_steps = [{spec: len(one.times) for spec, one in self._all.items()}]
        spent_s = 0.0
        progress = Progress(f"{self._workload.name}, steps of each", self._args.steps, dist.get_rank() != 0)
        counted = [one for spec, one in self._named.items() if spec == self._base or spec in self._autos]
        n_turns, fastest = -(-self._args.steps // TURN_STEPS), list[TrainMethod]()
        for turn in range(n_turns):
            if turn == n_turns // 2:
                fastest = self._fastest()
            methods = [*self._named.values(), *(self._fixed.values() if turn % _FIXED_EVERY == 0 else fastest)]
            for method in reversed(methods) if turn % 2 else methods:
                dist.barrier()
                started = time.perf_counter()
                for _ in range(TURN_STEPS):  # nothing is asked of auto in between: it would wait for what is under way
                    method.step()
                if method in counted:
                    spent_s += time.perf_counter() - started
            progress.advance(TURN_STEPS)
            n_steps.append({spec: len(one.times) for spec, one in self._all.items()})
            if driver.largest_over_ranks([spent_s])[0] > len(counted) * self._args.seconds:
                break
        return n_steps

    def _fastest(self) -> list[TrainMethod]:
        """The fixed scheme that was the fastest so far, of those that each auto may use: the same on all ranks."""
        own = [statistics.fmean(times.iteration_s for times in one.times) for one in self._fixed.values()]
        ordered = [spec for _, spec in sorted(zip(driver.largest_over_ranks(own), self._fixed, strict=True))]
        found = {next((spec for spec in ordered if spec in allowed), "") for allowed in self._allowed.values()}
        return [one for spec, one in self._fixed.items() if spec in found]

    def _describe(self, phase: int, network: Network, n_steps: list[dict[str, int]]) -> list[dict[str, Any]]:
        turns_s, losses = {}, {}
        for spec, method in self._all.items():
            all_s = driver.largest_over_ranks([times.iteration_s for times in method.times])
            turns_s[spec] = [all_s[since[spec] : until[spec]] for since, until in itertools.pairwise(n_steps)]
            losses[spec] = driver.mean_over_ranks(method.losses)
        first = next((n_steps[0][spec] for spec in self._autos), 0)
        stats = {spec: auto.own_stats()["auto"] for spec, auto in self._autos.items()}
        found = make_records(turns_s, stats, first if phase else 0, self._base)
        shared: dict[str, Any] = {"ranks": dist.get_world_size(), "rate_bps": network.rate_bps}
        shared |= {"rates": driver.rates_of(network) or "none", "phase": phase, "shaped": network.shaped}
        records: list[dict[str, Any]] = []
        for spec, method in self._named.items():
            strays = max(abs(mine - ddps) for mine, ddps in zip(losses[spec], losses[self._base], strict=True))
            described = {"scheme": method.name, "options": describe(method), "loss_deviation": strays}
            records.append(described | shared | found[spec] | self._workload.describe() | self._environment)
        return records


# ---- what a run found


def make_records(
    turns_s: Mapping[str, Turns], autos: Mapping[str, Mapping[str, Any]], first: int = 0, base: str = "ddp"
) -> dict[str, dict[str, Any]]:
    """{method: its figures} of one phase of a run, from the seconds a step of each and `stats()["auto"]` of the autos.

    `base`, which has no gradwire, is among the methods; `first` is the number of auto's first step of the phase. In a turn each
    takes as many steps as any other, or none; two are compared in the turns that both took, in the same minutes of the machine.
    `x_ddp`: against `base`, over all of these. `x_best_last_half`: against `best` in the second half; `best` is which of `base`
    and the schemes that this auto may use is the fastest over all turns (the luckiest of few turns is not the best). Above 1
    auto is faster; `_low`, `_high`: 95 % intervals. `good_after`: steps until 18 of 20 ran under a scheme that is within 6 %
    of the best.
    """
    beside_ddp = {spec: _common(turns_s[base], turns) for spec, turns in turns_s.items()}
    x_ddp = {spec: _times_as_fast(turns) for spec, turns in beside_ddp.items()}
    found: dict[str, dict[str, Any]] = {}
    for spec, turns in turns_s.items():
        ordered = list(itertools.chain(*turns))
        found[spec] = {
            **Timing.of(ordered).fields("iteration_s"),
            "late_s": statistics.fmean(itertools.chain(*_late_half([turn for turn in turns if turn]))),
            "n_steps": len(ordered),
            "x_ddp": x_ddp[spec],
            "x_ddp_last_half": _times_as_fast(_late_half(beside_ddp[spec])),
        }
    for spec, auto in autos.items():
        allowed = {c["spec"]: c for c in auto["candidates"] if not c.get("excluded")}
        fixed = [base, *(one for one in turns_s if one in allowed)]
        best = max(fixed, key=lambda one: (x_ddp[one], one))
        beside_best = _common(turns_s[best], turns_s[spec])
        last = first + found[spec]["n_steps"]
        medians = {one: found[one]["iteration_s"] for one in fixed} | {"plain": found[base]["iteration_s"]}
        predicted = {one: c["first_predicted_ms"] for one, c in allowed.items()}
        errors = sorted(abs(1e-3 * ms / medians[one] - 1) for one, ms in predicted.items() if medians.get(one))
        found[spec] |= {
            "fidelity": auto["fidelity"],
            "x_best": _times_as_fast(beside_best),
            "x_best_last_half": _times_as_fast(_late_half(beside_best)),
            **_interval("x_ddp", beside_ddp[spec]),
            **_interval("x_best_last_half", _late_half(beside_best)),
            "best": best,
            "ends_with": auto["scheme"],
            "good_after": steps_until_good(auto["schedule"], medians, first, last),
            "spent_s": auto["spent_s"],
            "model_error": statistics.median(errors),
            "model_error_most": errors[-1],
            "fixed_ms": json.dumps({one: round(1e3 * seconds, 2) for one, seconds in medians.items()}),
            "predicted_ms": json.dumps({one: round(ms, 2) for one, ms in predicted.items()}),
            "decisions": json.dumps([d for d in auto["decisions"] if first <= d["step"] < last]),
        }
    return found


def _common(base_s: Turns, mine_s: Turns) -> list[tuple[float, float]]:
    """Seconds of each turn that both took."""
    return [(sum(base), sum(mine)) for base, mine in zip(base_s, mine_s, strict=True) if base and mine]


def _late_half(turns: Sequence[T]) -> Sequence[T]:
    return turns[len(turns) // 2 :]


def _times_as_fast(turns: Sequence[tuple[float, float]]) -> float:
    return sum(base for base, _ in turns) / sum(mine for _, mine in turns)


def _interval(name: str, turns: Sequence[tuple[float, float]]) -> dict[str, float]:
    """95 % interval of `_times_as_fast`, by a bootstrap over stretches of turns: what disturbs one disturbs its neighbours."""
    n_blocks = min(N_BLOCKS, len(turns))
    blocks = [turns[len(turns) * i // n_blocks : len(turns) * (i + 1) // n_blocks] for i in range(n_blocks)]
    rng = random.Random(0)
    ratios = sorted(_times_as_fast([*itertools.chain(*rng.choices(blocks, k=n_blocks))]) for _ in range(_SAMPLES))
    return {f"{name}_low": ratios[_SAMPLES * 25 // 1000], f"{name}_high": ratios[_SAMPLES * 975 // 1000 - 1]}


def steps_until_good(schedule: Sequence[Sequence[Any]], step_s: Mapping[str, float], first: int, last: int) -> int:
    """Steps from `first` on until 18 of 20 run under a scheme that is within 6 % of the best; all of them if none do."""
    best_s = min(step_s.values())
    good = []
    for step in range(first, last):
        scheme = next((name for since, name in reversed(schedule) if since <= step), "plain")
        good.append(step_s.get(scheme, step_s["plain"]) <= _GOOD * best_s)
    starts = range(max(0, len(good) - _OF_STEPS + 1))
    return next((at for at in starts if sum(good[at : at + _OF_STEPS]) >= _GOOD_STEPS), len(good))


def below_the_bars(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each record of auto that misses a bar."""
    return [
        "{workload}, {ranks} ranks, {rates}, {fidelity}: {x_ddp:.3f} x DDP, second half {x_best_last_half:.3f} of the "
        "best ({best}); ends with {ends_with}".format_map(record)
        for record in records
        if "ends_with" in record and (record["x_ddp"] < LEAST_X_DDP or record["x_best_last_half"] < LEAST_X_BEST)
    ]


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
