"""`attach`: the one door. Connects a scheme to a DDP model and its optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from gradwire import schemes
from gradwire.doors.hook import Copied, HookState, ddp_hook
from gradwire.doors.watching import Watch
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.reducer import Reducer
from gradwire.schemes import Scheme
from gradwire.schemes.auto.scheme import Auto


class _Door:
    """What is registered with DDP, which takes one hook and never gives it back: holds whichever state is attached."""

    def __init__(self, state: HookState, model: DistributedDataParallel) -> None:
        self.state = state
        self._model = weakref.ref(model)
        self._is_registered = False

    def register(self) -> None:
        """Put the hook in, between two steps, if it is not in yet. Raises: Unsupported (there is another)."""
        model = self._model()
        if self._is_registered or model is None:
            return
        try:
            model.register_comm_hook(self, _door_hook)
        except RuntimeError as error:
            raise Unsupported(_TAKEN) from error
        self._is_registered = True

    def __reduce__(self) -> Any:
        return (Copied, ())


_TAKEN = "this DDP model has a communication hook already and takes only one; attach to a model without a hook"
_doors: weakref.WeakKeyDictionary[DistributedDataParallel, _Door] = weakref.WeakKeyDictionary()


def _door_hook(door, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations as objects; none are fine too
    return ddp_hook(door.state, bucket)


# What `attach` returns: the door itself.
Attachment = Reducer


class _Attached(HookState):
    """A HookState that puts its own hook in, when it is needed: from the start, or late under `auto`."""

    _door: _Door

    def connect(self, door: _Door, model: DistributedDataParallel, called: torch.nn.Module) -> None:
        """Take the model's door. Raises: Unsupported (it has another hook)."""
        self._door = door
        if not self.scheme.is_transparent:
            door.register()
        self._watch = Watch(self, model, called, door.register)

    def switch(self, scheme: Scheme | str) -> None:
        """As any Reducer; a scheme by name ends `auto`, "auto" takes it up again."""
        if isinstance(self.scheme, Auto) and not self.closed:
            self.step = self.scheme.agree_on_step(self.step)
        super().switch(scheme)
        if not self.scheme.is_transparent:
            self._door.register()


def attach(
    ddp: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheme: Scheme | str = "auto",
    scaler: Any = None,
    *,
    fidelity: str | Sequence[str] | None = None,
    timeout_s: float | None = None,
    trace: bool = False,
) -> Attachment:
    """Let `scheme` reduce the gradients of `ddp`. Collective: every rank calls it, with the same arguments.

    Args:
        ddp: a DistributedDataParallel model, or one given to torch.compile.
        optimizer: the optimizer that steps its parameters; read, never changed.
        scheme: a Scheme, or a registry name such as "gcomp". By default "auto": gradwire measures and chooses, and stays with
            DDP's own all-reduce where nothing is to be won.
        fidelity: of scheme "auto": "exact" (the default: the losses of DDP), "close" or "any", or a list of schemes.
        scaler: the torch.amp.GradScaler, if the loss is scaled.
        timeout_s: how long to wait for a peer before PeerLost (default: as long as the model's process group does).
        trace: keep single spans for a Chrome trace.
    Raises: Unsupported (not DDP, a wrapper or optimizer that is not supported), InvalidArgument.
    """
    model = _checked_ddp(ddp, optimizer)
    if fidelity is not None and scheme != "auto":
        raise InvalidArgument('fidelity is an argument of scheme "auto"; leave one of the two out')
    options = {} if fidelity is None else {"fidelity": fidelity}
    scheme = schemes.by_name(scheme, **options) if isinstance(scheme, str) else scheme
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
    if door is None and getattr(model, "_comm_hooks", None):
        raise Unsupported(_TAKEN)
    state = _Attached(scheme, model, optimizer, scaler, model.process_group, timeout_s, trace)
    door = door or _Door(state, model)
    try:
        door.state = state
        state.connect(door, model, ddp)
    except Unsupported:
        state.close()
        raise
    _doors[model] = door
    return state


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
