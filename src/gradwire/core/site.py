"""Device buckets reduced where they are: the stream, the memory and the verdict of one attachment's work on a device.

Nothing here waits for the device but, on the lane, `DeviceSite.found`, for what a step that is over has found, and
`DeviceSite.read`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from gradwire.core.staging import check_accelerator
from gradwire.errors import OutOfMemory, Unsupported
from gradwire.gpu.kernels import upload
from gradwire.telemetry.recorder import BucketRecord
from gradwire.wire.communicator import Communicator, ring_bytes
from gradwire.wire.device_group import DeviceGroup


class Verdict(NamedTuple):
    """What kernels noted in a step.

    Attributes:
        error: the error word of messages that were not whole; 0 for none.
        is_finite: whether all that was reduced was finite; the same on all ranks.
    """

    error: int
    is_finite: bool


class Reading:
    """Values on their way to the host, behind all that was enqueued; made with a stream current.

    Args:
        values: on any device; those of the CPU are there at once, and stay where they are.
        on_host: of the shape and dtype of `values`, pinned. None: made here.
    """

    def __init__(self, values: torch.Tensor, on_host: torch.Tensor | None = None) -> None:
        self._on_host = values
        self._arrival: torch.Event | None = None
        if values.device.type == "cpu":
            return
        target = torch.empty(values.shape, dtype=values.dtype, pin_memory=True) if on_host is None else on_host
        self._on_host = target.copy_(values, non_blocking=True)
        self._arrival = torch.Event(device=values.device, blocking=True)
        self._arrival.record(torch.accelerator.current_stream(values.device))

    def is_there(self) -> bool:
        """Whether `wait` would not wait."""
        return self._arrival is None or self._arrival.query()

    def wait(self) -> torch.Tensor:
        """The values on the host, when they are there."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._on_host


