"""DDP's door: its buckets to a Reducer, means and errors back.

An error never travels through the future that DDP waits for: DDP would turn it into a RuntimeError and be left
unusable. The future completes with whatever the buffer holds, and the error is raised, with its own type, by a callback
at the very end of the same backward pass, so no optimizer step can follow.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations as objects, not as strings.
import logging
import operator
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from gradwire.checks import choice as check_choice
from gradwire.core.bucket import Slot, check_trained, slot_of
from gradwire.errors import GradwireError, InvalidArgument, Unsupported
from gradwire.reducer import Reducer
from gradwire.schemes import Scheme
from gradwire.schemes.auto.scheme import Auto
from gradwire.telemetry.stopwatch import Lap, StepClock, now_ns
from gradwire.wire.communicator import Communicator, completed, ring_bytes
from gradwire.wire.device_wire import DeviceWire, serves
from gradwire.wire.wire import Wire

_log = logging.getLogger(__name__)

PLACEMENTS = ("staged", "device")
_NO_BUCKETS = (
    'with torch._dynamo.config.optimize_ddp = "python_reducer" DDP makes no buckets, which a scheme reduces: leave it at True '
    'before DistributedDataParallel(...), or attach scheme "auto", which leaves such a model as it is'
)


class Copied:
    """Stands in a copied or saved DDP model in the place of its hook's state. DDP gives the copy no hook, so none asks."""


class _Places(NamedTuple):
    """Whose gradients lie where in a bucket of DDP's."""

    parameters: list[torch.Tensor]
    slots: list[Slot]
    offsets: list[int]


def _are_same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


class Watch:
    """Tells the scheme `auto` of a state about the steps of its model, and does the book-keeping of those that DDP does.

    Until a scheme needs a hook, and wherever plain is best, DDP runs as it does without gradwire: the same code, bits and time.

    Args:
        state: whose scheme may be `auto`, now or after a `switch`; with another one this does nothing.
        called: the model as the user calls it.
        register: puts the hook in; called at most once. Raises: Unsupported where DDP takes none.
    """

    def __init__(
        self, state: Reducer, model: DistributedDataParallel, called: torch.nn.Module, register: Callable[[], None]
    ) -> None:
        self._state, self._model, self._register = state, weakref.ref(model), register
        self._n_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        self._clock = StepClock(model, called, self._begin, self._end)

    @property
    def _auto(self) -> Auto | None:
        return self._state.scheme if isinstance(self._state.scheme, Auto) and not self._state.closed else None

    @property
    def _is_joining(self) -> bool:
        """True if some ranks may run out of input and see no steps of their own: from the first `ddp.join()` on, for good."""
        return bool(getattr(getattr(self._model(), "_join_config", None), "enable", False))

    def _begin(self) -> None:
        auto, state = self._auto, self._state
        if auto is None or self._is_joining:  # all ranks go on with what they have: some of them cannot vote
            return
        state.note_loss_scale()
        auto.choose(state.step)
        if not auto.is_transparent:
            try:
                self._register()
            except Unsupported as error:
                auto.stay_plain(str(error))

    def _end(self, lap: Lap) -> None:
        auto, state = self._auto, self._state
        if auto is None:
            return
        if auto.is_transparent:
            self._count_plain_step(lap.waited_ns)
        if not self._is_joining:
            auto.end_watched_step(state.step - 1, lap)

    def _count_plain_step(self, waited_ns: int) -> None:
        """Note what the reducer's hook would: DDP has done it. Bytes are those of its ring."""
        state = self._state
        record = state.recorder.open_bucket(state.step, 0, self._n_bytes)
        record.count_exchanged(ring_bytes(self._n_bytes, state.communicator.world_size))
        state.recorder.close_bucket(record)
        state.recorder.close_step(state.step, waited_ns)
        state.step += 1

    def close(self) -> None:
        """Look no more."""
        self._clock.close()


