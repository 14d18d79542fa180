"""Compression offload: gradients of a device go to host memory and back without holding up the device.

Each tensor of a bucket is copied by itself on a stream beside the computation, into pinned memory, and has an event of
its own: what compresses the first tensor need not wait for the last one. The lane waits for events; the training thread
never does.

Checked with a stand-in for the device (tests/distributed/test_staging.py). On CUDA itself it has not been run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Arrival(Protocol):
    """One copy under way."""

    def wait(self) -> None:
        """Return when it is done; on any thread."""
        ...


class Device(Protocol):
    """What staging asks of a device."""

    def new_buffer(self, n_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """(n_elements,) of host memory that the device copies to by itself."""
        ...

    def start_copies(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> list[Arrival]:
        """Copy each source on the device to its target on the host, in order, after what the device has been given."""
        ...

    def copy_back(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy from the host to the device; returns when the target may be read by any stream."""
        ...


class CudaDevice:
    """A CUDA device, with a stream of gradwire's own for the copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def new_buffer(self, n_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(n_elements, dtype=dtype, pin_memory=True)

    def start_copies(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> list[Arrival]:
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())  # the kernels that write the gradients
            arrivals: list[Arrival] = []
            with torch.cuda.stream(self._stream):
                for source, target in zip(sources, targets, strict=True):
                    target.copy_(source, non_blocking=True)
                    source.record_stream(self._stream)  # its memory must not be given away before
                    event = torch.cuda.Event(blocking=True)  # the waiting lane sleeps, and leaves its core to others
                    event.record(self._stream)
                    arrivals.append(_CudaArrival(event))
        return arrivals

    def copy_back(self, source: torch.Tensor, target: torch.Tensor) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            target.record_stream(self._stream)
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream)
        event.synchronize()


class _CudaArrival:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


class StagedBucket:
    """One bucket on its way.

    Attributes:
        on_device: DDP's buffer.
        on_host: (n,) pinned; a tensor's values are valid once `wait_for` of it has returned.
    """

    def __init__(
        self, device: Device, on_device: torch.Tensor, on_host: torch.Tensor, bounds: Sequence[tuple[int, int]]
    ) -> None:
        self.on_device, self.on_host = on_device, on_host
        self._device = device
        self._arrivals = device.start_copies([on_device[a:b] for a, b in bounds], [on_host[a:b] for a, b in bounds])

    def wait_for(self, position: int) -> None:
        """Return when tensor number `position` of the bucket has arrived."""
        self._arrivals[position].wait()

    def wait_for_all(self) -> None:
        """Return when the whole bucket has arrived."""
        for arrival in self._arrivals:
            arrival.wait()

    def copy_back(self) -> None:
        """The host's values into DDP's buffer, before this returns; on the lane."""
        self._device.copy_back(self.on_host, self.on_device)


class HostStaging:
    """The pinned buffers of one attachment: one for every bucket, used again at every step.

    A bucket's buffer is free again when its reduction is done, which DDP waits for before its next backward pass.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers: dict[int, torch.Tensor] = {}

    def stage(self, index: int, buffer: torch.Tensor, bounds: Sequence[tuple[int, int]]) -> StagedBucket:
        """Start copying bucket `index`, (n,) on the device; `bounds`: first and past-the-last value of each tensor."""
        on_host = self._buffers.get(index)
        if on_host is None or on_host.numel() != buffer.numel() or on_host.dtype != buffer.dtype:
            on_host = self._buffers[index] = self._device.new_buffer(buffer.numel(), buffer.dtype)
        return StagedBucket(self._device, buffer, on_host, bounds)
