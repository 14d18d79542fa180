"""DDP's door: its buckets to a Reducer, means and errors back.

An error never travels through the future that DDP waits for: DDP would turn it into a RuntimeError and be left unusable. It
is raised, with its own type, by a callback at the very end of the same backward pass, so no optimizer step can follow.
"""

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from gradwire.checks import choice as check_choice
from gradwire.core.bucket import Slot, check_trained, slot_of
from gradwire.doors.passes import call_last
from gradwire.errors import GradwireError, InvalidArgument, Unsupported
from gradwire.reducer import Reducer
from gradwire.schemes import Scheme
from gradwire.schemes.auto.scheme import Auto
from gradwire.telemetry.stopwatch import Lap, StepClock, now_ns
from gradwire.wire.communicator import Communicator, completed, ring_bytes
from gradwire.wire.device_wire import DeviceWire, serves
from gradwire.wire.wire import Wire

_log = logging.getLogger(__name__)

_NO_BUCKETS = (
    'with torch._dynamo.config.optimize_ddp = "python_reducer" DDP makes no buckets, which a scheme reduces: leave it at True '
    'before DistributedDataParallel(...), or attach scheme "auto", which leaves such a model as it is'
)


class Copied:
    """Stands in a copied or saved DDP model in the place of its hook's state. DDP gives the copy no hook, so none asks."""


_Places = tuple[list[torch.Tensor], list[Slot], list[int]]  # whose gradients lie where in a bucket of DDP's


