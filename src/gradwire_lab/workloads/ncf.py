"""Neural collaborative filtering: embeddings of users and items whose gradient is dense with mostly zero rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.errors import InvalidArgument
from gradwire_lab.workloads.base import Batch, Workload, step_generator


class NeuMf(nn.Module):
    """NeuMF (He et al., 2017): a product of embeddings beside a small dense network, joined at the end."""

    def __init__(self, n_users: int, n_items: int, width: int) -> None:
        super().__init__()
        self.n_half = width // 2  # one half for the product, the other for the network
        self.user, self.item = nn.Embedding(n_users, width), nn.Embedding(n_items, width)
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.normal_(self.item.weight, std=0.1)
        self.dense = nn.Sequential(
            nn.Linear(2 * self.n_half, width), nn.ReLU(), nn.Linear(width, self.n_half), nn.ReLU()
        )
        self.score = nn.Linear(2 * self.n_half, 1)

    def forward(self, pairs: Tensor) -> Tensor:
        """pairs: (batch, 2) int64 user and item; returns (batch,) logits of an interaction."""
        user, item = self.user(pairs[:, 0]), self.item(pairs[:, 1])
        product = user[:, : self.n_half] * item[:, : self.n_half]
        dense = self.dense(torch.cat((user[:, self.n_half :], item[:, self.n_half :]), 1))
        out: Tensor = self.score(torch.cat((product, dense), 1)).squeeze(1)
        return out


class NcfWorkload(Workload):
    """NeuMF on random interactions with Zipf's popularity (shape-only).

    Args:
        n_users, n_items: embedding rows. width: embedding columns, even.
        n_negatives: items drawn at random for each real one.
    """

    stands_for = "NCF recommenders: homomorphic compression (29.7 M parameters, batch 1,024, 98.9 % zero)"
    default_optimizer = "adam"
    default_batch_size = 1024
    data = "shape-only"

    def __init__(
        self, *, n_users: int = 100_000, n_items: int = 40_000, width: int = 32, n_negatives: int = 3, **options: Any
    ) -> None:
        super().__init__(**options)
        if width < 2 or width % 2 or n_negatives < 1:
            raise InvalidArgument(f"{width=}, {n_negatives=}: expected an even width and at least one negative")
        self.n_users, self.n_items, self.width, self.n_negatives = n_users, n_items, width, n_negatives

    def make_model(self) -> nn.Module:
        return NeuMf(self.n_users, self.n_items, self.width)

    def batch_at(self, step: int, rank: int, world_size: int, batch_size: int, seed: int) -> Batch:
        generator = step_generator(seed, "interactions", step, rank, world_size)
        n_real = max(1, batch_size // (1 + self.n_negatives))
        users, items = (_zipf(n, n_real, generator) for n in (self.n_users, self.n_items))
        users = users[torch.arange(batch_size) % n_real]
        drawn = torch.randint(self.n_items, (batch_size,), generator=generator)
        drawn[:n_real] = items
        targets = torch.zeros(batch_size)
        targets[:n_real] = 1.0
        return torch.stack((users, drawn), 1), targets

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


def _zipf(n_values: int, n_draws: int, generator: torch.Generator) -> Tensor:
    """(n_draws,) int64 from 0 to n_values - 1, the k-th with a chance of about 1/k."""
    # The inverse of the continuous law: k = (n + 1)^u with u uniform.
    uniform = torch.rand(n_draws, generator=generator, dtype=torch.float64)
    return (torch.pow(float(n_values + 1), uniform) - 1).long().clamp_(0, n_values - 1)
