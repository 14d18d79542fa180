"""Device buckets in host memory: the one place that knows of streams, events and pinned memory.

A bucket of a device is copied to pinned memory on a stream of gradwire's own, behind the kernels that write it. The lane
waits for the copy, the scheme works on host memory as ever, and the mean is copied back on the same stream. DDP's future
is completed within that stream, so the streams of autograd wait for the copy and the host never does.

Everything of one device goes through one stream, so a copy into pinned memory comes after what was copied back from it.
Only torch's device-neutral interface is used: `torch.accelerator`, `torch.Stream`, `torch.Event`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch

from gradwire.errors import OutOfMemory
from gradwire.wire.device_wire import Reading, check_accelerator

_ALIGNMENT_BYTES = 512


class Staging:
    """The streams and the pinned memory of one attachment.

    Of `parameters`, whose gradients will come, those on a device get their pinned memory now, because to pin is slow.
    Raises: OutOfMemory, Unsupported (a device that is not torch's accelerator).
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        self._devices: dict[torch.device, _Device] = {}
        n_bytes: Counter[torch.device] = Counter()
        for parameter in parameters:
            if parameter.device.type != "cpu":
                n_bytes[parameter.device] += _aligned(parameter.nbytes)  # each may be a bucket of its own
        for device, needed in n_bytes.items():
            self._device(device).reserve(needed)

    def stage(self, index: int, buffer: torch.Tensor, bounds: Sequence[tuple[int, int]]) -> "StagedBucket":
        """Start copying a bucket, (n,) on its device; on the thread whose stream writes it. `index`: in its backward
        pass. `bounds`: first and past-the-last value of each piece that can be waited for by itself."""
        if index == 0:  # all buckets of the pass before are reduced
            for device in self._devices.values():
                device.begin_step()
        return StagedBucket(self._device(buffer.device), buffer, bounds)

    def _device(self, device: torch.device) -> "_Device":
        if device not in self._devices:
            self._devices[device] = _Device(device)
        return self._devices[device]


class StagedBucket:
    """One bucket on its way from DDP's buffer to `on_host`, (n,) pinned: valid once `wait_for` of a piece has returned."""

    def __init__(self, device: "_Device", on_device: torch.Tensor, bounds: Sequence[tuple[int, int]]) -> None:
        self.on_device, self._stream, self.compute = on_device, device.stream, device.compute
        self.on_host = device.take(on_device.numel(), on_device.dtype)
        device._follow_caller()
        with self._stream:
            self._arrivals = [Reading(on_device[a:b], self.on_host[a:b]) for a, b in bounds]
            on_device.record_stream(self._stream)  # its memory must not be given away before

    def wait_for(self, position: int) -> None:
        """Return when piece number `position` has arrived; on the lane."""
        self._arrivals[position].wait()

    def wait_for_all(self) -> None:
        """Return when the whole bucket has arrived; on the lane."""
        if self._arrivals:
            self._arrivals[-1].wait()  # the stream is in order

    def send_back(self) -> None:
        """Start copying the host's values into DDP's buffer; waits for nothing."""
        with self._stream:
            self.on_device.copy_(self.on_host, non_blocking=True)
            self.on_device.record_stream(self._stream)

    def complete(self, reduced: torch.futures.Future) -> None:
        """Complete DDP's future: whoever waits for it has his stream wait for what was sent back."""
        with self._stream:
            reduced.set_result(self.on_device)


class _Device:
    """One device's stream and pinned memory."""

    def __init__(self, device: torch.device) -> None:
        check_accelerator(device)
        self._name = device
        self.stream = torch.Stream(device=device)
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._n_taken = 0
        self._results: dict[int, torch.Tensor] = {}  # by position in the step, of what was computed on the device
        self._n_results = 0

    def reserve(self, n_bytes: int) -> None:
        """Make room for a step of `n_bytes`."""
        if n_bytes > self._memory.numel():
            self._memory, self._n_taken = self._pin(n_bytes), 0

    def begin_step(self) -> None:
        self._n_taken = self._n_results = 0

    def take(self, n_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """(n_elements,) of pinned memory that nobody else gets in this step."""
        n_bytes = n_elements * dtype.itemsize
        if self._n_taken + n_bytes > self._memory.numel():
            self.reserve(max(n_bytes, 2 * self._memory.numel()))  # buckets hold on to the memory that they have
        taken = self._memory[self._n_taken : self._n_taken + n_bytes].view(dtype)
        self._n_taken += _aligned(n_bytes)
        return taken

    def _pin(self, n_bytes: int) -> torch.Tensor:
        try:
            return torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True, device="cpu")
        except RuntimeError as error:
            raise OutOfMemory(
                f"{n_bytes / 1e6:.0f} MB of host memory could not be pinned for the gradients of {self._name}: free host "
                "memory or raise the limit on locked memory (ulimit -l), or train without gradwire; DDP goes on by itself "
                f"after close(). Backend: {error}"
            ) from error

    def compute(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The (n,) result of `function`, which works on the device, in host memory; on the lane. It sees the parameters and the
        optimizer as the backward pass sees them."""
        position, self._n_results = self._n_results, self._n_results + 1
        try:
            with self.stream:
                result = function()
                n_bytes, kept = result.nbytes, self._results.get(position)
                if kept is None or kept.numel() < n_bytes:
                    kept = self._results[position] = self._pin(n_bytes)
                arrival = Reading(result, kept[:n_bytes].view(result.dtype))
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"{self._name} has no memory left for what gradwire computes there: make the model or the batch smaller, or "
                f"close() the attachment and train without gradwire. Backend: {error}"
            ) from error
        return arrival.wait()

    def _follow_caller(self) -> None:
        self.stream.wait_stream(torch.accelerator.current_stream(self._name))


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
