"""Errors and factors as a checkpoint holds them: by parameter name, free of the loss scale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from gradwire.errors import InvalidArgument
from gradwire.schemes.low_rank.matrices import MatrixMemory, MatrixShape


def memories_by_name(
    memories: Mapping[torch.Tensor, MatrixMemory], names: Mapping[torch.Tensor, str]
) -> dict[str, dict[str, torch.Tensor]]:
    """Copies: {"errors": {name: (n_rows, n_columns)}, "factors": {name: (rank, n)}}, float32."""
    errors, factors = {}, {}
    for parameter, memory in memories.items():
        if memory.error is not None:
            errors[names[parameter]] = memory.error / memory.error_scale
        if memory.factor is not None:
            factors[names[parameter]] = memory.factor.clone()
    return {"errors": errors, "factors": factors}


def load_memories(
    state: Mapping[str, Any],
    names: Mapping[torch.Tensor, str],
    shape_of: Callable[[torch.Tensor], MatrixShape | None],
    side: str,
) -> dict[torch.Tensor, MatrixMemory]:
    """The inverse. `side`: which factor the state holds, "p" or "q". Raises: InvalidArgument."""
    if not isinstance(state.get("errors"), Mapping) or not isinstance(state.get("factors"), Mapping):
        raise InvalidArgument("this is not the state of a low-rank scheme: it lacks errors or factors")
    parameters = {name: parameter for parameter, name in names.items()}
    memories: dict[torch.Tensor, MatrixMemory] = {}
    for name in sorted({*state["errors"], *state["factors"]}):
        parameter = parameters.get(name)
        shape = None if parameter is None else shape_of(parameter)
        if parameter is None or shape is None:
            has = "has no such parameter" if parameter is None else "does not compress it"
            raise InvalidArgument(
                f"the checkpoint holds low-rank state for {name!r}, but this run {has}; load the checkpoint into the "
                "model that wrote it"
            )
        memory = memories[parameter] = MatrixMemory()
        if name in state["errors"]:
            memory.error = _checked(state["errors"][name], (shape.n_rows, shape.n_columns), name, "error")
        if name in state["factors"]:
            length = shape.n_rows if side == "p" else shape.n_columns
            memory.factor = _checked(state["factors"][name], (shape.rank, length), name, "factor")
    return memories


def _checked(tensor: torch.Tensor, expected: tuple[int, int], name: str, what: str) -> torch.Tensor:
    if tuple(tensor.shape) != expected or tensor.dtype != torch.float32:
        raise InvalidArgument(
            f"the checkpoint's {what} of {name!r} is {tuple(tensor.shape)} {tensor.dtype}, expected {expected} "
            "float32; attach the scheme with the rank, and load into the model, of the saved run"
        )
    return tensor.clone()
