"""homomorphic under DDP: embeddings train, alike on all ranks, and resume bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from homomorphic_cases import make
from torch import nn

from ranks import on_ranks
from small_training import Training


class Recommender(nn.Module):
    """Two embeddings of which a batch touches few rows, and a small dense head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4_000, 16)
        self.head = nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.embedding(pairs).flatten(1))
        return output


def recommender() -> nn.Module:
    torch.manual_seed(1)
    return Recommender()


def loss_of(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    pairs = torch.randint(0, 4_000, (16, 2), generator=torch.Generator().manual_seed(100 * (step % 5) + rank))
    return (module(pairs).view(-1) - (pairs.sum(1) % 2)).square().mean()


OPTIONS: list[dict[str, Any]] = [
    {},
    {"mode": "sketch"},
    {"mode": "exact"},
    {"sparsifier": "top-k"},
    {"mode": "lossy", "budget": 0.2},
]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@on_ranks()
def test_embeddings_train_alike_on_all_ranks_and_resume_bit_by_bit(rank: int, world_size: int) -> list[torch.Tensor]:
    results = []
    for options in OPTIONS:

        def start(options: dict[str, Any] = options) -> Training:
            ddp = {"bucket_cap_mb": 25}
            return Training(rank, make(**options), lambda p: torch.optim.SGD(p, lr=0.5), recommender, loss_of, ddp)

        training, runs = start(), []
        losses = training.take_steps(range(10))
        saved = training.state()
        training.close()
        for _ in range(2):
            resumed = start().load(saved)
            saved = resumed.state()
            later = resumed.take_steps(range(10, 20))
            stats = resumed.close()
            assert sum(later[-5:]) < 0.8 * sum(losses[:5])
            if world_size > 1:
                assert stats["n_fallbacks"] == 0
                assert 0 < stats["ratio"] < 0.25
            runs.append(resumed.flat())
        assert torch.equal(*runs)
        results.append(runs[0])
    return results
