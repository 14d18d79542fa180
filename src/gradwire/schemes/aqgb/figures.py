"""What a broadcast scheme tells of itself: bits sent per value, and how well communication hides behind computation."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from gradwire.control.overlap import Interval, length_s, osf, overlap_s, row, union
from gradwire.schemes.aqgb.pacing import Clock

_N_ROUNDS = 1000


class Figures:
    """Of one rank; thread-safe; the last 1000 rounds.

    A round lasts from the end of one backward pass to the end of the next: first the step is awaited and taken block by
    block in the forward pass, then gradients appear. Computation is forward and backward without the waiting;
    communication is when bodies of other ranks were arriving.
    """

    def __init__(self, names: Sequence[str], sizes: Sequence[int], clock: Clock) -> None:
        self._names, self._sizes, self._clock = list(names), list(sizes), clock
        self._lock = threading.Lock()
        self._bits_now = [[0, 0] for _ in names]  # first stage, second stage
        self._waits: list[Interval] = []
        self._receiving: list[Interval] = []
        self._forward_began: float | None = None
        self._last_end: float | None = None
        self.rounds: deque[dict[str, Any]] = deque(maxlen=_N_ROUNDS)

    def begin_forward(self) -> None:
        with self._lock:
            if self._forward_began is None:
                self._forward_began = self._clock()

    def note_wait(self, duration_ns: int) -> None:
        """The forward pass stood still until now."""
        with self._lock:
            now_s = self._clock()
            self._waits.append((now_s - duration_ns / 1e9, now_s))

    def note_received(self, duration_ns: int) -> None:
        """A body has arrived."""
        with self._lock:
            now_s = self._clock()
            self._receiving.append((now_s - duration_ns / 1e9, now_s))

    def note_sent(self, block: int, n_bits: int, is_first_stage: bool) -> None:
        with self._lock:
            self._bits_now[block] = [n_bits, 0] if is_first_stage else [self._bits_now[block][0], n_bits]

    def end_backward(self) -> None:
        """A round is over."""
        with self._lock:
            now_s = self._clock()
            if self._last_end is not None and self._forward_began is not None:
                waits = union(self._waits)
                compute = _without((self._forward_began, now_s), waits)
                receiving = union(self._receiving)
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
            self._last_end, self._forward_began = now_s, None
            self._waits, self._receiving = [], []

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
        if not rounds:
            return {}
        seconds = math.fsum(one["seconds"] for one in rounds)
        wait_s = math.fsum(one["wait_s"] for one in rounds)
        overlap = math.fsum(one["overlap_s"] for one in rounds)
        spans = [one["osf"] for one in rounds if "osf" in one]
        n_rounds = len(rounds)
        return {
            "bits_per_value": {
                name: sum(one["bits"][index] for one in rounds) / n_rounds for index, name in enumerate(self._names)
            },
            "first_bits_per_value": {
                name: sum(one["first_bits"][index] for one in rounds) / n_rounds
                for index, name in enumerate(self._names)
            },
            "row": row([overlap], [wait_s]),
            "wait_per_round_s": wait_s / n_rounds,
            "overlap_per_round_s": overlap / n_rounds,
            "osf": math.fsum(spans) / len(spans) if spans else 1.0,
            "utilisation": math.fsum(one["receiving_s"] for one in rounds) / seconds if seconds > 0 else 0.0,
        }


def _without(whole: Interval, holes: Sequence[Interval]) -> list[Interval]:
    """`whole` less the disjoint, sorted `holes`."""
    pieces, at = [], whole[0]
    for start_s, end_s in holes:
        if start_s > at:
            pieces.append((at, min(start_s, whole[1])))
        at = max(at, end_s)
    if at < whole[1]:
        pieces.append((at, whole[1]))
    return pieces
