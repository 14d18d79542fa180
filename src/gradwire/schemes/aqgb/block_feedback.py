"""Error feedback by block: what was never sent of a gradient, kept for the next one."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from gradwire.core.feedback import Feedback
from gradwire.core.slot import Slot, slot_of
from gradwire.schemes.deferred import OpenBlock


class BlockFeedback:
    """The residuals of blocks, in the gradient's dtype. A step that is not taken changes none."""

    def __init__(self, feedback: Feedback) -> None:
        self._feedback = feedback
        self._scales: dict[int, float] = {}  # the loss scale may have changed when a block has been sent

    def add_to(self, block: OpenBlock, loss_scale: float) -> None:
        """block.gradient += residual x loss_scale."""
        self._scales[block.block.index] = loss_scale
        self._feedback.discard(map(slot_of, block.block.parameters))
        for slot, part in _split(block, block.gradient):
            kept = self._feedback.of(slot)
            if kept is not None:
                part.add_(kept.values, alpha=loss_scale)

    def room(self, block: OpenBlock) -> torch.Tensor:
        """(n,) of the gradient's dtype, for what `stage` takes."""
        return self._feedback.room(block.block.index, block.gradient.numel(), block.gradient.dtype)

    def stage(self, block: OpenBlock, unsent: torch.Tensor) -> None:
        """Keep `unsent` (n,), in units of the scaled loss, from the next `commit` on; nothing if it is not finite."""
        unsent.div_(self._scales[block.block.index])
        if bool(torch.isfinite(unsent).all()):
            for slot, part in _split(block, unsent):
                self._feedback.stage(slot, part)

    def commit(self, block: OpenBlock) -> None:
        """The block's step was taken."""
        self._feedback.commit(map(slot_of, block.block.parameters))


def _split(block: OpenBlock, flat: torch.Tensor) -> Iterator[tuple[Slot, torch.Tensor]]:
    offset = 0
    for parameter in block.block.parameters:
        yield slot_of(parameter), flat[offset : offset + parameter.numel()]
        offset += parameter.numel()
