"""Mixed precision in all its forms works with every scheme: autocast, GradScaler, 16-bit and mixed parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ddp_cases import attach, batches, build_model, check_case, finish, sgd, take_step, train, wrap
from torch import Tensor, nn

from gradwire.schemes import Scheme
from ranks import on_ranks


def train_with_autocast(rank: int, scheme: Scheme | None) -> Tensor:
    def step(ddp: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = ddp(batch).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return train(rank, scheme, wrap(build_model()), step=step)


def train_with_scaler(rank: int, scheme: Scheme | None) -> Tensor:
    """An Inf on one rank in step 1: the scaler skips that step on all ranks, and halves its scale."""
    ddp = wrap(build_model())
    optimizer = sgd(ddp)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    attachment = attach(ddp, optimizer, scheme, scaler=scaler)
    drifts = scheme is not None and scheme.name == "periodic"
    for step, batch in enumerate(batches(rank)):
        optimizer.zero_grad()
        loss = ddp(batch).square().mean()
        scaler.scale(loss * float("inf") if (rank, step) == (1, 1) and not drifts else loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == (2.0**14 if drifts else 2.0**13)
    return finish(ddp, attachment)


def train_in(dtype: torch.dtype, rank: int, scheme: Scheme | None) -> Tensor:
    def step(ddp: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
        take_step(ddp, optimizer, batch.to(dtype))

    return train(rank, scheme, wrap(build_model().to(dtype)), sgd, step)


class Mixed(nn.Module):
    """Three dtypes in one model: DDP makes buckets for each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.wide, self.short, self.narrow = nn.Linear(20, 20), nn.Linear(20, 20).bfloat16(), nn.Linear(20, 20).half()

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.short(self.wide(batch).bfloat16()).relu()
        return self.narrow(hidden.half()).float()


def train_mixed_dtypes(rank: int, scheme: Scheme | None) -> Tensor:
    def count(attachment: Any) -> None:
        assert min(step.n_buckets for step in attachment.recorder.steps) >= 3

    return train(rank, scheme, wrap(Mixed()), sgd, look_at=count)


# A unit in the last place of bfloat16 is 2^16 of float32's, of float16 2^13: near-lossless means as much less there.
CASES: dict[str, tuple[Callable[[int, Scheme | None], Tensor], float]] = {
    # The activations' rounding to bfloat16 magnifies a difference in float32's last place.
    "autocast": (train_with_autocast, 100),
    "scaler": (train_with_scaler, 1),
    "bfloat16": (functools.partial(train_in, torch.bfloat16), 2**14),
    "float16": (functools.partial(train_in, torch.float16), 2**12),
    "mixed": (train_mixed_dtypes, 2**14),
}


@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_dtype_works_with_every_scheme(rank: int, world_size: int, case: str) -> None:
    check_case(rank, world_size, *CASES[case])
