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


def by_clock(took: Callable[[int, int], tuple[float, float]]) -> None:
    """From now on the table is made by these times of (a tensor's size, a mode) instead of what the network takes."""
    send_alone = SlimGC._send_alone

    def timed(self: SlimGC, step: int, values: Tensor, mode: int) -> Callable[[], tuple[float, float]]:
        send_alone(self, step, values, mode)()
        return lambda: took(values.numel(), mode)

    SlimGC._send_alone = timed  # type: ignore[method-assign,assignment]


def like_any_network(n_values: int, mode: int) -> tuple[float, float]:
    """For runs that are compared with each other."""
    return (1e-3, 1e-4) if mode else (4e-6 * n_values, 0.0)


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
