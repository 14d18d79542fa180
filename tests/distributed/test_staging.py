"""Offload: nothing of a device's gradient is read before its own copy has arrived, and the mean goes back to it.

A stand-in for the device copies as late as it may, when somebody waits; CUDA itself is not in this machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.core.slot import slots_by_name
from gradwire.core.staging import HostStaging
from gradwire.schemes.slimgc import SlimGC
from gradwire.telemetry.recorder import Recorder
from gradwire.wire.communicator import Communicator
from ranks import run_ranks

SHAPES = [(40,), (3,), (25, 4), (0,), (7,)]


class LateArrival:
    def __init__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._source, self._target = source, target
        self.n_waits = 0

    def wait(self) -> None:
        self.n_waits += 1
        self._target.copy_(self._source)


class LateDevice:
    """Leaves NaN where a copy has not been waited for."""

    def __init__(self) -> None:
        self.arrivals: list[LateArrival] = []
        self.n_buffers = 0

    def new_buffer(self, n_elements: int, dtype: torch.dtype) -> torch.Tensor:
        self.n_buffers += 1
        return torch.empty(n_elements, dtype=dtype)

    def start_copies(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> list[LateArrival]:
        started = []
        for source, target in zip(sources, targets, strict=True):
            target.fill_(math.nan)
            started.append(LateArrival(source.clone(), target))
        self.arrivals += started
        return started

    def copy_back(self, source: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(source)


def reduce_staged(rank: int, world_size: int) -> None:
    parameters = [torch.zeros(shape) for shape in SHAPES]
    bounds = []
    for parameter in parameters:
        start = bounds[-1][1] if bounds else 0
        bounds.append((start, start + parameter.numel()))
    for threshold in (0, 100, 1 << 62):
        schemes = [SlimGC("one-bit", threshold_bytes=threshold) for _ in range(2)]
        device = LateDevice()
        staging = HostStaging(device)
        communicators = [Communicator(timeout_s=100) for _ in schemes]
        for scheme, communicator in zip(schemes, communicators, strict=True):
            slots = slots_by_name({str(i): p for i, p in enumerate(parameters)})
            scheme.bind(Session(communicator, Recorder(rank, world_size), None, slots, lambda: 1.0))
        for step in range(3):
            gradient = torch.randn(bounds[-1][1], generator=torch.Generator().manual_seed(10 * rank + step))
            on_device, plain = gradient.clone(), gradient.clone()
            staged = staging.stage(0, on_device, bounds)
            buckets = [
                Bucket(staged.on_host, parameters, [a for a, _ in bounds], step=step, staged=staged),
                Bucket(plain, parameters, [a for a, _ in bounds], step=step),
            ]
            for scheme, communicator, bucket in zip(schemes, communicators, buckets, strict=True):
                communicator.submit(scheme.begin_step, step)
                scheme.reduce(bucket).wait()
                communicator.submit(scheme.end_step, step).wait()
            staged.copy_back()
            assert torch.equal(on_device, plain), (threshold, step)
            assert on_device.isfinite().all()
        assert all(arrival.n_waits for arrival in device.arrivals)
        assert device.n_buffers == 1, "pinned memory is used again"
        for scheme, communicator in zip(schemes, communicators, strict=True):
            scheme.close()
            communicator.close()


def test_staged_gradients_are_read_only_after_their_own_copy_and_reduce_to_the_same_bits() -> None:
    run_ranks(reduce_staged, 2)
