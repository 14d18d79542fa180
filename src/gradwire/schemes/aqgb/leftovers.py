"""Error feedback by block: what was never sent of a gradient, kept for the next one; by parameter name when saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gradwire.errors import InvalidArgument
from gradwire.stepping.deferred import OpenBlock


class Leftovers:
    """A residual for each block, in the gradient's dtype, free of the loss scale. A step that is not taken changes none."""

    def __init__(self) -> None:
        self._current: dict[int, torch.Tensor] = {}
        self._staged: dict[int, torch.Tensor] = {}
        self._has_staged: set[int] = set()
        self._scales: dict[int, float] = {}
        self._slots: dict[int, OpenBlock] = {}

    def add_to(self, slot: OpenBlock, loss_scale: float) -> None:
        """slot.gradient += residual x loss_scale."""
        index = slot.block.index
        self._scales[index] = loss_scale
        self._has_staged.discard(index)
        if index in self._current:
            slot.gradient.add_(self._current[index], alpha=loss_scale)

    def stage(self, slot: OpenBlock, sent: torch.Tensor) -> None:
        """Keep slot.gradient - `sent` (n,) from the next `commit` on; nothing if it is not finite."""
        index = slot.block.index
        if index not in self._staged:
            self._staged[index] = torch.empty_like(slot.gradient)
        left = torch.sub(slot.gradient, sent, out=self._staged[index]).div_(self._scales[index])
        if bool(torch.isfinite(left).all()):
            self._has_staged.add(index)

    def commit(self, slot: OpenBlock) -> None:
        """The block's step was taken."""
        index = slot.block.index
        if index in self._has_staged:
            self._has_staged.discard(index)
            staged = self._staged.pop(index)
            if index in self._current:
                self._staged[index] = self._current[index]
            self._current[index] = staged
            self._slots[index] = slot

    def state_by_name(self, names: Mapping[torch.Tensor, str]) -> dict[str, torch.Tensor]:
        """Copies of the residuals, by parameter name."""
        return {
            names[parameter]: part.clone()
            for index, residual in self._current.items()
            for parameter, part in _split(self._slots[index], residual)
        }

    def load_by_name(
        self, state: Mapping[str, torch.Tensor], names: Mapping[torch.Tensor, str], slots: Sequence[OpenBlock]
    ) -> None:
        """Take residuals back. Raises: InvalidArgument (a name that the model lacks, another size)."""
        left = dict(state)
        current: dict[int, torch.Tensor] = {}
        for slot in slots:
            residual = torch.zeros_like(slot.gradient)
            for parameter, part in _split(slot, residual):
                saved = left.pop(names[parameter], None)
                if saved is None:
                    continue
                if saved.numel() != part.numel():
                    raise InvalidArgument(
                        f"the checkpoint holds a residual of {saved.numel()} elements for {names[parameter]!r}, which has "
                        f"{part.numel()}; load the checkpoint into the model that wrote it"
                    )
                part.copy_(saved)
                current[slot.block.index] = residual
            self._slots[slot.block.index] = slot
        if left:
            raise InvalidArgument(
                f"the checkpoint holds a residual for {next(iter(left))!r}, which the model lacks; load it into the model "
                "that wrote it"
            )
        self._current, self._staged = current, {}
        self._has_staged.clear()


def _split(slot: OpenBlock, flat: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    parts, offset = [], 0
    for parameter in slot.block.parameters:
        parts.append((parameter, flat[offset : offset + parameter.numel()]))
        offset += parameter.numel()
    return parts
