"""Two models made up to be hard on whoever chooses a scheme: many tiny tensors, and one huge one. Random, learnable data."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.errors import InvalidArgument
from gradwire_lab.workloads.base import Batch, Workload, evaluating, step_generator


class _Teacher(Workload):
    """Inputs are random, targets a fixed function of them."""

    default_optimizer = "sgd"

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """The loss of a batch that no rank trains on."""
        with evaluating(model):
            return {"held_out_loss": float(self.loss(model, self.batch_at(1 << 20, 0, 1, 64, 1)))}


class ManyTensorsWorkload(_Teacher):
    """`depth` residual layers of `width` values: hundreds of parameters of a few hundred values each."""

    stands_for = "models of many small tensors: what is paid per tensor decides"

    def __init__(self, *, depth: int = 150, width: int = 24, **options: Any) -> None:
        super().__init__(**options)
        if depth < 1 or width < 1:
            raise InvalidArgument(f"depth={depth}, width={width}: both are positive")
        self.depth, self.width = depth, width

    def make_model(self) -> nn.Module:
        return _Residuals(self.depth, self.width)

    def batch_at(self, step: int, rank: int, world_size: int, batch_size: int, seed: int) -> Batch:
        generator = step_generator(seed, step)
        inputs = torch.randn(world_size * batch_size, self.width, generator=generator)
        mine = inputs[rank * batch_size : (rank + 1) * batch_size]
        return mine, torch.sin(mine).cumsum(1) / self.width**0.5

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])


class _Residuals(nn.Module):
    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))

    def forward(self, values: Tensor) -> Tensor:
        """(batch, width) to (batch, width)."""
        for layer, norm in zip(self.layers, self.norms, strict=True):
            values = values + torch.tanh(layer(norm(values))) / len(self.layers) ** 0.5
        return values


class HugeEmbeddingWorkload(_Teacher):
    """One embedding with nearly all of the parameters, ready last of all: nothing hides its transfer."""

    stands_for = "recommenders and large vocabularies: one tensor is the model"

    def __init__(self, *, n_rows: int = 50_000, width: int = 64, n_words: int = 16, **options: Any) -> None:
        super().__init__(**options)
        if min(n_rows, width, n_words) < 1:
            raise InvalidArgument(f"n_rows={n_rows}, width={width}, n_words={n_words}: all are positive")
        self.n_rows, self.width, self.n_words = n_rows, width, n_words

    def make_model(self) -> nn.Module:
        return nn.Sequential(
            nn.EmbeddingBag(self.n_rows, self.width), nn.Linear(self.width, 32), nn.Tanh(), nn.Linear(32, 2)
        )

    def batch_at(self, step: int, rank: int, world_size: int, batch_size: int, seed: int) -> Batch:
        generator = step_generator(seed, step)
        shape = (world_size * batch_size, self.n_words)
        words = (torch.rand(shape, generator=generator) ** 3 * self.n_rows).long()  # few words are frequent
        mine = words[rank * batch_size : (rank + 1) * batch_size]
        return mine, (mine % 2).sum(1) % 2

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])
