"""Residuals and factors as a checkpoint holds them: by parameter name, free of the loss scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from gradwire.core.checkpoint import not_the_state
from gradwire.core.feedback import Feedback
from gradwire.core.slot import Slot
from gradwire.errors import InvalidArgument
from gradwire.schemes.low_rank.matrices import MatrixShape, MatrixState


def states_by_name(
    states: Mapping[Slot, MatrixState],
    feedback: Feedback,
    slots: Mapping[str, Slot],
    shape_of: Callable[[Slot], MatrixShape | None],
) -> dict[str, dict[str, torch.Tensor]]:
    """Copies: {"residuals": {name: (n_rows, n_columns)}, "factors": {name: (rank, n)}}, float32."""
    residuals = {
        name: residual.view(shape.n_rows, shape.n_columns)
        for name, residual in feedback.state_by_name(slots).items()
        if (shape := shape_of(slots[name])) is not None
    }
    names = {slot: name for name, slot in slots.items()}
    factors = {
        names[slot]: state.factor.to("cpu", copy=True) for slot, state in states.items() if state.factor is not None
    }
    return {"residuals": residuals, "factors": factors}


def load_states(
    saved: Mapping[str, Any],
    slots: Mapping[str, Slot],
    shape_of: Callable[[Slot], MatrixShape | None],
    side: str,
) -> dict[Slot, MatrixState]:
    """The factors again, and the residuals checked. `side`: which factor is saved, "p" or "q". Raises: InvalidArgument."""
    if not isinstance(saved.get("residuals"), Mapping) or not isinstance(saved.get("factors"), Mapping):
        raise not_the_state("a low-rank scheme", "it lacks residuals or factors")
    states: dict[Slot, MatrixState] = {}
    for name in sorted({*saved["residuals"], *saved["factors"]}):
        slot = slots.get(name)
        shape = None if slot is None else shape_of(slot)
        if slot is None or shape is None:
            has = "has no such parameter" if slot is None else "does not compress it"
            raise InvalidArgument(
                f"the checkpoint holds low-rank state for {name!r}, but this run {has}; load the checkpoint into the "
                "model that wrote it"
            )
        state = states[slot] = MatrixState()
        if name in saved["residuals"]:
            expected = (shape.n_rows, shape.n_columns)
            _checked(saved["residuals"][name], expected, name, "residual")
        if name in saved["factors"]:
            expected = (shape.rank, shape.n_rows if side == "p" else shape.n_columns)
            state.factor = _checked(saved["factors"][name], expected, name, "factor")
    return states


def _checked(tensor: Any, expected: tuple[int, int], name: str, what: str) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != expected or tensor.dtype != torch.float32:
        found = f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise InvalidArgument(
            f"the checkpoint's {what} of {name!r} is {found}, expected {expected} torch.float32; attach the scheme with "
            "the rank, and load into the model, of the saved run"
        )
    return tensor.clone()
