"""What a scheme that takes the optimizer's step itself demands of the model that DDP wraps."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.core.session import Session
from gradwire.errors import InvalidArgument, Unsupported


def inner_of(module: nn.Module) -> nn.Module:
    """The model inside DDP, or the model itself."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def model_and_optimizer(session: Session, what: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """What `what` needs. Raises: InvalidArgument (the session was not given both), Unsupported (a wrapper without hooks)."""
    if session.module is None or session.optimizer is None:
        raise InvalidArgument(
            f"{what} takes the optimizer's step itself and needs the model and the optimizer: use "
            "gradwire.attach(ddp, optimizer, scheme), or HookState(scheme, module=ddp, optimizer=optimizer)"
        )
    if not hasattr(session.optimizer, "_optimizer_state_dict_pre_hooks"):
        inner = type(getattr(session.optimizer, "optimizer", None)).__name__
        raise Unsupported(
            f"{what} needs an optimizer with torch's hooks, and {type(session.optimizer).__name__} has none: attach the "
            f"optimizer inside it ({inner}), if its step is all that changes parameters"
        )
    return session.module, session.optimizer


def refuse_join(module: nn.Module | None, what: str, instead: str) -> None:
    """Raises: Unsupported while `ddp.join` is in force; `what` cannot serve it, `instead` can."""
    if isinstance(module, DistributedDataParallel) and module._join_config.enable:
        raise Unsupported(
            f"{what} cannot stand in for ranks that ran out of input (ddp.join): give every rank equally many batches, or "
            f"use {instead}"
        )


def stepped_parameters(session: Session, what: str) -> list[torch.Tensor]:
    """The parameters whose gradients DDP reduces, in the model's order.

    Raises: InvalidArgument; Unsupported if the optimizer that was attached lacks one: `what` keeps its mean gradient
    from `.grad`.
    """
    module, optimizer = model_and_optimizer(session, what)
    ignored: set[str] = getattr(module, "parameters_to_ignore", set())
    named = inner_of(module).named_parameters()
    reduced: list[torch.Tensor] = [p for name, p in named if p.requires_grad and name not in ignored]
    stepped = {p for group in optimizer.param_groups for p in group["params"]}
    strays = [session.names.get(p, "?") for p in reduced if p not in stepped]
    if strays:
        raise Unsupported(
            f"{what} keeps the mean gradient from .grad, and parameter {strays[0]} ({len(strays)} in all) is not in the "
            "optimizer that was attached: attach the one that has all trainable parameters, or freeze the others with "
            "requires_grad_(False) before DDP"
        )
    return reduced
