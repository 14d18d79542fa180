"""Notices what would go lost, because the gradient that a deferred step uses is not the one in `.grad`."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from gradwire.errors import Unsupported


class GradientGuard:
    """Remembers `.grad` as it was at the end of a backward pass: which tensors, and how often changed.

    `remedy`: what its error says to do instead.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = tuple(parameters)
        self.remedy = "pass max_grad_norm=... to the scheme instead of clipping, and leave unscale_ to GradScaler"
        self._noted: dict[torch.Tensor, tuple[weakref.ref[torch.Tensor], int]] = {}

    def note(self) -> None:
        """Called when a backward pass has put its gradients into `.grad`."""
        self._noted = {p: (weakref.ref(p.grad), p.grad._version) for p in self._parameters if p.grad is not None}

    def forget(self) -> None:
        """Called when the step is taken."""
        self._noted = {}

    def check(self, names: dict[torch.Tensor, str] | None = None) -> None:
        """Raises: Unsupported if a gradient was replaced or changed since; one that was cleared is left alone."""
        for parameter, (gradient, version) in self._noted.items():
            if parameter.grad is None:
                continue
            if gradient() is not parameter.grad or parameter.grad._version != version:
                name = (names or {}).get(parameter, f"of shape {tuple(parameter.shape)}")
                raise Unsupported(
                    f"the gradient of parameter {name} was changed between backward() and step() (clip_grad_norm_, "
                    "unscale_, zero_grad?), but this scheme takes the step from gradients of its own, which are still on "
                    f"their way: {self.remedy}"
                )

    @property
    def is_untouched(self) -> bool:
        """Whether a gradient that was noted is still there as it was: a further backward pass would add to it."""
        return any(
            gradient() is parameter.grad and parameter.grad is not None and parameter.grad._version == version
            for parameter, (gradient, version) in self._noted.items()
        )
