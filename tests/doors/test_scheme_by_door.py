"""Every cell of the table: a scheme works behind a door, or is refused by name."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import schemes
from gradwire.doors.table import DOORS, refusal
from ranks import run_ranks


def make(scheme: str) -> schemes.Scheme:
    return schemes.by_name(scheme, **({"aggregator": "process-group"} if scheme == "homomorphic" else {}))


def use(scheme: str, door: str, rank: int, mesh: DeviceMesh) -> None:
    """Two steps of a small model; `mesh`: as many nodes as ranks, a rank on each."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))
    if door in ("ddp", "two-level"):
        model = DistributedDataParallel(model)
    elif door == "fsdp2":
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
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
    for p in model.parameters():
        values = p.full_tensor() if door == "fsdp2" else p
        assert bool(values.isfinite().all()), scheme
    state.close()


def try_all(rank: int, world_size: int, door: str) -> None:
    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))
    for scheme in schemes.names():
        if refusal(scheme, "fsdp2" if door == "plain module" else door) is None:
            use(scheme, door, rank, mesh)
        else:
            with pytest.raises((gradwire.Unsupported, gradwire.InvalidArgument), match=rf"{scheme}|importance="):
                use(scheme, door, rank, mesh)


@pytest.mark.parametrize("door", [*DOORS, "plain module"])
def test_every_scheme_works_behind_a_door_or_is_refused_by_name(door: str) -> None:
    run_ranks(try_all, 2, door)
