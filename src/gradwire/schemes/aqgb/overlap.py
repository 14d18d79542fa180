"""Measures of how well communication hides behind computation: ROW, T_wait, OSF, utilisation, from recorded intervals.

Luo et al., section 3. An interval is (start_s, end_s) on the clock of the rank that recorded it; they may overlap each
other and come in any order.
"""

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Interval = tuple[float, float]

_N_ROUNDS = 1000


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merge intervals to disjoint ones, sorted."""
    merged: list[Interval] = []
    for start_s, end_s in sorted(intervals):
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end_s, merged[-1][1]))
        else:
            merged.append((start_s, end_s))
    return merged


def without(intervals: Iterable[Interval], removed: Iterable[Interval]) -> list[Interval]:
    """The time of `intervals` that lies in none of `removed`, in disjoint intervals."""
    left: list[Interval] = []
    holes = union(removed)
    for start_s, end_s in union(intervals):
        at = start_s
        for hole_start, hole_end in holes:
            if hole_end <= at or hole_start >= end_s:
                continue
            if hole_start > at:
                left.append((at, hole_start))
            at = max(at, hole_end)
        if at < end_s:
            left.append((at, end_s))
    return left


def length_s(intervals: Iterable[Interval]) -> float:
    """Seconds that the intervals cover together."""
    return math.fsum(end_s - start_s for start_s, end_s in union(intervals))


def overlap_s(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """T_overlap: seconds covered by both."""
    second = list(second)
    return length_s(without(second, without(second, first)))


def row(overlaps_s: Sequence[float], waits_s: Sequence[float]) -> float:
    """ROW (Eq. 2): the least overlap of all ranks / their longest wait. Inf where something overlapped and nobody
    waited, 0 where nothing overlapped."""
    overlap, wait = min(overlaps_s), max(waits_s)
    if overlap == 0:
        return 0.0
    return overlap / wait if wait > 0 else math.inf


def osf(compute: Iterable[Interval], update: Interval) -> float:
    """T_comp / (T_comp + T_update - T_overlap), where `update` lasts from the first to the last byte (section 3.1)."""
    computing = union(compute)
    compute_s = length_s(computing)
    return compute_s / (compute_s + length_s([update]) - overlap_s(computing, [update])) if compute_s > 0 else 0.0


class OverlapFigures:
    """Bits that one rank sent of each value, and how well its communication hid, in the last 1000 rounds; thread-safe.

    A round lasts from the end of one backward pass to the end of the next: first the step is awaited and taken block by
    block in the forward pass, then gradients appear. Computation is forward and backward without the waiting;
    communication is when bodies of other ranks were arriving.
    """

    def __init__(self, names: Sequence[str], sizes: Sequence[int], clock: Callable[[], float]) -> None:
        self._names, self._sizes, self._clock = list(names), list(sizes), clock
        self._lock = threading.Lock()
        self._bits_now = [[0, 0] for _ in names]  # first stage, second stage
        self._spans: dict[str, list[Interval]] = {"wait": [], "receive": []}
        self._forward_began: float | None = None
        self._last_end: float | None = None
        # Since attaching: how long communication overlapped with computation, and was waited for; of peers what they said.
        self.hidden_us = [0, 0]
        self._hidden_us_of: dict[int, list[int]] = {}
        self.rounds: deque[dict[str, Any]] = deque(maxlen=_N_ROUNDS)

    def hear(self, peer: int, hidden_us: list[int]) -> None:
        """Take in what `peer` said of its `hidden_us`."""
        with self._lock:
            self._hidden_us_of[peer] = hidden_us

    def begin_forward(self) -> None:
        with self._lock:
            if self._forward_began is None:
                self._forward_began = self._clock()

    def note(self, kind: str, duration_ns: int) -> None:
        """Until now the forward pass stood still ("wait"), or a body was arriving ("receive")."""
        with self._lock:
            now_s = self._clock()
            self._spans[kind].append((now_s - duration_ns / 1e9, now_s))

    def note_sent(self, block: int, n_bits: int, is_first_stage: bool) -> None:
        """`n_bits` of each value of `block` are sent."""
        with self._lock:
            self._bits_now[block] = [n_bits, 0] if is_first_stage else [self._bits_now[block][0], n_bits]

    def end_backward(self) -> None:
        with self._lock:
            now_s = self._clock()
            if self._last_end is not None and self._forward_began is not None:
                waits, receiving = union(self._spans["wait"]), union(self._spans["receive"])
                compute = without([(self._forward_began, now_s)], waits)
                figures: dict[str, Any] = {
                    "seconds": now_s - self._last_end,
                    "wait_s": length_s(waits),
                    "overlap_s": overlap_s(compute, receiving),
                    "receiving_s": length_s(receiving),
                    "bits": [sum(bits) for bits in self._bits_now],
                    "first_bits": [bits[0] for bits in self._bits_now],
                }
                if receiving:
                    figures["osf"] = osf(compute, (receiving[0][0], receiving[-1][1]))
                self.rounds.append(figures)
                added_us = [round(1e6 * figures[name]) for name in ("overlap_s", "wait_s")]
                self.hidden_us = [before + more for before, more in zip(self.hidden_us, added_us, strict=True)]
            self._last_end, self._forward_began = now_s, None
            self._spans = {"wait": [], "receive": []}

    def last_bits(self) -> dict[str, float]:
        """Mean over the values of all blocks of the bits sent in the last round."""
        with self._lock:
            if not self.rounds:
                return {}
            last, total = self.rounds[-1], sum(self._sizes)
            return {
                f"{stage}_per_value": sum(n * bits for n, bits in zip(self._sizes, last[stage], strict=True)) / total
                for stage in ("bits", "first_bits")
            }

    def as_dict(self) -> dict[str, Any]:
        """Means over the rounds; `utilisation`: the share of the time in which something was arriving."""
        with self._lock:
            rounds = list(self.rounds)
            overlaps_us, waits_us = zip(self.hidden_us, *self._hidden_us_of.values(), strict=True)
        if not rounds:
            return {}
        n_rounds = len(rounds)
        seconds, wait_s, overlap, receiving_s = (
            math.fsum(one[name] for one in rounds) for name in ("seconds", "wait_s", "overlap_s", "receiving_s")
        )
        spans = [one["osf"] for one in rounds if "osf" in one]
        bits = {
            f"{stage}_per_value": {
                name: sum(one[stage][index] for one in rounds) / n_rounds for index, name in enumerate(self._names)
            }
            for stage in ("bits", "first_bits")
        }
        return bits | {
            "row": row([overlap], [wait_s]),
            "group_row": row(overlaps_us, waits_us),
            "wait_per_round_s": wait_s / n_rounds,
            "overlap_per_round_s": overlap / n_rounds,
            "osf": math.fsum(spans) / len(spans) if spans else 1.0,
            "utilisation": receiving_s / seconds if seconds > 0 else 0.0,
        }