class HookState(Reducer):
    """The state of `ddp_hook`: `ddp.register_comm_hook(HookState(...), gradwire.ddp_hook)`.

    `gradwire.attach` does the same and more in one call; use this with frameworks that only take a hook.

    Args:
        scheme: a Scheme, or a registry name, with options as in "acp-sgd:rank=8".
        module: the model; needed by `state_dict`, which names parameters as the module does.
        optimizer: the optimizer, or a list of all; needed by schemes that read its state (gcomp with importance="paper").
        scaler: the GradScaler, if the loss is scaled.
        group: the process group that DDP uses (default: all ranks). Making a HookState is collective over it.
        timeout_s: how long to wait for a peer before PeerLost is raised (default: the timeout of `group`).
        trace: record the spans of a Chrome trace.
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
        self._placement = None if placement is None else check_choice("placement", placement, PLACEMENTS)
        self._watch: Watch | None = None
        self._register: Callable[[], None] = _do_nothing  # puts the hook in, where the user does not
        # The model as its user calls it, if that is another.
        self._called: Callable[[], torch.nn.Module | None] = _do_nothing
        self._shadows: list[torch.futures.Future[torch.Tensor]] = []
        self._closed_by_all = False
        self._waits_from_ns = 0
        super().__init__(scheme, group, module, optimizer, scaler, timeout_s=timeout_s, trace=trace)
        self._slot_of: dict[torch.Tensor, Slot] = {
            slot.parameter: slot for slot in self.slots.values() if slot.parameter is not None
        }
        self._places: dict[int, _Places] = {}
        if module is not None and not self.scheme.owns_step:
            self._close_with(module)

    def __reduce__(self) -> Any:
        return (Copied, ())  # connections and threads stay with the model that they serve

    def reduce_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the reduction of one DDP bucket; called by DDP during the backward pass."""
        if self.closed or self.scheme.is_transparent:
            if not self.closed:
                self._watch_steps()
                slots = [slot_of(parameter) for parameter in bucket.parameters()]
                self.scheme.add_residuals(slots, bucket.gradients())
                return self._start_ddp_mean(bucket)
            return self._all_reduce_as_ddp_does(bucket)
        in_backward = torch._C._current_graph_task_id() != -1
        # With the last bucket, not the first: a re-entrant checkpoint has backward passes of its own inside the pass, and
        # only the one in which DDP has all its buckets ends with DDP's waiting for them.
        if in_backward and bucket.is_last():
            torch.autograd.Variable._execution_engine.queue_callback(self._before_ddp_waits)
        try:
            self._check_divisor()
        except Unsupported as error:
            self.fail(error)
        step, buffer, index = self.step, bucket.buffer(), bucket.index()
        parameters, places = bucket.parameters(), self._places.get(index)
        if places is None or not _are_same(parameters, places.parameters):
            places = self._places[index] = self._find_places(bucket, buffer, parameters)
        reduced = self.reduce(buffer, places.slots, places.offsets, index, bucket.is_last())
        if not in_backward:  # the shadow of a rank that has left `ddp.join` early: nothing else would raise here
            self._shadows.append(reduced)
            if bucket.is_last():
                while self._shadows:
                    self._shadows.pop().wait()
                self.close_pass(step, 0)
        return reduced

    def _find_places(self, bucket: GradBucket, buffer: torch.Tensor, parameters: list[torch.Tensor]) -> "_Places":
        """Find where DDP has put these parameters' gradients: they stay there as long as it puts the same ones together."""
        slots = [self._slot_of.setdefault(parameter, slot_of(parameter)) for parameter in parameters]
        if buffer.is_sparse:  # it has no storage, and is of one parameter
            return _Places(parameters, slots, [0])
        start = buffer.storage_offset()
        offsets = [int(g.storage_offset() - start) for g in bucket.gradients()]
        return _Places(parameters, slots, offsets)

    def connect(self, register: Callable[[], None], called: torch.nn.Module) -> None:
        """Put the hook in when it is needed: now, or late under `auto`. Raises: Unsupported (the model has another)."""
        self._register, self._called = register, weakref.ref(called)
        self._take_up_scheme()

    def _take_up_scheme(self) -> None:
        if not self.scheme.is_transparent:
            self._register()
        self._watch_steps()

    def _watch_steps(self) -> None:
        """`auto` sees steps from outside; no other scheme does."""
        model, called = self.session.module, self._called()
        if self._watch is None and isinstance(model, DistributedDataParallel) and isinstance(self.scheme, Auto):
            # Not `called or model`: a compiled model asks DDP for its length.
            self._watch = Watch(self, model, model if called is None else called, self._register)

    def switch(self, scheme: Scheme | str) -> None:
        """As any Reducer; a scheme by name ends `auto`, "auto" takes it up again."""
        if isinstance(self.scheme, Auto) and not self.closed:
            self.step = self.scheme.agree_on_step(self.step)
        super().switch(scheme)
        self._take_up_scheme()

    def _parameters_of_buckets(self) -> list[torch.Tensor]:
        known = [slot.parameter for slot in self.slots.values() if slot.parameter is not None]
        return [parameter for parameter in known if parameter.requires_grad]

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
        if not is_free or not devices or not serves(self._group, devices[0]):
            return host, None
        try:
            return host, DeviceWire(communicator, devices)
        except Unsupported as error:
            _log.warning("auto chooses among schemes in host memory only: %s", error)
            return host, None

    def _check_divisor(self) -> None:
        """A hook is not told by how many ranks DDP divides once some have left `join`: all of them is the default."""
        module = self.session.module
        if (
            isinstance(module, DistributedDataParallel)
            and module._join_config.enable
            and not getattr(module, "_divide_by_initial_world_size", True)
        ):
            raise Unsupported(
                "ddp.join(divide_by_initial_world_size=False) changes the divisor as ranks run out of input, and DDP tells "
                "no communication hook; use join() with its default, or close() the attachment first"
            )

    # ---- the end of a backward pass

    def _before_ddp_waits(self) -> None:
        """Runs when the gradients are computed, just before DDP waits for the buckets."""
        self._waits_from_ns = now_ns()
        torch.autograd.Variable._execution_engine.queue_callback(self._after_ddp_waited)

    def _after_ddp_waited(self) -> None:
        """Runs when DDP has put all means into `.grad`: the one place where errors reach the training thread."""
        self.close_pass(self.step - 1, now_ns() - self._waits_from_ns)

    # ---- after close

    def close(self) -> None:
        """Stop compressing; a hook that stays registered then reduces as DDP does by itself. Every rank calls it."""
        self._slot_of, self._places = {}, {}
        if self._watch is not None:  # which holds the model
            self._watch.close()
            self._watch = None
        super().close()

    def _all_reduce_as_ddp_does(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if not self._closed_by_all:
            try:
                self.communicator.notes.wait_until_all_close(self.communicator.timeout_s)
                self._closed_by_all = True
            except GradwireError as error:
                return self._fail_without_ddp(bucket.buffer(), error)
        return self._start_ddp_mean(bucket)

    def _start_ddp_mean(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Exactly what DDP does without a hook, on its own group."""
        buffer = bucket.buffer().mul_(1.0 / dist.get_world_size(self._group))
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0])

    def _fail_without_ddp(self, buffer: torch.Tensor, error: GradwireError) -> torch.futures.Future[torch.Tensor]:
        """DDP's own all-reduce would wait for ranks that do not come: `error` instead, at the end of the backward pass."""

        def raise_it() -> None:
            raise error

        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: engine.queue_callback(raise_it))  # after DDP's own callback
        return completed(buffer)


def _do_nothing() -> None:
    return None


def ddp_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook for `DistributedDataParallel.register_comm_hook(state, gradwire.ddp_hook)`.

    Raises: InvalidArgument (`state` is no HookState).
    """
    if isinstance(bucket, tuple):
        raise Unsupported(_NO_BUCKETS)
    reduce_bucket = getattr(state, "reduce_bucket", None)
    if reduce_bucket is None:
        raise InvalidArgument(
            f"gradwire.ddp_hook needs a gradwire.HookState, got {type(state).__name__}: "
            'ddp.register_comm_hook(gradwire.HookState("gcomp", module=ddp, optimizer=optimizer, group=...), gradwire.ddp_hook)'
        )
    return reduce_bucket(bucket)
