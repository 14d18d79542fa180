"""Workers that train in rounds on a simulated network, and what comes of it: per round, per worker and per link.

A worker runs the forward pass block by block, each as soon as the block's gradients of the round before have been
synchronised, then the backward pass from the last block to the first, and hands every gradient to the scheme. Workers
that are alike and compute alike are one *group*, simulated once: its transfers have the weight of all its workers.

A round's figures cover its backward pass and the forward pass that uses its gradients (gradwire.schemes.aqgb.overlap).
"""

import gc
import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import simpy

from gradwire import checks
from gradwire.errors import InvalidArgument
from gradwire.schemes.aqgb.overlap import Interval, length_s, osf, row
from gradwire.telemetry.chrome_trace import event
from gradwire_lab.results.records import write_text
from gradwire_lab.simulator.network import SimulatedNetwork, Site, Topology
from gradwire_lab.simulator.stage import Setting, Trace

_ROWS = {"compute": 0, "network": 1}  # of a trace
_WAIT = "wait"


@dataclass(eq=False)
class WorkerGroup:
    """Workers simulated as one, `count` of them from `first_worker` on, all of one site; and what each does in a round."""

    index: int
    first_worker: int
    count: int
    site: Site
    computing: list[Interval] = field(default_factory=list)
    wait_s: float = 0.0
    backward_started_s: float = 0.0
    totals_s: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])  # computed, waited, overlapped


class SchemeModel:
    """Synchronises gradients: takes each as it appears, and opens the gates when every worker has them all."""

    period = 1  # rounds after which it does the same again

    def __init__(self, simulation: "Simulation") -> None:
        self.simulation, self.environment, self.network = simulation, simulation.environment, simulation.network
        self.setting, self.blocks = simulation.setting, simulation.setting.workload.blocks

    def on_gradient(self, group: WorkerGroup, round_number: int, block: int) -> None:
        """The workers of `group` have the gradient of `block` (index in the order of the forward pass)."""
        raise NotImplementedError

    def on_forward(self, group: WorkerGroup, round_number: int, block: int) -> None:
        """They begin the forward pass of `block`."""

    def on_forward_end(self, group: WorkerGroup) -> None:
        """They end it."""

    def on_backward(self, group: WorkerGroup, round_number: int, block: int) -> simpy.Event | None:
        """They come to its backward pass, and wait for what is returned; None: for nothing."""
        return None


