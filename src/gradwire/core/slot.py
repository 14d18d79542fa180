"""A slot: what error feedback, factors and importance belong to; a parameter, a shard or slice of one, or a named tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn


class Slot:
    """One tensor that is reduced again and again. Equal to every slot of the same elements of the same parameter.

    Attributes:
        name: unique in its Reducer; "" where nobody gave one.
        shape: of what this rank has of it: a DTensor's local shard, or the rows of a slice.
        parameter: the optimizer's key for it, or None for a tensor that no optimizer steps.
        start: the first element of (the local shard of) `parameter` that it stands for.
    """

    __slots__ = ("_numel", "name", "parameter", "shape", "start")

    def __init__(self, name: str, shape: Iterable[int], parameter: torch.Tensor | None = None, start: int = 0) -> None:
        self.name, self.shape, self.parameter, self.start = name, torch.Size(shape), parameter, start
        self._numel = math.prod(self.shape)

    def numel(self) -> int:
        """How many elements it has on this rank."""
        return self._numel

    def dim(self) -> int:
        """How many dimensions."""
        return len(self.shape)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Slot):
            return NotImplemented
        if self.parameter is None or other.parameter is None:
            return self is other
        return self.parameter is other.parameter and self.start == other.start and self.shape == other.shape

    def __hash__(self) -> int:
        return id(self) if self.parameter is None else hash((id(self.parameter), self.start))

    def __repr__(self) -> str:
        return f"Slot({self.name!r}, {tuple(self.shape)})"


def slot_of(key: Slot | torch.Tensor, name: str = "") -> Slot:
    """A slot as it is; a parameter's own one, for what this rank has of it."""
    return key if isinstance(key, Slot) else Slot(name, local_of(key).shape, key)


def slots_by_name(named: Mapping[str, torch.Tensor]) -> dict[str, Slot]:
    """The slot of every parameter, by its name."""
    return {name: slot_of(parameter, name) for name, parameter in named.items()}


def named_parameters(module: nn.Module) -> dict[str, torch.Tensor]:
    """Each parameter as the model inside DDP names it; a tied one by the first of its names."""
    inner = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
    return dict(inner.named_parameters())


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor, sharing its memory; any other tensor as it is."""
    local: torch.Tensor | None = getattr(tensor, "_local_tensor", None)  # to_local() waits for collectives: none here
    return tensor if local is None else local


def flatten_like(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """`values` as (n,) in the order of `parameter`'s gradient in a DDP bucket; a view wherever strides allow.

    DDP's reducer keeps a parameter's memory order if it is dense (channels_last, transposed), else goes row by row.
    """
    if values.is_contiguous() and parameter.is_contiguous():
        return values.view(-1)
    if not _is_dense(parameter):
        return values.reshape(-1)
    if values.stride() != parameter.stride():
        values = torch.empty_like(parameter, dtype=values.dtype, device=values.device).copy_(values)
    return values.as_strided((values.numel(),), (1,))


def _is_dense(values: torch.Tensor) -> bool:
    """Whether the elements fill one stretch of memory, each once, in whatever order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(values.stride(), values.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
