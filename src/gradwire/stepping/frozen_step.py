"""One call of `optimizer.step()`, kept as it was meant, to be carried out later and for a few parameters at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch


def raw_step(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], Any]:
    """The optimizer's own step, without the hooks that users registered and that torch wraps around it."""
    function: Any = type(optimizer).step
    return function.__wrapped__ if getattr(function, "hooked", False) else function


class FrozenStep:
    """The hyper-parameters of every group at the user's call, and which parameters had a gradient then.

    Attributes:
        step: the reduction that it belongs to.
        parameters: those that had a gradient: the optimizer leaves all others alone, their state too.
        inverse_scale: 1 / the loss scale under AMP, (1,) float32 as GradScaler computes it; None without.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, step: int, scale: torch.Tensor | None = None) -> None:
        self.step = step
        self.parameters = frozenset(
            parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.grad is not None
        )
        self.inverse_scale = None if scale is None else scale.detach().cpu().double().reciprocal().float()
        self._optimizer = optimizer
        self._groups = [
            {key: _copy(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]

    def apply(
        self,
        gradients: Mapping[torch.Tensor, torch.Tensor],
        pieces: Mapping[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Step those parameters of `gradients` that had a gradient, with these gradients in the place of `.grad`.

        The gradients are free of the loss scale. `.grad`, groups and hyper-parameters are as before afterwards; the
        user's step hooks are not called.

        `pieces`: what is stepped instead of a parameter, a part of its memory; the gradient and the optimizer's state are
        then the piece's.
        """
        stepped = pieces or {}
        chosen = {p: gradient for p, gradient in gradients.items() if p in self.parameters}
        if not chosen:
            return
        optimizer = self._optimizer
        groups = [dict(group) for group in optimizer.param_groups]
        kept = {parameter: parameter.grad for parameter in (stepped.get(p, p) for p in chosen)}
        # A GradScaler in its `step` lays these on the optimizer, whose step would unscale, or refuse them.
        laid = [name for name in ("grad_scale", "found_inf") if name in vars(optimizer)]
        told: dict[str, Any] = {name: vars(optimizer).pop(name) for name in laid}
        try:
            # Groups that came after the call took no part in it.
            for group, frozen in zip(optimizer.param_groups, self._groups, strict=False):
                group.update(frozen)
            for group in optimizer.param_groups:
                group["params"] = [stepped.get(p, p) for p in group["params"] if p in chosen]
            for parameter, gradient in chosen.items():
                stepped.get(parameter, parameter).grad = gradient
            raw_step(optimizer)(optimizer)
        finally:
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                group.update(before)
            vars(optimizer).update(told)
            for parameter, own in kept.items():
                parameter.grad = own


def _copy(value: Any) -> Any:
    # A learning rate may be a tensor that schedulers change in place.
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)
