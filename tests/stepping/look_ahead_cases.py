"""The training of the tests of model backup."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.schemes import Scheme
from gradwire.schemes.slimgc.threshold import NEVER
from small_training import MakeOptimizer, Training, batch_of, sgd

PLAIN = {"codec": "raw", "threshold_bytes": NEVER, "backup": True}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
}


def model(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 3)
    )


def build(seed: int = 1, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model(seed), **{"bucket_cap_mb": 0.003, **options})


def loss_of(module: nn.Module, rank: int, step: int) -> Tensor:
    return (module(batch_of(rank, step)) - 1).square().mean()


def start(
    rank: int, scheme: Scheme | None, optimizer: MakeOptimizer = sgd, seed: int = 1, scaler: Any = None, **ddp: Any
) -> Training:
    options: dict[str, Any] = {} if scheme is None else {"timeout_s": 100, "scaler": scaler}
    ddp = {"bucket_cap_mb": 0.003, **ddp}
    return Training(rank, scheme, optimizer, lambda: model(seed), loss_of, ddp, **options)
