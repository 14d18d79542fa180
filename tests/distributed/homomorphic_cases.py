"""Tensors, gradients and a scheme for homomorphic's tests."""

from __future__ import annotations

from typing import Any

import torch

from gradwire import schemes
from sketches import sparse_gradients

SHAPES = [(40, 300), (7,), (70, 11), (0, 5), (), (30_000,)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gradients_of(
    rank: int, world_size: int, step: int, density: float, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    n_elements = sum(torch.Size(shape).numel() for shape in SHAPES)
    values = sparse_gradients(n_elements, density, world_size, run=(1, 32)[step % 2], seed=step)[rank]
    values.clamp_(-60_000, 60_000)
    parts = values.to(dtype).split([torch.Size(shape).numel() for shape in SHAPES])
    return [part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def make(**options: Any) -> schemes.Scheme:
    return schemes.by_name("homomorphic", **options)


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for shape in SHAPES]
