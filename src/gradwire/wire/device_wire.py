"""The wire of buckets that stay on their device.

Everything is enqueued on one stream, and nothing here waits for the device but, on the lane, `outcome`, for a step that is
over, and `read`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from gradwire.errors import OutOfMemory, Unsupported
from gradwire.gpu.kernels import upload
from gradwire.wire.communicator import Communicator
from gradwire.wire.wire import Flag, StepOutcome, Wire

_HEAD_WORDS = 2  # int32: the sum of all other words, 1 if the gradient is not finite
_CHECKSUM_ERROR = 3  # as an error word, by gpu/source/device.hpp


class DeviceWire(Wire):
    """Collectives between the ranks' devices. `devices`: of the parameters. Collective to make.

    Raises: Unsupported (more than one device, or none that is torch's accelerator), OutOfMemory.
    """

    on_device = True

    def __init__(self, communicator: Communicator, devices: Sequence[torch.device]) -> None:
        super().__init__(communicator)
        if len(set(devices)) != 1 or devices[0].type == "cpu":
            names = ", ".join(sorted({str(device) for device in devices})) or "no parameters"
            raise Unsupported(
                f'placement="device" is for a model on one device, and this one is on {names}: leave placement out'
            )
        self.device = devices[0]
        check_accelerator(self.device)
        self.stream = torch.Stream(device=self.device)
        self.group = DeviceGroup(communicator, self.device)  # uncounted
        self._memory: dict[str, Tensor] = {}
        with self.stream:  # of the step: error word, and not 0 if something was not finite
            self.flags = torch.zeros(2, dtype=torch.int32, device=self.device)
        self._step = _DeviceStep()
        self._of_bucket: Tensor | None = None  # (2,) int32, as `flags`, of one bucket's own messages

    def begin_step(self) -> None:
        self._step.arrival = None
        with self.stream:
            self.flags.zero_()

    def end_step(self) -> None:
        with self.stream:
            self._step.arrival = Reading(self.flags, self._step.pinned)

    def outcome(self) -> StepOutcome | None:
        arrival, self._step.arrival = self._step.arrival, None
        if arrival is None:
            return None
        error, not_finite = arrival.wait().tolist()
        return StepOutcome(not not_finite, error)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        try:
            with self.stream:
                yield
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"{self.device} has no memory left for what gradwire sends: make the model or the batch smaller, or "
                f"leave placement out, which needs none there. Backend: {error}"
            ) from error

    def lend(self, values: Iterable[Tensor]) -> None:
        stream = torch.accelerator.current_stream(self.device)
        stream.wait_stream(self.stream)
        for one in values:
            one.record_stream(stream)

    def timing(self, kind: str) -> AbstractContextManager[None]:
        times = self._step.times
        return contextlib.nullcontext() if times is None else times.timing(kind)

    def note_times(self, times: "DeviceTimes | None") -> None:
        """Have the times of all that is enqueued from now on be noted there, or nowhere."""
        self._step.times = times

    def scratch(self, name: str, n_elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
        n_bytes = n_elements * dtype.itemsize
        kept = self._memory.get(name)
        if kept is None or kept.numel() < n_bytes:
            self._memory.pop(name, None)
            kept = self._memory[name] = torch.empty(max(1, n_bytes), dtype=torch.uint8, device=self.device)
        return kept[:n_bytes].view(dtype)

    def place(self, values: Tensor) -> Tensor:
        return upload(values, self.device)

    def divide(self, values: Tensor, divisor: float) -> Tensor:
        # By a scalar, a GPU multiplies by its reciprocal.
        return values.div_(torch.full((1,), divisor, dtype=values.dtype, device=self.device))

    def all_finite(self, values: Tensor) -> Tensor:
        return values.isfinite().all()

    def used(self, gradient: Tensor, spans: Sequence[tuple[int, int]]) -> list[bool]:
        return [True] * len(spans)

    def read(self, *values: Tensor) -> list[int]:
        numbers = torch.cat([one.long() for one in values])
        if self._step.read.numel() < numbers.numel():
            self._step.read = torch.empty(numbers.numel(), dtype=torch.int64, pin_memory=True, device="cpu")
        found: list[int] = Reading(numbers, self._step.read[: numbers.numel()]).wait().tolist()
        self.communicator.raise_if_failed()  # what was read then is not what ranks have sent
        return found

    # ---- what is not finite, and what is not whole

    @property
    def error(self) -> Tensor:
        return self._bucket_flags()[:1]

    def check(self, rank: int) -> None:
        """Here nobody waits."""

    def note(self, is_finite: Flag) -> None:
        self.flags[1:].bitwise_or_(is_finite.logical_not())

    def note_message(self, is_finite: Flag) -> None:
        self._bucket_flags()[1:].bitwise_or_(is_finite.logical_not())

    def conclude(self, values: Tensor) -> None:
        found = self._of_bucket
        if found is not None:
            torch.maximum(self.flags[:1], found[:1], out=self.flags[:1])
            self.flags[1:].bitwise_or_(found[1:])
            values.masked_fill_(found.any(), float("nan"))

    def _bucket_flags(self) -> Tensor:
        if self._of_bucket is None:
            self._of_bucket = torch.zeros(2, dtype=torch.int32, device=self.device)
        return self._of_bucket

    def sum(self, values: Tensor, op: Any = ReduceOp.SUM) -> Tensor:
        with self.timing("communicate"):
            self.start_sum(values, op)()
        return values

    def start_sum(self, values: Tensor, op: Any = ReduceOp.SUM) -> Callable[[], None]:
        wait = self.group.start_reduce(values, op)
        self.record.count_exchanged(self._ring_bytes(values))
        return wait

    def _start_gather_sum(self, values: Tensor) -> Callable[[], None]:
        rows = self.scratch("few", self.world_size * values.numel(), values.dtype).view(self.world_size, -1)
        wait = self.group.start_all_gather(rows, values)

        def add() -> None:
            wait()
            values.copy_(functools.reduce(torch.add, rows))

        self.record.count_exchanged((self.world_size - 1) * values.nbytes)
        return add

    def _all_to_all(self, rows: Tensor) -> Tensor:
        theirs = self.scratch("theirs", rows.numel(), rows.dtype).view(rows.shape)
        self.group.all_to_all(theirs, rows)
        return theirs

    def _all_gather(self, values: Tensor) -> Tensor:
        received = self.scratch("received", self.world_size * values.numel(), values.dtype).view(self.world_size, -1)
        self.group.all_gather(received, values)
        return received

    def _seal(self, rows: Tensor, is_finite: Flag) -> Tensor:
        messages = torch.cat([rows.new_zeros(len(rows), _HEAD_WORDS), rows], 1)
        messages[:, 1].copy_(is_finite.logical_not())
        messages[:, 0].copy_(messages[:, 1:].sum(1, dtype=torch.int64))
        return messages

    def _open(self, received: Tensor) -> Tensor:
        self.record.count_exchanged((self.world_size - 1) * 4 * received.shape[1])
        is_wrong = (received[:, 1:].sum(1, dtype=torch.int64).to(torch.int32) != received[:, 0]).any()
        torch.maximum(self.error, is_wrong.to(torch.int32).mul_(_CHECKSUM_ERROR).view(1), out=self.error)
        self.note_message((received[:, 1] == 0).all())
        return received[:, _HEAD_WORDS:]

    def largest(
        self, is_used: Sequence[bool], n_scales: int, write_scales: Callable[[Tensor], None]
    ) -> tuple[list[bool], Tensor]:
        scales = self.scratch("agreement", n_scales)
        write_scales(scales)
        self.sum(scales.view(torch.int32), ReduceOp.MAX)
        self.note(scales.isfinite().all())
        return list(is_used), scales

    def close(self) -> None:
        """After the lane has ended."""
        self._memory.clear()
        self.group.close(self.stream)


class _DeviceStep:  # shared on the host by the ends of all buckets of a step
    def __init__(self) -> None:
        self.pinned = torch.empty(2, dtype=torch.int32, pin_memory=True, device="cpu")
        self.arrival: Reading | None = None
        self.read = torch.empty(0, dtype=torch.int64, device="cpu")
        self.times: DeviceTimes | None = None


class DeviceGroup:
    """The ranks' devices in a group of gradwire's own, of the backend that torch has for them (NCCL): apart from DDP's, so
    that the two never interleave. Collective to make.

    A collective is enqueued on the current stream and waits for nothing; ranks issue them in one order, that of their lanes.
    """

    def __init__(self, communicator: Communicator, device: torch.device) -> None:
        self._is_broken = False
        self._group = _make_backend(communicator, device)
        communicator.break_together(self.break_off)

    def sum(self, values: torch.Tensor) -> None:
        """Replace `values` by their sum over all ranks."""
        self.start_reduce(values)()

    def start_reduce(self, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Callable[[], None]:
        """Start to reduce `values` over all ranks; the current stream goes on until it waits by the result."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(op)
        wait: Callable[[], None] = self._group.allreduce([values], options).wait  # which has the current stream wait
        return wait

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Row i of every rank's `sent` (world, n) goes to rank i, into its `received` (world, n), by sender."""
        self._group.alltoall_base(received, sent, [], []).wait()

    def exchange(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> None:
        """`sent[i]` (n,) goes to rank i, from whom `received[i]` comes; empty: nothing goes there."""
        self._group.alltoall(list(received), list(sent)).wait()

    def all_gather(self, gathered: torch.Tensor, values: torch.Tensor) -> None:
        """Every rank's `values` (n,) into `gathered` (world, n), by rank."""
        self.start_all_gather(gathered, values)()

    def start_all_gather(self, gathered: torch.Tensor, values: torch.Tensor) -> Callable[[], None]:
        """As `all_gather`; the current stream goes on until it waits by the result."""
        wait: Callable[[], None] = self._group._allgather_base(gathered.view(-1), values).wait
        return wait

    def break_off(self) -> None:
        """End what is under way, on the device too: a peer has failed, and would be waited for."""
        self._is_broken = True
        with contextlib.suppress(Exception):  # it may be broken already
            self._group.abort()

    def close(self, stream: torch.Stream) -> None:
        """Let go of the connections, when `stream` has done with them; at once, if they are broken."""
        if not self._is_broken:
            stream.synchronize()
            self._group.shutdown()


def _make_backend(communicator: Communicator, device: torch.device) -> Any:  # torch's annotations lack its collectives
    # Without `dist.new_group`, as the communicator's: it gives a second group over the same ranks the first one's place in the
    # store, where what the first has left leads to connections that are gone.
    name = dist.Backend.default_device_backend_map.get(device.type, "")
    place = communicator.store_for("device"), communicator.rank, communicator.world_size
    timeout = timedelta(seconds=communicator.timeout_s)
    if name == dist.Backend.NCCL and dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(*place, options)
    plugin = dist.Backend._plugins.get(name.upper())
    if plugin is None or plugin.extended_api:
        raise Unsupported(
            f"torch has no collectives between devices of type {device.type!r} that gradwire knows: leave placement out, and "
            "gradients travel through host memory"
        )
    return plugin.creator_fn(*place, timeout)


def serves(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """True if a process group of the user's carries tensors of `device` by the backend that torch has for such devices."""
    own = dist.Backend.default_device_backend_map.get(device.type, "")
    return device.type != "cpu" and bool(own) and f"{device.type}:{own}" in dist.get_backend_config(group).split(",")


class DeviceTimes:
    """Durations by kind, of work on the streams that are current: known to the host when it has passed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[str, torch.Event, torch.Event]] = []

    @contextlib.contextmanager
    def timing(self, kind: str) -> Iterator[None]:
        """Note how long the device takes for what is enqueued inside."""
        begun = self._now()
        yield
        self._spans.append((kind, begun, self._now()))

    def take(self) -> dict[str, float]:
        """Seconds by kind, once all of them are over: the host waits. Forgets them."""
        spans, self._spans = self._spans, []
        taken: dict[str, float] = {}
        for kind, begun, ended in spans:
            ended.synchronize()
            taken[kind] = taken.get(kind, 0.0) + begun.elapsed_time(ended) / 1e3
        return taken

    def _now(self) -> torch.Event:
        event = torch.Event(device=self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event


def time_on(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds that the device takes for what `work` enqueues on the current stream, for which this thread waits."""
    times = DeviceTimes(device)
    with times.timing("work"):
        work()
    return times.take()["work"]


class Reading:
    """Values on their way to `on_host`, behind all that was enqueued; made with a stream current.

    Those of the CPU are there at once, and stay where they are. `on_host`: of their shape and dtype, pinned; None: made here.
    """

    def __init__(self, values: Tensor, on_host: Tensor | None = None) -> None:
        self.on_host = values
        self._arrival: torch.Event | None = None
        if values.device.type == "cpu":
            return
        if on_host is None:
            on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True, device="cpu")
        self.on_host = on_host.copy_(values, non_blocking=True)
        # Blocking, where it is heeded: who waits leaves its core.
        self._arrival = torch.Event(device=values.device, blocking=True)
        self._arrival.record(torch.accelerator.current_stream(values.device))

    def is_there(self) -> bool:
        """True if `wait` would not wait."""
        return self._arrival is None or self._arrival.query()

    def wait(self) -> Tensor:
        """The values on the host, when they are there."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self.on_host


class ResidentBucket:
    """One bucket that stays on its device. Made on the thread whose stream writes it; used on the lane."""

    def __init__(self, wire: DeviceWire, on_device: Tensor) -> None:
        self.on_device, self._wire = on_device, wire
        self._written = torch.Event(device=wire.device)
        self._written.record(torch.accelerator.current_stream(wire.device))
        on_device.record_stream(wire.stream)  # its memory must not be given away before

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Enqueue what is inside on the wire's stream, behind the gradient; on the lane."""
        self._wire.stream.wait_event(self._written)
        with self._wire.at_work():
            yield

    def complete(self, reduced: torch.futures.Future) -> None:
        """Complete DDP's future: whoever waits for it has its stream wait for the wire's."""
        with self._wire.stream:
            reduced.set_result(self.on_device)


def check_accelerator(device: torch.device) -> None:
    """Refuse what is not torch's accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        raise Unsupported(
            f"a bucket on {device}: gradwire takes buckets of {accelerator or 'no device'}, torch's accelerator here; "
            "train there or on the CPU"
        )


def check_not_captured(device: torch.device) -> None:
    """Refuse to work while a CUDA graph is being captured."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise Unsupported(
            "a CUDA graph cannot capture a backward pass whose gradients gradwire exchanges: its messages are made anew in "
            "every step, partly by the host. Capture the model's parts without DDP around them, or none"
        )
