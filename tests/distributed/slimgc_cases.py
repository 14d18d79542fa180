"""Tensors, gradients and a driver for SlimGC's tests."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from buckets import Driver
from gradwire.schemes.slimgc import SlimGC

SHAPES = [(24, 18), (7,), (30, 11), (0, 5), (), (50,), (300,)]
LAYOUT = [3, 4]
COARSE = {"codec": "truncate", "bits": 22}  # one bit of mantissa: every value loses something


def gradients_of(rank: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def without_clocks(scheme: SlimGC, step: int, values: Tensor, mode: int) -> Callable[[], tuple[float, float]]:
    """In place of `SlimGC._send_alone`: measured times decide the table, and without clocks in it two runs can be compared."""
    took = (1e-3, 1e-4) if mode else (4e-6 * values.numel(), 0.0)
    return lambda: took


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1).float() for tensor in tensors])


def driver_of(scheme: SlimGC, dtype: torch.dtype = torch.float32) -> Driver:
    return Driver(scheme, [torch.zeros(shape, dtype=dtype) for shape in SHAPES], LAYOUT)


def residuals_of(driver: Driver) -> Tensor:
    state = driver.scheme.state_dict()["residuals"]
    return flat([state.get(f"p{i}", torch.zeros(math.prod(shape))) for i, shape in enumerate(SHAPES)])


def mean_over_ranks(values: Tensor) -> Tensor:
    summed = values.double()
    torch.distributed.all_reduce(summed)
    return summed / torch.distributed.get_world_size()
