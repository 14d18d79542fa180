"""Error feedback by block: what was never sent of a gradient, kept for the next one."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gradwire.core.feedback import Feedback
from gradwire.stepping.deferred import Slot


class BlockFeedback:
    """The residuals of blocks, in the gradient's dtype. A step that is not taken changes none."""

    def __init__(self, feedback: Feedback) -> None:
        self._feedback = feedback
        self._scales: dict[int, float] = {}  # the loss scale may have changed when a block has been sent

    def add_to(self, slot: Slot, loss_scale: float) -> None:
        """slot.gradient += residual x loss_scale."""
        self._scales[slot.block.index] = loss_scale
        self._feedback.discard(slot.block.parameters)
        for parameter, part in _split(slot, slot.gradient):
            kept = self._feedback.of(parameter)
            if kept is not None:
                part.add_(kept.values, alpha=loss_scale)

    def stage(self, slot: Slot, sent: torch.Tensor) -> None:
        """Keep slot.gradient - `sent` (n,) from the next `commit` on; nothing if it is not finite."""
        room = self._feedback.room(slot.block.index, slot.gradient.numel(), slot.gradient.dtype)
        unsent = torch.sub(slot.gradient, sent, out=room).div_(self._scales[slot.block.index])
        if bool(torch.isfinite(unsent).all()):
            for parameter, part in _split(slot, unsent):
                self._feedback.stage(parameter, part)

    def commit(self, slot: Slot) -> None:
        """The block's step was taken."""
        self._feedback.commit(slot.block.parameters)


def _split(slot: Slot, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    offset = 0
    for parameter in slot.block.parameters:
        yield parameter, flat[offset : offset + parameter.numel()]
        offset += parameter.numel()
