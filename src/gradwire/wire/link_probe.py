"""Measures a link by a few small collectives: before training, and now and then beside it."""

import time
from collections.abc import Callable

import torch

from gradwire.wire.communicator import Communicator, ring_bytes
from gradwire.wire.device_wire import DeviceWire, time_on
from gradwire.wire.wire import Wire

# Smaller ones pass a shaper's bucket as if it were not there (docs/netlab.md).
PROBE_ELEMENTS = 1 << 16
# Between devices 16 MB: at 10 GB/s they take a millisecond and a half, where a collective of nothing takes 50 us.
DEVICE_PROBE_ELEMENTS = 1 << 22
_SMALL_ELEMENTS = 16
_REPEATS = 3


def probe_elements(wire: Wire) -> int:
    """Values in the sum that a probe times."""
    return DEVICE_PROBE_ELEMENTS if wire.on_device else PROBE_ELEMENTS


def probe_transfer_us(wire: Wire) -> int:
    """Time the sum of a quarter of a megabyte, of 16 between devices, in microseconds; on the lane, every rank."""
    return int(1e6 * _time_of(wire, probe_elements(wire)))


def probe_link(wire: Wire) -> tuple[float, float]:
    """(seconds a hop of the backend's all-reduce, seconds a byte that a rank sends); on the lane, every rank. What this
    rank sees; the slowest rank's numbers are the group's. Bytes/s are what NCCL's tests call the bus bandwidth."""
    if wire.world_size == 1:
        return 0.0, 0.0
    if wire.on_device:
        _time_of(wire, _SMALL_ELEMENTS)  # which connects
    small_s = min(_time_of(wire, _SMALL_ELEMENTS) for _ in range(_REPEATS + 1))
    large = sorted(_time_of(wire, probe_elements(wire)) for _ in range(_REPEATS))
    n_bytes = ring_bytes(4 * probe_elements(wire), wire.world_size)
    hop_s = small_s / (2 * (wire.world_size - 1))
    return hop_s, max(large[_REPEATS // 2] - small_s, 1e-7) / n_bytes


def _time_of(wire: Wire, n_elements: int) -> float:
    if isinstance(wire, DeviceWire):
        with wire.at_work():
            values = wire.scratch("probe", n_elements).zero_()
            return time_on(wire.device, lambda: wire.group.sum(values))
    values = torch.zeros(n_elements, dtype=torch.float32, device="cpu")
    started = time.perf_counter()
    wire.communicator.all_reduce(values)
    return time.perf_counter() - started


def processor_s(action: Callable[[], object]) -> float:
    """Processor time of this thread in `action`, the best of three; what others take meanwhile does not count."""
    best = float("inf")
    for _ in range(_REPEATS):
        started = time.thread_time()
        action()
        best = min(best, time.thread_time() - started)
    return best


_MOST_ALL_PAIRS = 16  # ranks; above, each with its neighbour


def probe_pairs(communicator: Communicator) -> list[tuple[int, int, float, float]]:
    """(one, other, bytes/s each way, seconds of next to nothing) of pairs of ranks, one pair at a time, on the lane."""
    n = communicator.world_size
    all_pairs = [(one, other) for one in range(n) for other in range(one + 1, n)]
    pairs = all_pairs if n <= _MOST_ALL_PAIRS else [(one, one + 1) for one in range(n - 1)]
    found = torch.zeros((len(pairs), 2), dtype=torch.float64, device="cpu")
    for index, pair in enumerate(pairs):
        if communicator.rank in pair:
            peer = sum(pair) - communicator.rank
            swap_s = [_swap_s(communicator, peer, _SMALL_ELEMENTS) for _ in range(_REPEATS + 1)]
            large_s = _swap_s(communicator, peer, 2 * PROBE_ELEMENTS)
            if communicator.rank == pair[0]:
                found[index, 0] = 8 * PROBE_ELEMENTS / max(large_s - min(swap_s), 1e-7)
                found[index, 1] = min(swap_s)
        if n > 1:
            communicator.all_reduce(torch.zeros(1, dtype=torch.float32, device="cpu"))  # the others wait their turn
    if n > 1:
        communicator.all_reduce(found)
    return [(*pair, *row) for pair, row in zip(pairs, found.tolist(), strict=True)]


def _swap_s(communicator: Communicator, peer: int, n_elements: int) -> float:
    started = time.perf_counter()
    communicator.swap(torch.zeros(n_elements, dtype=torch.float32, device="cpu"), peer)
    return time.perf_counter() - started
