"""Every cell of the table: a scheme works behind a door, or is refused by name."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import schemes
from gradwire.doors.table import DOORS, refusal
from ranks import run_ranks


def make(scheme: str) -> schemes.Scheme:
    return schemes.by_name(scheme, **({"aggregator": "process-group"} if scheme == "homomorphic" else {}))


def use(scheme: str, door: str, rank: int) -> None:
    """Two steps of a small model."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))
    if door in ("ddp", "two-level"):
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    made = schemes.TwoLevel(make(scheme), 2) if door == "two-level" else make(scheme)
    state: Any
    if door == "local-sgd":
        state = gradwire.LocalSgd(model, optimizer, made, every=1, timeout_s=20)
    elif door == "reducer":
        state = gradwire.Reducer(made, timeout_s=20)
    else:
        state = gradwire.attach(model, optimizer, made, timeout_s=20)
    for step in range(2):
        optimizer.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        model(x).square().mean().backward()
        if door == "reducer":
            state.all_reduce({name: p.grad for name, p in model.named_parameters()}).wait()
        optimizer.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    state.close()


def try_all(rank: int, world_size: int, door: str) -> None:
    warnings.simplefilter("ignore")
    for scheme in schemes.names():
        if refusal(scheme, door) is None:
            use(scheme, door, rank)
        else:
            with pytest.raises((gradwire.Unsupported, gradwire.InvalidArgument), match=rf"{scheme}|importance="):
                use(scheme, door, rank)


@pytest.mark.parametrize("door", DOORS)
def test_every_scheme_works_behind_a_door_or_is_refused_by_name(door: str) -> None:
    run_ranks(try_all, 2, door)
