"""The local step of a look-ahead: its options, and trying the user's own rule without committing to it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.control.checks import choice as check_choice
from gradwire.errors import InvalidArgument, Unsupported

LOCALS = ("peek", "sgd")
# Optimizers whose whole state lies in `optimizer.state[parameter]`, elementwise: it can be copied and thrown away.
_PEEKABLE = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip


@dataclass(frozen=True)
class LookAheadOptions:
    """How a step starts before the one before it is complete.

    Attributes:
        local: "peek": the user's own rule, on a copy of its state that is thrown away; "sgd": weights - local_rate x
            gradient.
        local_rate: of "sgd"; None: each group's own learning rate.
        sync_steps: steps from the beginning that wait for their aggregate, as without backup.
        max_grad_norm: clip the norm of the mean gradient, as clip_grad_norm_ does; and of the local one for its step.
    Raises: InvalidArgument.
    """

    local: str = "peek"
    local_rate: float | None = None
    sync_steps: int = 2
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        local, rate = self.local, self.local_rate
        check_choice("local", local, LOCALS)
        if rate is not None and (local != "sgd" or not (math.isfinite(rate) and rate > 0)):
            raise InvalidArgument(
                f'local_rate is a positive learning rate for local="sgd", got {rate!r} with {local!r}'
            )
        if self.sync_steps < 0:
            raise InvalidArgument(f"sync_steps is 0 or more, got {self.sync_steps}")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise InvalidArgument(f"max_grad_norm must be positive, got {self.max_grad_norm}")


class ThrownAwayState:
    """Within it the optimizer works on copies of these parameters' state; after it, theirs is as it was."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: dict[torch.Tensor, torch.Tensor]) -> None:
        self._state, self._parameters = optimizer.state, list(parameters)
        self._kept: dict[torch.Tensor, Any] = {}

    def __enter__(self) -> None:
        for parameter in self._parameters:
            if parameter in self._state:
                kept = self._kept[parameter] = self._state[parameter]
                self._state[parameter] = {
                    key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in kept.items()
                }

    def __exit__(self, *_: object) -> None:
        for parameter in self._parameters:
            if parameter in self._kept:
                self._state[parameter] = self._kept[parameter]
            else:
                self._state.pop(parameter, None)


def check_peekable(optimizer: torch.optim.Optimizer) -> None:
    """Raises: Unsupported for an optimizer whose step cannot be tried and thrown away."""
    known = {getattr(torch.optim, name) for name in _PEEKABLE if hasattr(torch.optim, name)}
    kind = type(optimizer)
    if not any(kind.step is cls.step or kind.step is getattr(cls.step, "__wrapped__", None) for cls in known):
        raise Unsupported(
            f'{kind.__name__} cannot be peeked: local="peek" tries its step on a copy of its state, which it knows how to '
            f'copy for torch.optim\'s {", ".join(_PEEKABLE)}; use local="sgd", or backup=False'
        )
    for group in optimizer.param_groups:
        for option in ("differentiable", "capturable"):
            if group.get(option):
                raise Unsupported(f'local="peek" does not serve {option}=True: use local="sgd", or backup=False')
