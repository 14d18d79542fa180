"""Mixed precision in all its forms works with every scheme: autocast, GradScaler, 16-bit and mixed parameters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ddp_cases import N_STEPS, adamw, attach, batches, build_model, check_case, finish, sgd, take_step, wrap
from torch import Tensor, nn

from gradwire.schemes import Scheme
from ranks import run_ranks


def train_with_autocast(rank: int, scheme: Scheme | None) -> Tensor:
    ddp = wrap(build_model())
    optimizer = adamw(ddp)
    attachment = attach(ddp, optimizer, scheme)
    for batch in batches(rank):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = ddp(batch).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return finish(ddp, attachment)


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
    ddp = wrap(build_model().to(dtype))
    optimizer = sgd(ddp)
    attachment = attach(ddp, optimizer, scheme)
    for batch in batches(rank):
        take_step(ddp, optimizer, batch.to(dtype))
    return finish(ddp, attachment)


def train_in_bfloat16(rank: int, scheme: Scheme | None) -> Tensor:
    return train_in(torch.bfloat16, rank, scheme)


def train_in_float16(rank: int, scheme: Scheme | None) -> Tensor:
    return train_in(torch.float16, rank, scheme)


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
    ddp = wrap(Mixed())
    optimizer = sgd(ddp)
    attachment = attach(ddp, optimizer, scheme)
    for batch in batches(rank, N_STEPS):
        take_step(ddp, optimizer, batch)
    if attachment:
        assert min(step.n_buckets for step in attachment.recorder.steps) >= 3
    return finish(ddp, attachment)


# A unit in the last place of bfloat16 is 2^16 of float32's, of float16 2^13: near-lossless means as much less there.
@pytest.mark.parametrize(
    ("case", "tolerance"),
    [
        (
            train_with_autocast,
            100,
        ),  # the activations' rounding to bfloat16 magnifies a difference in float32's last place
        (train_with_scaler, 1),
        (train_in_bfloat16, 2**14),
        (train_in_float16, 2**12),
        (train_mixed_dtypes, 2**14),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_dtype_works_with_every_scheme(case: Callable[[int, Scheme | None], Tensor], tolerance: float) -> None:
    run_ranks(check_case, 2, case, tolerance, timeout_s=120)