class Tally:
    """Counts what has come to each key, until it is all."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._counts: dict[Hashable, int] = {}

    def completes(self, key: Hashable, n: int = 1) -> bool:
        """Count `n` more; whether these were the last, with which the key is forgotten."""
        count = self._counts.pop(key, 0) + n
        if count < self._total:
            self._counts[key] = count
        return count == self._total


class Gates:
    """When every worker has all of a block; of each block rounds open in their order, perhaps before any worker comes."""

    def __init__(self, simulation: "Simulation") -> None:
        n_blocks = len(simulation.setting.workload.blocks)
        self._simulation = simulation
        self._delivered, self._opened = Tally(simulation.setting.n_workers), Tally(n_blocks)
        self._events: dict[tuple[int, int], simpy.Event] = {}
        self._last_open = [-1] * n_blocks

    def event(self, round_number: int, block: int) -> simpy.Event | None:
        """What a worker waits for before it uses `block` in the round after `round_number`; None: nothing."""
        if round_number <= self._last_open[block]:
            return None
        return self._events.setdefault((round_number, block), self._simulation.environment.event())

    def count(self, round_number: int, block: int, n_workers: int) -> None:
        """`n_workers` more have delivered `block` to everyone."""
        if self._delivered.completes((round_number, block), n_workers):
            self.open(round_number, block)

    def open(self, round_number: int, block: int) -> None:
        self._last_open[block] = round_number
        waited_for = self._events.pop((round_number, block), None)
        if waited_for is not None:
            waited_for.succeed()
        if self._opened.completes(round_number):
            self._simulation.end_round()


class Simulation:
    """One run of one scheme; `keep_spans` of what every group does, for a trace; `on_round` is told rounds so far, and time."""

    def __init__(
        self,
        setting: Setting,
        make_scheme: "Callable[[Simulation], SchemeModel]",
        keep_spans: bool = False,
        on_round: Callable[[int, float], None] | None = None,
    ) -> None:
        self.setting = setting
        self.environment = simpy.Environment()
        self.network = SimulatedNetwork(self.environment)
        workers, rates = range(setting.n_workers), setting.rates_bps or [setting.rate_bps] * setting.n_workers
        traced = set(workers if setting.traced_workers is None else setting.traced_workers)
        kinds = [worker in traced for worker in workers] if setting.trace else None
        self.topology = Topology(self.network, rates, setting.racks, setting.core_bps, kinds, setting.connection_bps)
        self.groups = list(self._make_groups())
        self.gates = Gates(self)
        self.metrics = Metrics(self, keep_spans)
        self.n_rounds = 0  # that every worker has computed
        self._computed = Tally(setting.n_workers)
        self.round_ends_s: list[float] = []
        self._on_round = on_round
        self._last_round: int | None = None
        self._is_over = self.environment.event()
        self._factors: dict[int, Sequence[float]] = {}
        self.scheme = make_scheme(self)

    def run(self, seconds: float | None = None, rounds: int | None = None) -> "Metrics":
        """Run for so many simulated seconds or rounds, whichever is first. Raises: InvalidArgument."""
        if seconds is None and rounds is None:
            raise InvalidArgument("say how long to simulate: seconds=... or rounds=...")
        if seconds is not None and not 0 < seconds < float("inf"):
            raise InvalidArgument(f"{seconds} seconds: expected a time above 0")
        if rounds is not None:
            checks.count("rounds", rounds)
        self._last_round = rounds
        for group in self.groups:
            self.environment.process(self._train(group))
        if self.setting.trace:
            self.environment.process(self._follow_trace(self.setting.trace))
        if seconds is not None:
            self.call_after(seconds, self._stop)
        gc.freeze()  # what the program holds besides: collections would go over torch's objects again and again
        try:
            self.environment.run(self._is_over)
        finally:
            gc.unfreeze()
        self.network.finish()
        return self.metrics

    def end_round(self) -> None:
        self.round_ends_s.append(self.environment.now)
        if len(self.round_ends_s) == self._last_round:
            self._stop()

    def _stop(self) -> None:
        if not self._is_over.triggered:
            self._is_over.succeed()

    def call_after(self, delay_s: float, function: Callable[[], None]) -> None:
        """Call `function` when `delay_s` have passed; at once for 0."""
        if delay_s <= 0:
            function()
            return
        self.environment.timeout(delay_s).callbacks.append(lambda _: function())

    def _make_groups(self) -> Iterator[WorkerGroup]:
        index, are_alike = itertools.count(), self.setting.shares_groups and self.setting.jitter.is_common
        speeds = self.setting.speeds or [1.0] * self.setting.n_workers
        for site in self.topology.sites:
            workers = range(site.first_worker, site.first_worker + site.n_workers)
            for _, alike in itertools.groupby(workers, speeds.__getitem__ if are_alike else None):
                first, *others = alike
                yield WorkerGroup(next(index), first, 1 + len(others), site)

    def _train(self, group: WorkerGroup) -> Generator[simpy.Event, Any, None]:
        environment, scheme, metrics = self.environment, self.scheme, self.metrics
        blocks = [*enumerate(self.setting.workload.blocks)]
        for round_number in itertools.count():
            factor = self._factor(round_number, group)
            for index, block in blocks:
                yield from self._spend(group, self.gates.event(round_number - 1, index))
                scheme.on_forward(group, round_number, index)
                yield from self._spend(group, environment.timeout(block.forward_s * factor), f"forward {block.name}")
                scheme.on_forward_end(group)
            if round_number:
                metrics.end_forward(group, round_number - 1, self.round_ends_s[round_number - 1])
            metrics.start_backward(group)
            for index, block in reversed(blocks):
                yield from self._spend(group, scheme.on_backward(group, round_number, index))
                yield from self._spend(group, environment.timeout(block.backward_s * factor), f"backward {block.name}")
                metrics.note_gradient(round_number)
                scheme.on_gradient(group, round_number, index)
            if self._computed.completes(round_number, group.count):
                self.n_rounds += 1
                self._factors.pop(round_number - 1, None)
                if self._on_round:
                    self._on_round(self.n_rounds, environment.now)

    def _spend(
        self, group: WorkerGroup, event: simpy.Event | None, name: str = _WAIT
    ) -> Generator[simpy.Event, Any, None]:
        if event is not None:
            started_s = self.environment.now
            yield event
            self.metrics.add_time(group, started_s, name)

    def _factor(self, round_number: int, group: WorkerGroup) -> float:
        if round_number not in self._factors:
            self._factors[round_number] = self.setting.jitter.factors(round_number, self.setting.n_workers).tolist()
        factors = self._factors[round_number]
        factor = factors[0] if len(factors) == 1 else factors[group.first_worker]
        return factor / self.setting.speeds[group.first_worker] if self.setting.speeds else factor

    def _follow_trace(self, trace: Trace) -> Generator[simpy.Event, Any, None]:
        traced = self.setting.traced_workers
        for at_s, rate_bps in trace:
            yield self.environment.timeout(at_s - self.environment.now)
            for site in self.topology.sites:
                if traced is None or site.first_worker in traced:
                    self.network.set_capacity(site.up, rate_bps)
                    self.network.set_capacity(site.down, rate_bps)


class RoundTimes(NamedTuple):
    """One round: means over the workers, but for `longest_wait_s`, which ROW divides by."""

    number: int
    started_s: float  # the first backward pass
    ended_s: float  # the last forward pass that uses its gradients
    compute_s: float
    overlap_s: float
    wait_s: float
    longest_wait_s: float
    row: float
    osf: float
    sent_bits: float | None  # of one copy; None where a scheme does not tell


class LinkUse(NamedTuple):
    """Links that are alike, over the whole run. `utilisation` is their mean; `busy` the share of time with any flow."""

    name: str
    n_links: int
    carried_bits: float
    utilisation: float
    busy: float


class WorkerUse(NamedTuple):
    """Workers simulated as one, over the whole run; seconds of each, in whole rounds."""

    first_worker: int
    n_workers: int
    compute_s: float
    wait_s: float
    overlap_s: float


class TraceSpan(NamedTuple):
    """Something that a group did, for the Chrome trace. `row` is compute, wait or network."""

    group: int
    row: str
    name: str
    start_s: float
    end_s: float
    arguments: dict[str, Any]


class Metrics:
    """Collects during a run; read it when the run is over."""

    def __init__(self, simulation: Simulation, keep_spans: bool) -> None:
        self._simulation = simulation
        # Of each round that some groups have ended (workers, since when, computed, overlapped, waited, OSF) of those.
        self._open: defaultdict[int, list[tuple[int, float, float, float, float, float]]] = defaultdict(list)
        self._ended = Tally(simulation.setting.n_workers)
        self._first_gradient_s: dict[int, float] = {}
        self._sent_bits: dict[int, float] = {}
        self.rounds: list[RoundTimes] = []
        self.spans: list[TraceSpan] | None = [] if keep_spans else None
        # (simulated second, share of its bits that a value is sent with): the first group's decisions.
        self.ratios: list[tuple[float, float]] = []

    def add_time(self, group: WorkerGroup, start_s: float, name: str) -> None:
        end_s, computing = self._simulation.environment.now, group.computing
        if name == _WAIT:
            group.wait_s += end_s - start_s
        elif computing and computing[-1][1] == start_s:
            computing[-1] = (computing[-1][0], end_s)
        else:
            computing.append((start_s, end_s))
        if self.spans is not None and (end_s > start_s or name != _WAIT):
            self.spans.append(TraceSpan(group.index, "compute", name, start_s, end_s, {}))

    def add_transfer(self, group: WorkerGroup, round_number: int, bits: float, start_s: float, name: str) -> None:
        """A worker sent `bits` (one copy of them) from `start_s` until now."""
        self._sent_bits[round_number] = self._sent_bits.get(round_number, 0.0) + bits * group.count
        if self.spans is not None:
            now_s = self._simulation.environment.now
            arguments = {"round": round_number, "bits": bits}
            self.spans.append(TraceSpan(group.index, "network", name, start_s, now_s, arguments))

    def note_gradient(self, round_number: int) -> None:
        """A gradient of this round appeared; the first one begins its synchronisation."""
        self._first_gradient_s.setdefault(round_number, self._simulation.environment.now)

    def start_backward(self, group: WorkerGroup) -> None:
        """A worker begins a backward pass: what it did so far belongs to the round before."""
        group.backward_started_s = self._simulation.environment.now
        group.computing, group.wait_s = [], 0.0

    def end_forward(self, group: WorkerGroup, round_number: int, synchronised_s: float) -> None:
        """A worker has used all gradients of `round_number`, which everybody had at `synchronised_s`."""
        computing, in_use_s, wait_s = group.computing, group.site.use.seconds, group.wait_s
        overlap = math.fsum(in_use_s(end_s) - in_use_s(start_s) for start_s, end_s in computing)
        compute, began_s = length_s(computing), self._first_gradient_s[round_number]
        group.totals_s = [total + one for total, one in zip(group.totals_s, (compute, wait_s, overlap), strict=True)]
        mine = osf(computing, (began_s, max(began_s, synchronised_s)))
        self._open[round_number].append((group.count, group.backward_started_s, compute, overlap, wait_s, mine))
        if not self._ended.completes(round_number, group.count):
            return
        counts, started_s, *figures = zip(*self._open.pop(round_number), strict=True)
        _, overlaps_s, waits_s, _ = figures
        sent_bits, n = self._sent_bits.pop(round_number, None), self._simulation.setting.n_workers
        self._first_gradient_s.pop(round_number)
        compute_s, overlap_s, wait_s, mean_osf = (
            sum(count * value for count, value in zip(counts, values, strict=True)) / n for values in figures
        )
        self.rounds.append(
            RoundTimes(round_number, min(started_s), self._simulation.environment.now, compute_s, overlap_s, wait_s,
                       max(waits_s), row(overlaps_s, waits_s), mean_osf, None if sent_bits is None else sent_bits / n)
        )  # fmt: skip

    def links(self) -> list[LinkUse]:
        now_s, links = self._simulation.environment.now, self._simulation.network.links
        shares = [(one, one.carried_bits / one.offered_bits, one.use.seconds(now_s) / now_s) for one in links]
        return [LinkUse(one.name, one.n_links, one.carried_bits, *both) for one, *both in shares]

    def workers(self) -> list[WorkerUse]:
        return [WorkerUse(one.first_worker, one.count, *one.totals_s) for one in self._simulation.groups]

    @property
    def utilisation(self) -> float:
        """Mean over the workers' down-links, over the whole run."""
        downs = [site.down for site in self._simulation.topology.sites]
        return sum(link.carried_bits for link in downs) / sum(link.offered_bits for link in downs)

    def details(self, run: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A flat record of each round, link and worker, under the run's own fields; ROW is None where it is infinite."""
        which = {key: run[key] for key in ("scheme", "options", "workers", "rate_bps", "workload")}
        parts: dict[str, Sequence[Any]] = {"round": self.rounds, "link": self.links(), "worker": self.workers()}
        found = [{**which, "of": kind, **one._asdict()} for kind, several in parts.items() for one in several]
        for one in found:
            if not math.isfinite(one.get("row", 0.0)):
                one["row"] = None
        return found

    def summary(self) -> dict[str, Any]:
        """Flat and plain: what a record of this run says. Means are over the rounds; ROW is None without a finite one."""
        rounds = self.rounds
        sent = [one.sent_bits for one in rounds if one.sent_bits is not None]
        original_bits = 32 * self._simulation.setting.workload.n_values
        ends_s = self._simulation.round_ends_s
        means = ("compute_s", "overlap_s", "wait_s", "longest_wait_s", "row", "osf")
        period = self._simulation.scheme.period
        last = (len(ends_s) - 1) // period * period or len(ends_s) - 1  # whole periods, if there is one
        return {
            "seconds": self._simulation.environment.now,
            "rounds": self._simulation.n_rounds,
            "utilisation": self.utilisation,
            **{name: _mean([getattr(one, name) for one in rounds]) for name in means},
            "round_s": (ends_s[last] - ends_s[0]) / last if last > 0 else None,
            "bits_per_value": _mean([bits * 32 / original_bits for bits in sent]),
            "first_stage_ratio": _mean([ratio for _, ratio in self.ratios]),
        }


def _mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else None


def write_trace(path: Path, simulation: Simulation, n_rounds: int | None = None) -> int:
    """Write the spans of the first rounds (by default all) as Chrome trace events, for Perfetto; returns how many. A
    process is a group of workers, with a row for its computation and one for its link; links that are busy are
    counters. Raises: InvalidArgument (the simulation kept no spans), GradwireError (cannot be written)."""
    spans = simulation.metrics.spans
    if spans is None:
        raise InvalidArgument("this simulation kept no spans; make it with keep_spans=True")
    ends_s = simulation.round_ends_s
    end_s = simulation.environment.now if n_rounds is None or n_rounds > len(ends_s) else ends_s[n_rounds - 1]
    events: list[dict[str, Any]] = []
    for group in simulation.groups:
        last = group.first_worker + group.count - 1
        whom = f"worker {group.first_worker}" if group.count == 1 else f"workers {group.first_worker} to {last}"
        events.append(event("M", "process_name", group.index, args={"name": whom}))
        events.append(event("M", "process_sort_index", group.index, args={"sort_index": group.index}))
        events += [event("M", "thread_name", group.index, row, args={"name": name}) for name, row in _ROWS.items()]
    chosen = [span for span in spans if span.start_s < end_s]
    for span in sorted(chosen, key=lambda span: (span.group, span.row, span.start_s)):
        times = {"cat": span.row, "dur": (span.end_s - span.start_s) * 1e6}
        place, at_us = _ROWS[span.row], span.start_s * 1e6
        events.append(event("X", span.name, span.group, place, at_us, args=span.arguments, **times))
    for link in simulation.network.links:
        for began_s, ended_s in link.use.stretches(simulation.environment.now):
            if began_s < end_s:
                for at_s, busy in ((began_s, 1), (ended_s, 0)):
                    events.append(event("C", f"busy: {link.name}", 0, 0, at_s * 1e6, args={"busy": busy}))
    content = {"displayTimeUnit": "ms", "otherData": {"simulated": True}, "traceEvents": events}
    write_text(path, json.dumps(content, allow_nan=False) + "\n")
    return len(events)
