"""How well communication hides behind computation: ROW, T_wait, OSF and utilisation, from recorded intervals.

Luo et al., section 3. An interval is (start_s, end_s) on the clock of the rank that recorded it; they may overlap each
other and come in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from gradwire.control.checks import finite
from gradwire.errors import InvalidArgument

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in disjoint intervals, sorted. Raises: InvalidArgument (not finite, or an end before its start)."""
    merged: list[Interval] = []
    for start_s, end_s in sorted(intervals):
        finite("an interval's start", start_s)
        if finite("an interval's end", end_s) < start_s:
            raise InvalidArgument(f"an interval ends at {end_s} s, before its start at {start_s} s")
        if merged and start_s <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end_s, merged[-1][1]))
        else:
            merged.append((start_s, end_s))
    return merged


def length_s(intervals: Iterable[Interval]) -> float:
    """Seconds that the intervals cover together. Raises: InvalidArgument."""
    return math.fsum(end_s - start_s for start_s, end_s in union(intervals))


def overlap_s(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """T_overlap: seconds covered by both. Raises: InvalidArgument."""
    a, b = union(first), union(second)
    i = j = 0
    pieces = []
    while i < len(a) and j < len(b):
        pieces.append(max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0])))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return math.fsum(pieces)


def row(overlaps_s: Sequence[float], waits_s: Sequence[float]) -> float:
    """ROW (Eq. 2): the least overlap of all ranks / their longest wait.

    Inf where something overlapped and nobody waited, 0 where nothing overlapped. Raises: InvalidArgument.
    """
    if not overlaps_s or not waits_s:
        raise InvalidArgument("ROW needs the times of at least one rank")
    overlap = min(finite("T_overlap", seconds, 0) for seconds in overlaps_s)
    wait = max(finite("T_wait", seconds, 0) for seconds in waits_s)
    if overlap == 0:
        return 0.0
    return overlap / wait if wait > 0 else math.inf


def osf(compute: Iterable[Interval], update: Interval) -> float:
    """T_comp / (T_comp + T_update - T_overlap), where `update` lasts from the first to the last byte (section 3.1).

    Raises: InvalidArgument (no computation).
    """
    computing = union(compute)
    compute_s = length_s(computing)
    if compute_s == 0:
        raise InvalidArgument("OSF needs some computation")
    return compute_s / (compute_s + length_s([update]) - overlap_s(computing, [update]))


def utilisation(bits: float, rate_bps: float, seconds: float) -> float:
    """Which share of a link's capacity `bits` took. Raises: InvalidArgument (a rate or time of zero)."""
    finite("bits", bits, 0)
    if finite("rate_bps", rate_bps, 0) == 0 or finite("seconds", seconds, 0) == 0:
        raise InvalidArgument(f"utilisation needs a positive rate and time, got {rate_bps} b/s and {seconds} s")
    return bits / (rate_bps * seconds)
