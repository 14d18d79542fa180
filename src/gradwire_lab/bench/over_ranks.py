"""What all ranks measured, as one: collective, and the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def mean(values: Sequence[float]) -> list[float]:
    """Of each value, the mean over the ranks."""
    summed = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(summed)
    return (summed / dist.get_world_size()).tolist()


def largest(values: Sequence[float]) -> list[float]:
    """Of each value, the largest of any rank: of seconds, the slowest one's."""
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.tolist()
