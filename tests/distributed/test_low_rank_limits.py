"""Low-rank schemes serve ranks with uneven inputs, and refuse options out of range and states that do not fit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import schemes
from ranks import on_ranks

SCHEMES = ("acp-sgd", "power-sgd", "power-sgd-overlap")


def build() -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(1)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 24)))
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.02)


def run_steps(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        ddp(torch.randn(4, 24, generator=torch.Generator().manual_seed(9 * step + rank))).square().mean().backward()
        optimizer.step()


@on_ranks(2)
def test_state_of_another_rank_scheme_or_model_is_refused(rank: int, world_size: int) -> None:
    ddp, optimizer = build()
    attachment = gradwire.attach(ddp, optimizer, schemes.by_name("acp-sgd", rank=3))
    run_steps(ddp, optimizer, rank, range(2))
    saved = attachment.state_dict()
    attachment.close()

    def load(model: DistributedDataParallel, scheme: Any, state: dict, match: str) -> None:
        other = gradwire.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), scheme)
        with pytest.raises(gradwire.InvalidArgument, match=match):
            other.load_state_dict(state)
        other.close()

    load(build()[0], schemes.by_name("acp-sgd", rank=4), saved, "rank: 3 saved, 4 now")
    load(build()[0], "power-sgd", saved, "written by scheme 'acp-sgd'")
    wider = DistributedDataParallel(nn.Sequential(nn.Linear(24, 24), nn.Tanh(), nn.Tanh(), nn.Linear(24, 24)))
    load(wider, schemes.by_name("acp-sgd", rank=3), saved, "has no such parameter")
    reshaped = copy.deepcopy(saved)
    reshaped["state"]["residuals"]["0.weight"] = torch.zeros(3, 3)
    load(build()[0], schemes.by_name("acp-sgd", rank=3), reshaped, "9 elements for '0.weight'; it has 576")
    load(build()[0], schemes.by_name("acp-sgd", rank=3), {**saved, "state": {}}, "lacks is_step_for_p")