class HookState(Reducer):
    """The state of `ddp_hook`: `ddp.register_comm_hook(HookState(...), gradwire.ddp_hook)`.

    `gradwire.attach` does the same and more in one call; use this with frameworks that only take a hook.

    Args:
        scheme, scaler, timeout_s, trace: as for Reducer.
        module: the model; needed by `state_dict`, which names parameters as the module does.
        optimizer: the optimizer, or a list of all; needed by schemes that read its state (gcomp with importance="paper").
        group: the process group that DDP uses (default: all ranks). Making a HookState is collective over it.
        placement: where device buckets are reduced: "staged", in host memory, or on the "device", between devices by the
            backend that torch has for them (docs/gpu.md). None: scheme "auto" chooses among both, others are staged.
    Raises: InvalidArgument, Unsupported.
    """

    def __init__(
        self,
        scheme: Scheme | str,
        module: torch.nn.Module | None = None,
        optimizer: Any = None,
        scaler: Any = None,
        group: dist.ProcessGroup | None = None,
        timeout_s: float | None = None,
        trace: bool = False,
        placement: str | None = None,
    ) -> None:
        self._group = group
        self._placement = None if placement is None else check_choice("placement", placement, ("staged", "device"))
        self._clock: StepClock | None = None  # which holds the model
        self._n_bytes = 0  # of a step that the clock sees
        self._register: Callable[[], None] = lambda: None  # puts the hook in, where the user does not
        # The model as its user calls it, if that is another.
        self._called: Callable[[], torch.nn.Module | None] = lambda: None
        self._shadows: list[torch.futures.Future[torch.Tensor]] = []
        self._closed_by_all = False
        self._waits_from_ns = 0
        super().__init__(scheme, group, module, optimizer, scaler, timeout_s=timeout_s, trace=trace)
        self._slot_of: dict[torch.Tensor, Slot] = {
            slot.parameter: slot for slot in self.slots.values() if slot.parameter is not None
        }
        self._places: dict[int, _Places] = {}
        if module is not None and not self.scheme.owns_step:
            self.close_with(module)

    def __reduce__(self) -> Any:
        return (Copied, ())  # connections and threads stay with the model that they serve

    def reduce_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the reduction of one DDP bucket; called by DDP during the backward pass."""
        if self.closed:
            return self._all_reduce_as_ddp_does(bucket)
        if self.scheme.is_transparent:
            self._watch_steps()
            self.scheme.add_residuals([slot_of(parameter) for parameter in bucket.parameters()], bucket.gradients())
            return self._start_ddp_mean(bucket)
        in_backward = torch._C._current_graph_task_id() != -1
        # With the last bucket, not the first: a re-entrant checkpoint has backward passes of its own inside the pass, and
        # only the one in which DDP has all its buckets ends with DDP's waiting for them.
        if in_backward and bucket.is_last():
            torch.autograd.Variable._execution_engine.queue_callback(self._before_ddp_waits)
        self._check_divisor()
        step, buffer, index, parameters = self.step, bucket.buffer(), bucket.index(), bucket.parameters()
        known, slots, offsets = self._places.get(index, ([], [], []))
        # They stay there as long as DDP puts the same ones together.
        if list(map(id, parameters)) != list(map(id, known)):
            slots = [self._slot_of.setdefault(parameter, slot_of(parameter)) for parameter in parameters]
            offsets = [0]
            if not buffer.is_sparse:  # which has no storage, and is of one parameter
                offsets = [int(g.storage_offset() - buffer.storage_offset()) for g in bucket.gradients()]
            self._places[index] = parameters, slots, offsets
        reduced = self.reduce(buffer, slots, offsets, index, bucket.is_last())
        if not in_backward:  # the shadow of a rank that has left `ddp.join` early: nothing else would raise here
            self._shadows.append(reduced)
            if bucket.is_last():
                while self._shadows:
                    self._shadows.pop().wait()
                self.close_pass(step, 0)
        return reduced

    def connect(self, register: Callable[[], None], called: torch.nn.Module) -> None:
        """Put the hook in when it is needed: now, or late under `auto`."""
        self._register, self._called = register, weakref.ref(called)
        self._take_up_scheme()

    def _take_up_scheme(self) -> None:
        if not self.scheme.is_transparent:
            self._register()
        self._watch_steps()

    def switch(self, scheme: Scheme | str) -> None:
        """As any Reducer; a scheme by name ends `auto`, "auto" takes it up again."""
        if isinstance(self.scheme, Auto) and not self.closed:
            self.step = self.scheme.agree_on_step(self.step)
        super().switch(scheme)
        self._take_up_scheme()

    def _parameters_of_buckets(self) -> list[torch.Tensor]:
        stepped = (slot.parameter for slot in self.slots.values())
        return [parameter for parameter in stepped if parameter is not None and parameter.requires_grad]

    def _check_gradients(self, scheme: Scheme, module: torch.nn.Module | None) -> None:
        if module is None or scheme.is_transparent:
            return
        if getattr(module, "_use_python_reducer", False):
            raise Unsupported(_NO_BUCKETS)
        if not scheme.takes_any_gradient:
            check_trained(module)

    def _make_wires(self, communicator: Communicator) -> tuple[Wire, DeviceWire | None]:
        devices = [parameter.device for parameter in self._parameters_of_buckets()]
        if self._placement == "device":
            return DeviceWire(communicator, devices), None
        host = Wire(communicator)
        # DDP's own group shows that its backend works here; it may refuse what others serve, as two ranks on one GPU.
        is_free = self._placement is None and isinstance(self.scheme, Auto) and communicator.world_size > 1
        if is_free and devices and serves(self._group, devices[0]):
            try:
                return host, DeviceWire(communicator, devices)
            except Unsupported as error:
                _log.warning("auto chooses among schemes in host memory only: %s", error)
        return host, None

    def _check_divisor(self) -> None:
        """Fail where a hook is not told by how many ranks DDP divides once some have left `join`: by default by all."""
        if self._is_joining and not getattr(self.session.module, "_divide_by_initial_world_size", True):
            self.fail(
                Unsupported(
                    "ddp.join(divide_by_initial_world_size=False) changes the divisor as ranks run out of input, and DDP tells "
                    "no communication hook; use join() with its default, or close() the attachment first"
                )
            )

    # ---- the end of a backward pass

    def _before_ddp_waits(self) -> None:
        """Runs when the gradients are computed, just before DDP waits for the buckets."""
        self._waits_from_ns = now_ns()
        torch.autograd.Variable._execution_engine.queue_callback(self._after_ddp_waited)

    def _after_ddp_waited(self) -> None:
        """Runs when DDP has put all means into `.grad`: the one place where errors reach the training thread."""
        self.close_pass(self.step - 1, now_ns() - self._waits_from_ns)

    # ---- steps under `auto`: until it needs a hook, DDP runs as without gradwire, with the same code, bits and time

    def _watch_steps(self) -> None:
        """`auto` sees steps from outside; no other scheme does."""
        model, called = self.session.module, self._called()
        if self._clock is None and isinstance(model, DistributedDataParallel) and isinstance(self.scheme, Auto):
            self._n_bytes = sum(p.nbytes for p in self._parameters_of_buckets())
            # Not `called or model`: a compiled model asks DDP for its length.
            self._clock = StepClock(model, model if called is None else called, self._begin_watched, self._end_watched)

    @property
    def _auto(self) -> Auto | None:
        return self.scheme if isinstance(self.scheme, Auto) and not self.closed else None

    @property
    def _is_joining(self) -> bool:
        """True if some ranks may run out of input and see no steps of their own: from the first `ddp.join()` on, for good."""
        return bool(getattr(getattr(self.session.module, "_join_config", None), "enable", False))

    def _begin_watched(self) -> None:
        auto = self._auto
        if auto is None or self._is_joining:  # all ranks go on with what they have: some of them cannot vote
            return
        self._loss_scale.note()
        auto.choose(self.step)
        if not auto.is_transparent:
            try:
                self._register()
            except Unsupported as error:
                auto.stay_plain(str(error))

    def _end_watched(self, lap: Lap) -> None:
        auto = self._auto
        if auto is None:
            return
        if auto.is_transparent:
            self._count_plain_step(lap.waited_ns)
        if not self._is_joining:
            auto.end_watched_step(self.step - 1, *(lap if lap.on_device else lap[:2]))  # on the CPU there are no marks

    def _count_plain_step(self, waited_ns: int) -> None:
        """Note of a step that DDP has done what `reduce` would. Bytes are those of its ring."""
        record = self.recorder.open_bucket(self.step, 0, self._n_bytes)
        record.count_exchanged(ring_bytes(self._n_bytes, self.communicator.world_size))
        self.recorder.close_bucket(record)
        self.recorder.close_step(self.step, waited_ns)
        self.step += 1

    def close(self) -> None:
        """Stop compressing; a hook that stays registered then reduces as DDP does by itself. Every rank calls it."""
        self._slot_of, self._places = {}, {}
        if self._clock is not None:
            self._clock.close()
            self._clock = None
        super().close()

    def _all_reduce_as_ddp_does(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if not self._closed_by_all:
            try:
                self.communicator.notes.wait_until_all_close(self.communicator.timeout_s)
                self._closed_by_all = True
            except GradwireError as error:
                # DDP's own would wait for ranks that do not come: the error instead, at the end of the backward pass.
                call_last(functools.partial(_raise, error))
                return completed(bucket.buffer())
        return self._start_ddp_mean(bucket)

    def _start_ddp_mean(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Exactly what DDP does without a hook, on its own group."""
        buffer = bucket.buffer().mul_(1.0 / dist.get_world_size(self._group))
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])


def _raise(error: GradwireError) -> None:
    raise error


def ddp_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook for `DistributedDataParallel.register_comm_hook(state, gradwire.ddp_hook)`. Raises:
    InvalidArgument (`state` is no HookState)."""
    if isinstance(bucket, tuple):
        raise Unsupported(_NO_BUCKETS)
    reduce_bucket = getattr(state, "reduce_bucket", None)
    if reduce_bucket is None:
        raise InvalidArgument(
            f"gradwire.ddp_hook needs a gradwire.HookState, got {type(state).__name__}: "
            'ddp.register_comm_hook(gradwire.HookState("gcomp", module=ddp, optimizer=optimizer, group=...), gradwire.ddp_hook)'
        )
    return reduce_bucket(bucket)
