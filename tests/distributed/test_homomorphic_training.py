"""homomorphic under DDP: embeddings train, alike on all ranks, and resume bit by bit."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from homomorphic_cases import make
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from ranks import run_ranks


class Recommender(nn.Module):
    """Two embeddings of which a batch touches few rows, and a small dense head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4_000, 16)
        self.head = nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.embedding(pairs).flatten(1))
        return output


def run_steps(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        pairs = torch.randint(0, 4_000, (16, 2), generator=torch.Generator().manual_seed(100 * (step % 5) + rank))
        optimizer.zero_grad()
        loss = (ddp(pairs).view(-1) - (pairs.sum(1) % 2)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


OPTIONS: list[dict[str, Any]] = [
    {},
    {"mode": "sketch"},
    {"mode": "exact"},
    {"sparsifier": "top-k"},
    {"mode": "lossy", "budget": 0.2},
]


def start(options: dict[str, Any], state: dict[str, Any] | None) -> tuple[Any, ...]:
    torch.manual_seed(1)
    model = Recommender()
    if state is not None:
        model.load_state_dict(state)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    return ddp, optimizer, gradwire.attach(ddp, optimizer, make(**options))


def train(rank: int, world_size: int) -> list[torch.Tensor]:
    results = []
    for options in OPTIONS:
        ddp, optimizer, attachment = start(options, None)
        losses = run_steps(ddp, optimizer, rank, range(10))
        kept = {name: value.clone() for name, value in ddp.module.state_dict().items()}
        saved = io.BytesIO()
        torch.save(attachment.state_dict(), saved)
        attachment.close()
        runs = []
        for _ in range(2):
            ddp, optimizer, attachment = start(options, kept)
            saved.seek(0)
            attachment.load_state_dict(torch.load(saved, weights_only=True))
            saved = io.BytesIO()
            torch.save(attachment.state_dict(), saved)
            later = run_steps(ddp, optimizer, rank, range(10, 20))
            runs.append(torch.cat([parameter.detach().view(-1) for parameter in ddp.parameters()]))
            stats = attachment.stats()
            attachment.close()
            assert sum(later[-5:]) < 0.8 * sum(losses[:5])
            if world_size > 1:
                assert stats["n_fallbacks"] == 0
                assert 0 < stats["ratio"] < 0.25
        assert torch.equal(runs[0], runs[1])
        results.append(runs[0])
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_embeddings_train_alike_on_all_ranks_and_resume_bit_by_bit(world_size: int) -> None:
    outcomes = run_ranks(train, world_size)
    for outcome in outcomes[1:]:
        for mine, first in zip(outcome, outcomes[0], strict=True):
            assert torch.equal(mine, first)
