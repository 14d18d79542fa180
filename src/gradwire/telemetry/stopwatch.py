"""The one clock: `Stopwatch` times laps, `StepClock` the steps of a DDP model; a record's `timing` counts busy time."""

import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

now_s = time.perf_counter
now_ns = time.perf_counter_ns
processor_ns = time.process_time_ns  # what all threads of this process compute


class Stopwatch:
    """Times laps, `with watch: ...`: the last is `start_ns` to `end_ns`, all since `take_ns` are `total_ns`."""

    __slots__ = ("_clock", "end_ns", "start_ns", "total_ns")

    def __init__(self, clock: Callable[[], int] = now_ns) -> None:
        self._clock = clock
        self.start_ns = self.end_ns = clock()
        self.total_ns = 0

    def begin(self) -> None:
        self.start_ns = self._clock()

    @property
    def elapsed_ns(self) -> int:
        """Since the lap began, or the watch was made."""
        return self._clock() - self.start_ns

    @property
    def elapsed_s(self) -> float:
        return self.elapsed_ns / 1e9

    def take_ns(self) -> int:
        """Return the total and begin it anew."""
        taken, self.total_ns = self.total_ns, 0
        return taken

    def __enter__(self) -> "Stopwatch":
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end_ns = self._clock()
        self.total_ns += self.end_ns - self.start_ns


Marks: TypeAlias = tuple[torch.Event, torch.Event, torch.Event]


class Lap(NamedTuple):
    """The time of a step, by the clock of the training thread."""

    took_ns: int
    waited_ns: int
    # At which the device came to the step's beginning, its last gradient and its end; None: on the CPU.
    on_device: Marks | None = None

    def read(self) -> tuple[int, int]:
        """(took_ns, waited_ns) where the model computes: waits until a device has come to the step's end."""
        if self.on_device is None:
            return self.took_ns, self.waited_ns
        began, computed, ended = self.on_device
        ended.synchronize()
        return int(1e6 * began.elapsed_time(ended)), int(1e6 * computed.elapsed_time(ended))


class StepClock:
    """Calls `begin` before every step and `end(lap)` after it, on the training thread; what they raise comes out of the passes.

    It sees `ddp` from outside, without a communication hook or a wrapper; `called` is what the user calls, the same or what
    torch.compile made of it. A step is from the start of its first forward pass to the end of its backward pass, that in which
    DDP synchronises. Between steps (loading, evaluation, the optimizer) nothing counts: no scheme changes it. Waiting is from
    the last gradient to the moment at which DDP has all means: autograd runs what is queued on it in order, so one callback
    comes before DDP's own and one after. A device runs behind the thread that gives it work: its own times are events on the
    stream of the passes, and nobody waits for them here.
    """

    def __init__(
        self, ddp: DistributedDataParallel, called: nn.Module, begin: Callable[[], None], end: Callable[[Lap], None]
    ) -> None:
        self._begin, self._end = begin, end
        self._ddp = weakref.ref(ddp)  # whose parameters hold this, and may live longer
        self._began_ns = self._computed_ns = 0
        self._events: list[torch.Event] = []
        self._is_queued = False
        self._handles: list[Any] = [called.register_forward_pre_hook(_BeforeForward(self._before_forward))]
        parameters = [parameter for parameter in ddp.parameters() if parameter.requires_grad]
        if not (ddp.find_unused_parameters or ddp.static_graph):
            parameters = parameters[-1:]  # each has a gradient in every pass; the last is ready early
        self._handles += [p.register_post_accumulate_grad_hook(self._on_gradient) for p in parameters]
        device = parameters[0].device if parameters else torch.device("cpu")
        self._device = None if device.type == "cpu" else device

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        if not torch.is_grad_enabled() or not module.training:
            return
        self._is_queued = False
        if not self._began_ns:
            self._begin()
            self._events.clear()
            self._mark()
            self._began_ns = time.perf_counter_ns()

    def _mark(self) -> None:
        """Note when the device comes to what it is given next."""
        if self._device is not None:
            event = torch.Event(device=self._device, enable_timing=True, blocking=True)
            event.record(torch.accelerator.current_stream(self._device))
            self._events.append(event)

    def _on_gradient(self, _: torch.Tensor) -> None:
        ddp = self._ddp()
        if self._is_queued or not self._began_ns or ddp is None or not ddp.require_backward_grad_sync:
            return
        self._is_queued = True
        torch.autograd.Variable._execution_engine.queue_callback(self._before_ddp_waits)

    def _before_ddp_waits(self) -> None:
        self._computed_ns = time.perf_counter_ns()
        self._mark()
        torch.autograd.Variable._execution_engine.queue_callback(self._after_ddp_waited)

    def _after_ddp_waited(self) -> None:
        now_ns, began_ns = time.perf_counter_ns(), self._began_ns
        self._began_ns = 0
        if began_ns:
            self._mark()
            marks = tuple(self._events)
            on_device = (marks[0], marks[-2], marks[-1]) if self._device is not None else None
            self._end(Lap(now_ns - began_ns, now_ns - self._computed_ns, on_device))

    def close(self) -> None:
        """Take the hooks back."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _BeforeForward:
    """The hook on the model. A copy of the model, and one that is saved and loaded, has one that does nothing."""

    def __init__(self, call: Callable[[nn.Module, Any], None] | None = None) -> None:
        # torch.compile would trace a hook into the model, and its clock with it.
        self._call = None if call is None else torch.compiler.disable(call)

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if self._call is not None:
            self._call(module, inputs)

    def __reduce__(self) -> "tuple[type[_BeforeForward], tuple[()]]":
        return _BeforeForward, ()
