"""What the link does, measured by a few small collectives: before training, and now and then beside it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from gradwire.wire.communicator import Communicator, ring_bytes

# Smaller ones pass a shaper's bucket as if it were not there (docs/netlab.md).
PROBE_ELEMENTS = 1 << 16
_SMALL_ELEMENTS = 16
_REPEATS = 3


def probe_transfer_us(communicator: Communicator) -> int:
    """How long the sum of a quarter of a megabyte takes now, in microseconds; on the lane, every rank."""
    return int(1e6 * _time_of(communicator, PROBE_ELEMENTS))


def probe_link(communicator: Communicator) -> tuple[float, float]:
    """(seconds a hop of the backend's all-reduce, seconds a byte that a rank sends); on the lane, every rank.

    What this rank sees; the slowest rank's numbers are the group's.
    """
    if communicator.world_size == 1:
        return 0.0, 0.0
    small_s = min(_time_of(communicator, _SMALL_ELEMENTS) for _ in range(_REPEATS + 1))
    large = sorted(_time_of(communicator, PROBE_ELEMENTS) for _ in range(_REPEATS))
    n_bytes = ring_bytes(4 * PROBE_ELEMENTS, communicator.world_size)
    hop_s = small_s / (2 * (communicator.world_size - 1))
    return hop_s, max(large[_REPEATS // 2] - small_s, 1e-7) / n_bytes


def _time_of(communicator: Communicator, n_elements: int) -> float:
    values = torch.zeros(n_elements)
    started = time.perf_counter()
    communicator.all_reduce(values)
    return time.perf_counter() - started


def processor_s(action: Callable[[], object], repeats: int = 3) -> float:
    """Processor time of this thread in `action`, the best of some; what others take meanwhile does not count."""
    best = float("inf")
    for _ in range(repeats):
        started = time.thread_time()
        action()
        best = min(best, time.thread_time() - started)
    return best


_MOST_ALL_PAIRS = 16  # ranks; above, each with its neighbour


def probe_pairs(communicator: Communicator) -> list[tuple[int, int, float, float]]:
    """(one, other, bytes/s, seconds there and back) of pairs of ranks, one pair at a time; on the lane, every rank alike."""
    n = communicator.world_size
    pairs = (
        [(a, b) for a in range(n) for b in range(a + 1, n)]
        if n <= _MOST_ALL_PAIRS
        else [(a, a + 1) for a in range(n - 1)]
    )
    found = torch.zeros((len(pairs), 2), dtype=torch.float64)
    for index, (one, other) in enumerate(pairs):
        tag = communicator.next_stream()
        if communicator.rank in (one, other):
            peer = other if communicator.rank == one else one
            starts = communicator.rank == one
            _bounce(communicator, peer, tag, _SMALL_ELEMENTS, starts)
            there_s = min(_bounce(communicator, peer, tag, _SMALL_ELEMENTS, starts) for _ in range(_REPEATS))
            large_s = _bounce(communicator, peer, tag, 2 * PROBE_ELEMENTS, starts)
            if starts:
                found[index, 0] = 2 * 8 * PROBE_ELEMENTS / max(large_s - there_s, 1e-7)
                found[index, 1] = there_s
        communicator.all_reduce(torch.zeros(1))  # the others wait their turn
    if n > 1:
        communicator.all_reduce(found)
    return [(one, other, rate, rtt_s) for (one, other), (rate, rtt_s) in zip(pairs, found.tolist(), strict=True)]


def _bounce(communicator: Communicator, peer: int, tag: int, n_elements: int, starts: bool) -> float:
    """Seconds for a message to a peer and one back."""
    values = torch.zeros(n_elements)
    started = time.perf_counter()
    for sends in (starts, not starts):
        work = communicator.isend(values, peer, tag) if sends else communicator.irecv(values, peer, tag)
        communicator.wait(work, peer)
    return time.perf_counter() - started
