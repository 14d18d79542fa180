"""What came of a simulated run: per round, per worker and per link.

A round's figures cover one cyclic round of computation, its backward pass and the forward pass that uses its gradients:
all that its synchronisation overlaps with or is waited for in. Definitions: gradwire.schemes.aqgb.overlap.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gradwire.schemes.aqgb.overlap import Interval, length_s, osf, row
from gradwire_lab.simulator.stage import Stage, WorkerGroup


class RoundTimes(NamedTuple):
    """One round, over all workers.

    Attributes:
        number: from 0.
        started_s, ended_s: from the first backward pass to the last forward pass that uses its gradients.
        compute_s, overlap_s, wait_s: means over the workers.
        longest_wait_s: of all workers, which ROW divides by.
        osf: mean over the workers.
        sent_bits: mean over the workers, of one copy of what each sends; None where a scheme does not tell.
    """

    number: int
    started_s: float
    ended_s: float
    compute_s: float
    overlap_s: float
    wait_s: float
    longest_wait_s: float
    row: float
    osf: float
    sent_bits: float | None


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


@dataclass
class _OfGroup:
    """One group's present round, and its sums: computed, waited, overlapped."""

    computing: list[Interval] = field(default_factory=list)
    wait_s: float = 0.0
    backward_started_s: float = 0.0
    totals_s: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])


@dataclass
class _OpenRound:
    """A round that some groups have ended: of each (workers, computed, overlapped, waited, OSF)."""

    started_s: float = math.inf
    n_workers: int = 0
    groups: list[tuple[int, float, float, float, float]] = field(default_factory=list)


class Metrics:
    """Collects during a run; read it when the run is over."""

    def __init__(self, simulation: Stage, keep_spans: bool) -> None:
        self._simulation = simulation
        self._of_group = [_OfGroup() for _ in simulation.groups]
        self._open: dict[int, _OpenRound] = {}
        self._first_gradient_s: dict[int, float] = {}
        self._sent_bits: dict[int, float] = {}
        self.rounds: list[RoundTimes] = []
        self.spans: list[TraceSpan] | None = [] if keep_spans else None
        # (simulated second, share of its bits that a value is sent with): the first group's decisions.
        self.ratios: list[tuple[float, float]] = []

    # ---- told by the workers and the scheme

    def add_wait(self, group: WorkerGroup, start_s: float, end_s: float) -> None:
        """A worker waited for gradients."""
        self._of_group[group.index].wait_s += end_s - start_s
        if self.spans is not None and end_s > start_s:
            self.spans.append(TraceSpan(group.index, "compute", "wait", start_s, end_s, {}))

    def add_compute(self, group: WorkerGroup, start_s: float, end_s: float, kind: str, block: str) -> None:
        """A worker computed."""
        computing = self._of_group[group.index].computing
        if computing and computing[-1][1] == start_s:
            computing[-1] = (computing[-1][0], end_s)
        else:
            computing.append((start_s, end_s))
        if self.spans is not None:
            self.spans.append(TraceSpan(group.index, "compute", f"{kind} {block}", start_s, end_s, {}))

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
        of_group = self._of_group[group.index]
        of_group.backward_started_s = self._simulation.environment.now
        of_group.computing, of_group.wait_s = [], 0.0

    def end_forward(self, group: WorkerGroup, round_number: int, synchronised_s: float) -> None:
        """A worker has used all gradients of `round_number`, which everybody had at `synchronised_s`."""
        of_group = self._of_group[group.index]
        computing, in_use_s = of_group.computing, group.site.use.seconds
        overlap = math.fsum(in_use_s(end_s) - in_use_s(start_s) for start_s, end_s in computing)
        compute = length_s(computing)
        began_s = self._first_gradient_s[round_number]
        update = (began_s, max(began_s, synchronised_s))
        figures = (compute, of_group.wait_s, overlap)
        of_group.totals_s = [total + one for total, one in zip(of_group.totals_s, figures, strict=True)]
        one = self._open.setdefault(round_number, _OpenRound())
        one.started_s = min(one.started_s, of_group.backward_started_s)
        one.n_workers += group.count
        one.groups.append((group.count, compute, overlap, of_group.wait_s, osf(computing, update)))
        if one.n_workers == self._simulation.setting.n_workers:
            self._close_round(round_number, self._open.pop(round_number))

    def _close_round(self, number: int, one: _OpenRound) -> None:
        counts, *figures = zip(*one.groups, strict=True)
        _, overlaps_s, waits_s, _ = figures
        sent_bits, n = self._sent_bits.pop(number, None), one.n_workers
        self._first_gradient_s.pop(number)
        compute_s, overlap_s, wait_s, mean_osf = (
            sum(count * value for count, value in zip(counts, values, strict=True)) / n for values in figures
        )
        self.rounds.append(
            RoundTimes(number, one.started_s, self._simulation.environment.now, compute_s, overlap_s, wait_s, max(waits_s),
                       row(overlaps_s, waits_s), mean_osf, None if sent_bits is None else sent_bits / n)
        )  # fmt: skip

    # ---- read when the run is over

    def links(self) -> list[LinkUse]:
        """Every kind of link."""
        now_s, links = self._simulation.environment.now, self._simulation.network.links
        shares = [(one, one.carried_bits / one.offered_bits, one.use.seconds(now_s) / now_s) for one in links]
        return [LinkUse(one.name, one.n_links, one.carried_bits, *both) for one, *both in shares]

    def workers(self) -> list[WorkerUse]:
        """Every group of workers."""
        both = zip(self._simulation.groups, self._of_group, strict=True)
        return [WorkerUse(group.first_worker, group.count, *one.totals_s) for group, one in both]

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
        finite_rows = [one.row for one in rounds if math.isfinite(one.row)]
        sent = [one.sent_bits for one in rounds if one.sent_bits is not None]
        original_bits = 32 * self._simulation.setting.workload.n_values
        ends_s = self._simulation.round_ends_s
        period = self._simulation.scheme.period
        last = (len(ends_s) - 1) // period * period or len(ends_s) - 1  # whole periods, if there is one
        return {
            "seconds": self._simulation.environment.now,
            "rounds": self._simulation.n_rounds,
            "utilisation": self.utilisation,
            "compute_s": _mean([one.compute_s for one in rounds]),
            "overlap_s": _mean([one.overlap_s for one in rounds]),
            "wait_s": _mean([one.wait_s for one in rounds]),
            "longest_wait_s": _mean([one.longest_wait_s for one in rounds]),
            "row": _mean(finite_rows),
            "osf": _mean([one.osf for one in rounds]),
            "round_s": (ends_s[last] - ends_s[0]) / last if last > 0 else None,
            "bits_per_value": _mean([bits * 32 / original_bits for bits in sent]),
            "first_stage_ratio": _mean([ratio for _, ratio in self.ratios]),
        }


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None
