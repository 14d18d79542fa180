"""`attach`: the one door. Connects a scheme to a DDP model and its optimizer."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from gradwire import schemes
from gradwire.doors import checkpoint
from gradwire.doors.hook import HookState, ddp_hook
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.schemes import Scheme
from gradwire.telemetry.recorder import Recorder
from gradwire.wire.communicator import DEFAULT_TIMEOUT_S


class _Door:
    """What is registered with DDP, which takes one hook and never gives it back: holds whichever state is attached."""

    def __init__(self, state: HookState) -> None:
        self.state = state


_doors: weakref.WeakKeyDictionary[DistributedDataParallel, _Door] = weakref.WeakKeyDictionary()


def _door_hook(door, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations as objects; none are fine too
    return ddp_hook(door.state, bucket)


class Attachment:
    """A scheme at work on a DDP model. Made by `attach`."""

    def __init__(self, state: HookState) -> None:
        self._state = state

    @property
    def scheme(self) -> Scheme:
        """The scheme at work."""
        return self._state.scheme

    @property
    def recorder(self) -> Recorder:
        """Bytes and times per step; add sinks to it for JSONL, TensorBoard or a Chrome trace."""
        return self._state.recorder

    @property
    def step(self) -> int:
        """Reductions done so far, those of a resumed run included."""
        return self._state.step

    def stats(self) -> dict[str, Any]:
        """Totals since attaching (bytes, times, fallbacks) and the scheme's own figures; also after `close`."""
        if not self._state.closed:
            self._state.wait_until_idle()
        return {
            "scheme": self._state.scheme.name,
            "world_size": self._state.communicator.world_size,
            **self._state.recorder.totals(),
            **self._state.scheme.stats(),
        }

    def flush(self) -> None:
        """Take every optimizer step that was called for, so that parameters can be read directly.

        Needed with schemes that own the step (their `owns_step` is true), and only where gradwire cannot see the reading:
        evaluation, `state_dict` of model and optimizer, and `close` flush by themselves. Others have nothing to flush.
        """
        self._state.flush()

    def state_dict(self) -> dict[str, Any]:
        """This rank's state between two steps: tensors and plain values only. Save one per rank."""
        return checkpoint.state_of(self._state)

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Take back what `state_dict` gave on this rank, after attaching the same scheme to the same model.

        Args:
            strict: refuse the state of another world size. Without it, a scheme whose state is the same on all ranks
                takes it; one with residuals needs `gradwire.core.residual.redistribute` first.
        Raises: InvalidArgument, IncompatibleVersion, CorruptMessage (not such a state at all).
        """
        checkpoint.load_state(self._state, state, strict)

    def switch(self, scheme: Scheme | str) -> None:
        """Use another scheme from the next step on. Every rank calls it between the same two steps."""
        self._state.switch(scheme)

    def close(self) -> None:
        """Stop compressing; the model goes on with DDP's own all-reduce. Every rank calls it."""
        self._state.close()


def attach(
    ddp: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheme: Scheme | str,
    scaler: Any = None,
    *,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    trace: bool = False,
) -> Attachment:
    """Let `scheme` reduce the gradients of `ddp`. Collective: every rank calls it, with the same arguments.

    Args:
        ddp: a DistributedDataParallel model, or one given to torch.compile.
        optimizer: the optimizer that steps its parameters; read, never changed.
        scheme: a Scheme, or a registry name such as "gcomp".
        scaler: the torch.amp.GradScaler, if the loss is scaled.
        timeout_s: how long to wait for a peer before PeerLost.
        trace: keep single spans for a Chrome trace.
    Raises: Unsupported (not DDP, a wrapper or optimizer that is not supported), InvalidArgument.
    """
    model = _checked_ddp(ddp, optimizer)
    scheme = schemes.by_name(scheme) if isinstance(scheme, str) else scheme
    if getattr(scheme, "owns_step", False) and model is not ddp:
        raise Unsupported(
            f"scheme {scheme.name!r} steps parameters inside the forward pass, which torch.compile would trace: attach it to "
            "a model that is not compiled, or a scheme that leaves the step to the optimizer"
        )
    door = _doors.get(model)
    if door is not None and not door.state.closed:
        raise Unsupported(
            "this model has an attachment already; use attachment.switch(scheme), or close() it before attaching again"
        )
    state = HookState(scheme, model, optimizer, scaler, model.process_group, timeout_s, trace)
    if door is not None:
        door.state = state
        return Attachment(state)
    door = _Door(state)
    try:
        model.register_comm_hook(door, _door_hook)
    except RuntimeError as error:
        state.close()
        raise Unsupported(
            "this DDP model has a communication hook already and takes only one; attach to a model without a hook"
        ) from error
    _doors[model] = door
    return Attachment(state)


def _checked_ddp(wrapped: torch.nn.Module, optimizer: torch.optim.Optimizer) -> DistributedDataParallel:
    model = getattr(wrapped, "_orig_mod", wrapped)  # torch.compile keeps the module it was given here
    kind = type(model).__name__
    if not isinstance(model, DistributedDataParallel):
        if "FullyShardedDataParallel" in kind or "FSDP" in kind:
            raise Unsupported("FSDP models are not supported yet; wrap the model in DistributedDataParallel instead")
        raise Unsupported(f"attach() takes a DistributedDataParallel model, got {kind}; wrap it: DDP(model)")
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        raise Unsupported(
            "ZeroRedundancyOptimizer is not supported yet; use the optimizer that it wraps, or DDP without gradwire"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise Unsupported(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if stepped.isdisjoint(id(parameter) for parameter in model.parameters()):
        raise InvalidArgument(
            "this optimizer steps none of the model's parameters; give the one made from ddp.parameters(), after the "
            "model took its final form"
        )
    return model
