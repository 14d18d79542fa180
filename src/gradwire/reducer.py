"""A scheme at work over a group of ranks. Every door (DDP, FSDP2, local SGD) hands its buckets to a Reducer.

The life of a step: `begin_step`, every bucket in order, and on the lane the commit of what was staged. An
error never travels through a bucket's future, which completes with whatever the buffer holds; it is raised, with its own
type, by `close_pass`, where the door's training thread can take it.
"""

import contextlib
import functools
import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire.checks import choice as check_choice
from gradwire.core import checkpoint
from gradwire.core.bucket import Bucket, Layout, Slot, check_gradient, named_parameters, slot_of, slots_by_name
from gradwire.core.named_tensors import AllReduceWork, Flattener
from gradwire.core.optimizers import Optimizers
from gradwire.core.session import LossScale, Session
from gradwire.core.staging import Staging
from gradwire.core.threads import use_fair_share_of_cores
from gradwire.errors import GradwireError, InvalidArgument
from gradwire.schemes import Scheme, by_name
from gradwire.stepping.interception import watch_scalers
from gradwire.telemetry.recorder import Recorder
from gradwire.wire.communicator import Communicator
from gradwire.wire.device_wire import DeviceWire, ResidentBucket, check_not_captured
from gradwire.wire.preamble import compare_preambles
from gradwire.wire.wire import Wire

_log = logging.getLogger("gradwire")

# As DDP's own buckets: large enough for the wire, small enough that the first is on its way early.
BUCKET_MB = 25.0