class DeviceSite:
    """Where an attachment works on a device. Collective to make.

    Args:
        devices: of the parameters.
    Raises: Unsupported (more than one device, or none that is torch's accelerator), OutOfMemory.

    Attributes:
        stream: on which all of it runs, in order.
        group: the same device's collectives.
        flags: (2,) int32 on the device: error word, and not 0 if something was not finite.
    """

    def __init__(self, communicator: Communicator, devices: Sequence[torch.device]) -> None:
        if len(set(devices)) != 1 or devices[0].type == "cpu":
            names = ", ".join(sorted({str(device) for device in devices})) or "no parameters"
            raise Unsupported(
                f'placement="device" is for a model on one device, and this one is on {names}: leave placement out'
            )
        self.device, self._world_size = devices[0], communicator.world_size
        check_accelerator(self.device)
        self.stream = torch.Stream(device=self.device)
        self.group = DeviceGroup(communicator, self.device)
        self._memory: dict[str, torch.Tensor] = {}
        with self.stream:
            self.flags = torch.zeros(2, dtype=torch.int32, device=self.device)
        self._on_host = torch.empty(2, dtype=torch.int32, pin_memory=True)
        self._arrival: torch.Event | None = None
        self._read = torch.empty(0, dtype=torch.int64)

    def scratch(self, name: str, n_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """(n_elements,) of work space on the device that lives until the next call with this name."""
        n_bytes = n_elements * dtype.itemsize
        kept = self._memory.get(name)
        if kept is None or kept.numel() < n_bytes:
            self._memory.pop(name, None)
            kept = self._memory[name] = torch.empty(max(1, n_bytes), dtype=torch.uint8, device=self.device)
        return kept[:n_bytes].view(dtype)

    def mean(self, values: torch.Tensor, record: BucketRecord, wire_dtype: torch.dtype | None = None) -> None:
        """Replace `values` (n,) by their mean over the ranks, as DDP takes it; with the stream current.

        `wire_dtype`: what wider values are rounded to for the sum.
        """
        values.mul_(1.0 / self._world_size)
        travelling = values
        if wire_dtype is not None and wire_dtype.itemsize < values.element_size():
            travelling = self.scratch("rounded", values.numel(), wire_dtype).copy_(values)
        self.sum(travelling, record)
        if travelling is not values:
            values.copy_(travelling)

    def sum(self, values: torch.Tensor, record: BucketRecord) -> None:
        """Replace `values` by their sum over the ranks, and count what travels; with the stream current."""
        self.group.sum(values)
        record.count_exchanged(ring_bytes(values.numel() * values.element_size(), self._world_size))

    def largest(self, values: torch.Tensor, record: BucketRecord) -> None:
        """As `sum`, the largest of every element."""
        self.group.largest(values)
        record.count_exchanged(ring_bytes(values.numel() * values.element_size(), self._world_size))

    def upload(self, values: torch.Tensor) -> torch.Tensor:
        """The host's `values` on the device, by an enqueued copy; with the stream current."""
        return upload(values, self.device)

    def divide(self, values: torch.Tensor, divisor: float) -> torch.Tensor:
        """Divide `values` in place, rounding once as a CPU does: by a scalar, a GPU multiplies by its reciprocal."""
        return values.div_(torch.full((1,), divisor, dtype=values.dtype, device=self.device))

    def note_finite(self, values: torch.Tensor) -> bool:
        """Note whether all `values` are finite, which the host does not know yet: True; with the stream current."""
        self.flags[1:].bitwise_or_(values.isfinite().all().logical_not())
        return True

    def read(self, values: torch.Tensor) -> list[int]:
        """(n,) int64 values on the host, behind all that was enqueued; with the stream current, on the lane, which waits."""
        reading = Reading(values, self._pinned(values.numel()))
        found: list[int] = reading.wait().tolist()
        return found

    def _pinned(self, n_elements: int) -> torch.Tensor:
        if self._read.numel() < n_elements:
            self._read = torch.empty(n_elements, dtype=torch.int64, pin_memory=True)
        return self._read[:n_elements]

    def begin_step(self) -> None:
        """Forget what was noted; on the lane."""
        self._arrival = None
        with self.stream:
            self.flags.zero_()

    def end_step(self) -> None:
        """Start reading what was noted; on the lane."""
        with self.stream:
            self._on_host.copy_(self.flags, non_blocking=True)
            self._arrival = torch.Event(device=self.device, blocking=True)
            self._arrival.record(self.stream)

    def found(self) -> Verdict | None:
        """What the step that ended last has noted, once; None: none has ended since. On the lane; waits for its end."""
        if self._arrival is None:
            return None
        self._arrival.synchronize()
        self._arrival = None
        error, not_finite = self._on_host.tolist()
        return Verdict(error, not not_finite)

    def close(self) -> None:
        """Let go of memory and connections, after the lane has ended."""
        self._memory.clear()
        self.group.close(self.stream)


class ResidentBucket:
    """One bucket that stays on its device. Made on the thread whose stream writes it; used on the lane."""

    def __init__(self, site: DeviceSite, on_device: torch.Tensor) -> None:
        self.on_device, self._site = on_device, site
        self._written = torch.Event(device=site.device)
        self._written.record(torch.accelerator.current_stream(site.device))
        on_device.record_stream(site.stream)  # its memory must not be given away before

    @contextlib.contextmanager
    def at_work(self) -> Iterator[DeviceSite]:
        """What is enqueued inside comes on the site's stream, behind the gradient; on the lane. Raises: OutOfMemory."""
        self._follow()
        try:
            with self._site.stream:
                yield self._site
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"{self._site.device} has no memory left for what gradwire sends: make the model or the batch smaller, or "
                f"leave placement out, which needs none there. Backend: {error}"
            ) from error

    def _follow(self) -> None:
        self._site.stream.wait_event(self._written)

    def complete(self, reduced: torch.futures.Future) -> None:
        """Complete DDP's future: whoever waits for it has his stream wait for the site's."""
        with self._site.stream:
            reduced.set_result(self.on_device)
