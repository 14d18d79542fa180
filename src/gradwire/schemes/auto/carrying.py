"""What a scheme with error feedback has not sent when another takes over: it goes into the next steps' gradients.

All of it at once would be a step several gradients long, so it goes in eighths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gradwire.core.slot import Slot

_STEPS = 8


class Carried:
    """Residuals on their way: by slot, without the loss scale. Used on the training thread."""

    def __init__(self) -> None:
        self._left: dict[Slot, tuple[torch.Tensor, int]] = {}  # what one step takes, steps to go
        self._added: set[Slot] = set()  # in this step

    def __bool__(self) -> bool:
        return bool(self._left)

    def take_over(self, residuals: Mapping[Slot, torch.Tensor]) -> None:
        """Begin to carry these (n,) beside what is still under way."""
        for slot, residual in residuals.items():
            residual = residual.detach().reshape(-1).float()
            share, n_steps = self._left.pop(slot, (torch.zeros_like(residual), 0))
            self._left[slot] = ((residual + share * n_steps) / _STEPS, _STEPS)

    def add_to(self, slots: Sequence[Slot], gradients: Sequence[torch.Tensor], loss_scale: float = 1.0) -> None:
        """gradient += its share x loss_scale. A gradient that is all zero here keeps waiting: DDP may throw it away."""
        for slot, gradient in zip(slots, gradients, strict=True):
            kept = self._left.get(slot)
            if kept is not None and bool(gradient.any()):
                gradient.view(-1).add_(kept[0].to(gradient.dtype), alpha=loss_scale)
                self._added.add(slot)

    def end_step(self, was_applied: bool) -> None:
        """The step is over; one that was skipped (an overflow) takes nothing."""
        for slot in self._added if was_applied else ():
            share, n_steps = self._left.pop(slot)
            if n_steps > 1:
                self._left[slot] = share, n_steps - 1
        self._added.clear()

    def left(self) -> dict[Slot, torch.Tensor]:
        """What has not been added yet."""
        return {slot: share * n_steps for slot, (share, n_steps) in self._left.items()}