class Reducer:
    """Averages tensors over a group of ranks by a scheme, and keeps its state.

        reducer = gradwire.Reducer("one-bit")
        reducer.all_reduce({name: parameter.grad for name, parameter in model.named_parameters()}).wait()

    The constructor is collective, as are `all_reduce`, `switch`, `state_dict(all_ranks=True)` and `close`.

    Args:
        scheme: a Scheme, or a registry name, with options as in "acp-sgd:rank=8".
        group: the ranks to reduce over, as a process group or a list of global ranks (default: all). gradwire makes
            its own connections between them; or a Communicator that has them, which is closed with the Reducer.
        names: the parameters by name, or the module that has them: for schemes that read the optimizer (gcomp with
            importance="paper"), or that step parameters themselves, which takes the module.
        optimizer: the one that steps these parameters, or a list of all that do; read, never changed.
        scaler: the torch.amp.GradScaler, if what is reduced is scaled by it.
        bucket_mb: how much `all_reduce` sends at a time.
        op: "mean", or "sum" for losses that are divided by the number of ranks already.
        timeout_s: how long to wait for a peer before PeerLost is raised (default: the timeout of `group`).
        trace: record the spans of a Chrome trace.
    Raises: InvalidArgument, Unsupported, PeerLost (a rank did not come).
    """

    def __init__(
        self,
        scheme: Scheme | str,
        group: dist.ProcessGroup | Sequence[int] | Communicator | None = None,
        names: Mapping[str, torch.Tensor] | nn.Module | None = None,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Optimizers | None = None,
        scaler: Any = None,
        *,
        bucket_mb: float = BUCKET_MB,
        op: str = "mean",
        timeout_s: float | None = None,
        trace: bool = False,
    ) -> None:
        check_choice("op", op, ("mean", "sum"))
        if not bucket_mb > 0:
            raise InvalidArgument(f"bucket_mb must be positive, got {bucket_mb}")
        self.scheme = _free_scheme(scheme)
        optimizers = Optimizers(optimizer)
        use_fair_share_of_cores()
        self.step, self.closed, self._op = 0, False, op
        self._error: GradwireError | None = None
        self._layouts: dict[int, Layout] = {}  # the last one of each bucket index
        self._compared: set[tuple[int, int]] = set()  # bucket index and layout hash
        module = names if isinstance(names, nn.Module) else None
        self._check_gradients(self.scheme, module)
        self.slots = slots_by_name(named_parameters(names) if isinstance(names, nn.Module) else names or {})
        self._flattener = Flattener(self.slots, bucket_mb * (1 << 20))
        self.communicator = communicator = group if isinstance(group, Communicator) else Communicator(group, timeout_s)
        self.recorder = Recorder(communicator.rank, communicator.world_size, trace=trace)
        self._loss_scale = LossScale(scaler)
        try:
            wire, device_wire = self._make_wires(communicator)
            self.session = Session(
                communicator, wire, self.recorder, optimizers, self.slots, self._loss_scale,
                None if module is None else weakref.ref(module),
                scaler is not None, device_wire=device_wire,
            )  # fmt: skip
            # Where it is not sure that anything is staged, memory is pinned when it first is.
            is_staged = not wire.on_device and device_wire is None
            self._staging = Staging(self._parameters_of_buckets() if is_staged else ())
            self.scheme.bind(self.session)
            self.scheme.take_over()
            self._tell_of_strays()
            untold = optimizers if scaler is None else ()
            self._scaler_watches = [watch_scalers(one, self._meet_scaler) for one in untold]
        except Exception as error:
            communicator.fail(error)  # the other ranks, which may have bound theirs, would wait for this one
            communicator.close()
            raise

    # ---- tensors

    def all_reduce(self, tensors: Mapping[str, torch.Tensor]) -> AllReduceWork:
        """Start replacing every tensor by its mean over the ranks: one step of the scheme; `wait()` for it.

        Args:
            tensors: float32, bfloat16 or float16, of any shape, by name: error feedback belongs to the name. DTensors are
                reduced shard by shard. Every rank gives the same names, shapes and dtypes, in the same order.
        Raises: InvalidArgument (no tensors, a dtype that is not supported, a name with another shape than before). The
            other ranks raise it too.
        """
        try:
            buckets = self._flattener.fill(tensors)
        except Exception as error:
            raise self.fail(error) from error
        futures = [
            self.reduce(bucket.values, bucket.slots, bucket.offsets, i, bucket is buckets[-1])
            for i, bucket in enumerate(buckets)
        ]
        step, flattener, targets = self.step - 1, self._flattener, dict(tensors)

        def finish(waited_ns: int) -> None:
            self.close_pass(step, waited_ns)
            flattener.empty(buckets, targets)

        return AllReduceWork(futures, finish)

    def _speaks(self) -> bool:
        """Return whether what concerns the whole model is logged here: on one rank, once."""
        return not self.communicator.rank

    def _tell_of_strays(self) -> None:
        """Log which parameters none of the optimizers steps, or more than one; DDP trains such models too."""
        optimizers, names = self.session.optimizers, self.session.names
        if not optimizers or not self._speaks():
            return
        trained = [parameter for parameter in names if parameter.requires_grad]
        several = set(optimizers.shared())
        by_several = [parameter for parameter in trained if parameter in several]
        by_none = [parameter for parameter in trained if optimizers.of(parameter) is None and parameter not in several]
        none = (
            "none of the optimizers given steps; give all that do, as attach(model, [muon, adamw]), or freeze what nothing "
            "steps with requires_grad_(False) before DDP: its gradients are reduced too"
        )
        two = "two optimizers step: it counts as stepped by one that is unknown"
        for strays, what in ((by_none, none), (by_several, two)):
            if strays:
                _log.warning("attach: parameter %s (%d in all) is one that %s", names[strays[0]], len(strays), what)

    def _meet_scaler(self, scaler: Any, has_stepped: bool) -> None:
        """A GradScaler that nobody told of steps an optimizer: take it, as if it had been given, and say so."""
        while self._scaler_watches:
            self._scaler_watches.pop().remove()
        if self.scheme.owns_step or self.session.wire.on_device:
            return  # an owner sees by itself that gradients were scaled
        self.communicator.submit(self.scheme.divide_kept, self._loss_scale.take(scaler)).wait()
        if self._speaks():
            _log.warning(
                "a GradScaler steps the optimizer: its scale counts from now on; better attach(..., scaler=scaler)"
            )

    # ---- one bucket

    def reduce(
        self, buffer: torch.Tensor, slots: Sequence[Slot], offsets: Sequence[int], index: int, is_last: bool
    ) -> torch.futures.Future[torch.Tensor]:
        """Start replacing `buffer` (n,) by its mean; for doors, on the training thread, buckets in order from 0. The
        future never fails: what went wrong is raised by `close_pass`."""
        self.communicator.check_process()  # raised right here: a note to the peers would break into the parent's talk
        check_not_captured(buffer.device)
        step, device = self.step, buffer.device
        reduced: torch.futures.Future = torch.futures.Future(devices=None if device.type == "cpu" else [device])
        record = self.recorder.open_bucket(step, index, buffer.numel() * buffer.element_size())
        try:
            if index == 0:
                self.scheme.begin_step(step)
            layout, is_known = self._layouts.get(index), True
            if layout is None or not layout.is_of(buffer, slots, offsets):
                if not self.scheme.takes_any_gradient or device.type != "cpu":
                    check_gradient(buffer, on_any_device=True)
                layout = self._layouts[index] = Layout(buffer, tuple(map(slot_of, slots)), offsets)
                is_known = (index, layout.hash) in self._compared
            if self._op == "sum":  # the mean of N times as much: what a scheme does need not be linear
                buffer.mul_(self.communicator.world_size)
            if self.scheme.carries_residuals:
                self.scheme.add_residuals(layout.slots, [buffer[start:end] for start, end in layout.spans])
            bucket = self._bucket(buffer, layout, index=index, step=step, is_last=is_last, record=record)
            if not is_known:
                self._compared.add((index, layout.hash))
                self.communicator.submit(self._compare_layout, bucket)
            if bucket.staged is not None and not self.scheme.waits_by_tensor:
                self.communicator.submit(bucket.staged.wait_for_all)
            done = self.scheme.reduce(bucket)
        except Exception as error:
            self.fail(error)
            self.recorder.close_bucket(record)
            reduced.set_result(buffer)
        else:
            done.add_done_callback(functools.partial(self._finish_bucket, bucket, buffer, reduced))
        if is_last:
            self.step += 1
            self.communicator.submit(self._end_step, step)
        return reduced

    def _bucket(self, buffer: torch.Tensor, layout: Layout, **place: Any) -> Bucket:
        """Make what the scheme works on: the buffer itself, or its copy on the way to host memory. The one seam for devices."""
        if buffer.device.type == "cpu":
            return Bucket(buffer, layout, **place)
        if place["index"] == 0:
            self._loss_scale.note()
        wire = self.scheme.wire_at_work
        if isinstance(wire, DeviceWire):
            return Bucket(buffer, layout, resident=ResidentBucket(wire, buffer), **place)
        bounds = layout.spans if self.scheme.waits_by_tensor else [(0, buffer.numel())]
        staged = self._staging.stage(place["index"], buffer, bounds)
        return Bucket(staged.on_host, layout, staged=staged, **place)

    def _check_gradients(self, scheme: Scheme, module: nn.Module | None) -> None:
        """Refuse what `scheme` cannot take of the module's gradients; here they are looked at as they come."""

    def _parameters_of_buckets(self) -> list[torch.Tensor]:
        """Those whose gradients come as buckets: memory to stage them is pinned beforehand. None are known here."""
        return []

    def _make_wires(self, communicator: Communicator) -> tuple[Wire, DeviceWire | None]:
        """Make the wire, here in host memory, and one of the device beside it for a scheme that may choose."""
        return Wire(communicator), None

    def fail(self, error: BaseException) -> GradwireError:
        """Note an error for `close_pass`, tell the peers, and return what to raise."""
        self._error = self.communicator.fail(error)
        return self._error

    def _compare_layout(self, bucket: Bucket) -> None:
        compare_preambles(self.communicator, self.scheme.preamble(bucket), bucket.record, self.session.optimizers)

    def _finish_bucket(
        self, bucket: Bucket, buffer: torch.Tensor, reduced: torch.futures.Future, done: torch.futures.Future
    ) -> None:
        """On the lane or the backend's thread: hand the mean, or whatever there is in case of an error, to the door."""
        try:
            done.wait()
            # A scheme that owns the step leaves DDP its own gradient; the last one may say that a peer's was not finite.
            is_changed = not self.scheme.owns_step or (self.session.has_scaler and bucket.is_last)
            if bucket.staged is not None and is_changed:
                bucket.staged.send_back()
        except Exception as error:
            self.fail(error)
        self.recorder.close_bucket(bucket.record)
        on_device = bucket.staged or bucket.resident
        if on_device is None:
            reduced.set_result(buffer)
        else:
            on_device.complete(reduced)

    def _end_step(self, step: int) -> None:
        try:
            self.scheme.end_step(step)
        except Exception as error:
            self.fail(error)

    def close_pass(self, step: int, exposed_ns: int) -> None:
        """The buckets of `step` are there, on the training thread, which waited so long; raises what any of them failed of."""
        exposed_ns += self.scheme.end_backward(step)
        self.recorder.close_step(step, exposed_ns)
        if self._error is not None:
            raise self._error

    # ---- between steps

    def stats(self) -> dict[str, Any]:
        """Totals so far (bytes, times, fallbacks) and the scheme's own figures; also after `close`."""
        if not self.closed:
            self.wait_until_idle()
        return {
            "scheme": self.scheme.name,
            "world_size": self.communicator.world_size,
            "n_streams": self.communicator.n_streams,
            **self.recorder.totals(),
            **self.scheme.stats(),
        }

    def wait_until_idle(self) -> None:
        """Return when the lane has finished everything submitted so far. Raises: what the group failed of,
        InvalidArgument (closed)."""
        self.communicator.submit(self.scheme.settle).wait()
        if self._error is not None:
            raise self._error

    def flush(self) -> None:
        """Take all delayed optimizer steps, so that parameters can be read directly. Only schemes that take over the
        step (their `owns_step` is true) delay it. Evaluation, `state_dict` of model and optimizer, and `close` flush by
        themselves. Raises: the error of the group, if it has failed."""
        if not self.closed:
            self.scheme.flush()

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """This rank's state between two steps: tensors and plain values only. Save one per rank. `all_ranks`: every
        rank calls it, and rank 0 gets the states of all: one file, which any number of ranks can load."""
        self.flush()
        self.wait_until_idle()
        if not self.slots:
            raise InvalidArgument(
                "state_dict() names parameters as the module does, and this HookState was made without one; "
                "pass HookState(scheme, module=model)"
            )
        state = checkpoint.state_of(self.scheme, self.communicator, self.step)
        return checkpoint.gather(state, self.communicator) if all_ranks else state

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Take back what `state_dict` gave, for this rank or all, after the same scheme was set to work on the same names.

        Args:
            strict: refuse one rank's state of another world size. Without it, a scheme whose state is the same on all ranks
                takes it; one with residuals needs a state for all ranks.
        Raises: InvalidArgument, IncompatibleVersion, CorruptMessage (not such a state at all).
        """
        if state == checkpoint.ALONE:
            return
        communicator = self.communicator
        if isinstance(state, dict) and "ranks" in state:  # of all ranks
            state = checkpoint.state_for(state, self.scheme.per_rank_state, communicator.world_size, communicator.rank)
        checkpoint.check(state)
        self.wait_until_idle()
        self.step = checkpoint.load(self.scheme, communicator, state, strict)
        self.scheme.begin_at(self.step)

    def switch(self, scheme: Scheme | str) -> None:
        """Use another scheme from the next step on; every rank calls it between the same two steps. Raises:
        RankMismatch at the next bucket where ranks disagree."""
        successor = _free_scheme(scheme)
        self._check_gradients(successor, self.session.module)
        self.flush()
        self.wait_until_idle()
        successor.bind(self.session)  # the old scheme stays if this raises
        if self.session.wire.on_device or self.session.device_wire is not None:
            torch.accelerator.synchronize()  # schemes have streams of their own
        left, own = self.scheme.hand_over(), {*self.slots.values()}
        self.scheme.close()
        self.scheme.unbind()
        self.scheme = successor
        if not successor.needs_momenta:  # what two levels leave is of slices
            self.session.feedback.give({slot: kept for slot, kept in left.items() if slot in own})
        successor.take_over()
        successor.begin_at(self.step)
        self.forget_layouts()

    def forget_layouts(self) -> None:
        """Have ranks compare in full what they reduce, before the next bucket of every layout, as if all were new."""
        self._layouts.clear()
        self._compared.clear()

    def close_with(self, home: nn.Module | dist.ProcessGroup) -> None:
        """Close when the user of a module or group has let go of it, and nobody has closed; nothing here may hold it."""
        weakref.finalize(home, self.close_quietly).atexit = False

    def close_quietly(self) -> None:
        """Close; an error is left to whoever waited for the step that it is of."""
        with contextlib.suppress(GradwireError):
            self.close()

    def close(self) -> None:
        """Stop, and release the model and the optimizer. Every rank calls it. A DDP model goes on with its own all-reduce."""
        if self.closed:
            return
        self.closed = True
        for watch in self._scaler_watches:
            watch.remove()
        self.communicator.close(self.step)
        try:
            self.scheme.close()
        except GradwireError:
            if self._error is None:  # otherwise `close_pass` has raised it
                raise
        finally:
            self.scheme.unbind()
            for wire in (self.session.wire, self.session.device_wire):
                if isinstance(wire, DeviceWire):
                    wire.close()
            self.recorder.close()
            self.slots, self._flattener, self._layouts = {}, Flattener({}, 0), {}
            self._loss_scale, self._staging = LossScale(), Staging()
            self.session = replace(
                self.session, optimizers=Optimizers(), slots={}, loss_scale=self._loss_scale, module_ref=None
            )


def _free_scheme(scheme: Scheme | str) -> Scheme:
    """The scheme, made if a name was given. Raises: InvalidArgument (no scheme, or one that is at work elsewhere)."""
    made = by_name(scheme) if isinstance(scheme, str) else scheme
    if not isinstance(made, Scheme):
        raise InvalidArgument(f"scheme must be a gradwire Scheme or a registry name, got {type(scheme).__name__}")
    if made.is_bound:
        raise InvalidArgument(
            f"this {made.name!r} object is at work in another attachment; make one for each: "
            f'gradwire.schemes.by_name("{made.name}", ...)'
        )
    return made
