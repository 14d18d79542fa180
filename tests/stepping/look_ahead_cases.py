"""A model and its batches for the tests of model backup."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.schemes.slimgc.threshold import NEVER

PLAIN = {"codec": "raw", "threshold_bytes": NEVER, "backup": True}


def build(seed: int = 1, **options: Any) -> DistributedDataParallel:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 3)
    )
    return DistributedDataParallel(model, **{"bucket_cap_mb": 0.003, **options})


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(1_000 * rank + step))


def loss_of(ddp: nn.Module, inputs: Tensor) -> Tensor:
    return (ddp(inputs) - 1).square().mean()
