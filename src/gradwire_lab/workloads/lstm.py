"""An LSTM language model whose gradient is dense in layout and mostly zero rows in content."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.errors import InvalidArgument
from gradwire_lab.workloads.base import Batch, Workload, evaluating
from gradwire_lab.workloads.text import crop_batch, spread_crops, word_tokens


class LstmLanguageModel(nn.Module):
    """Embedding, LSTM with projection, and the embedding again as output layer.

    In training each position is scored against the batch's own distinct targets only (a sampled softmax whose sample
    is the batch), so that only rows of words in the batch have a gradient, as in the large models of this kind.
    """

    def __init__(self, vocabulary_size: int, width: int, hidden: int, n_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, width)
        # torch wants a projection that is truly smaller; at equal widths there is nothing to project.
        self.lstm = nn.LSTM(width, hidden, n_layers, batch_first=True, proj_size=width if width < hidden else 0)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)

    def forward(self, tokens: Tensor, candidates: Tensor) -> Tensor:
        """tokens: (batch, length) int64, candidates: (c,) int64; returns (batch, length, c) logits."""
        states, _ = self.lstm(self.embedding(tokens))
        return states @ self.embedding(candidates).T


class LstmWorkload(Workload):
    """The LSTM language model on the words of Python's standard library: 32,000 x 256, hidden 1,024, 10.6 M parameters.

    The published shape (426 M, Google Billion Words) is `vocabulary_size=793470, width=512, hidden=2048, n_layers=2`.

    Args:
        length: words of context.
    """

    stands_for = "LSTM language models with large embeddings: homomorphic compression (426 M parameters, 94.5 % zero)"
    default_optimizer = "adagrad"
    default_batch_size = 8
    # 0.05, usual for Adagrad, diverges here within ten steps.
    learning_rates: ClassVar[dict[str, float]] = {"adagrad": 0.01}

    def __init__(
        self,
        *,
        vocabulary_size: int = 32_000,
        width: int = 256,
        hidden: int = 1024,
        n_layers: int = 1,
        length: int = 20,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if vocabulary_size < 2 or width > hidden:
            raise InvalidArgument(f"{vocabulary_size=}, {width=}, {hidden=}: expected 2 words, and width <= hidden")
        self.vocabulary_size, self.width, self.hidden = vocabulary_size, width, hidden
        self.n_layers, self.length = n_layers, length

    def make_model(self) -> nn.Module:
        return LstmLanguageModel(self.vocabulary_size, self.width, self.hidden, self.n_layers)

    def batch_at(self, step: int, rank: int, world_size: int, batch_size: int, seed: int) -> Batch:
        tokens = word_tokens(self.vocabulary_size)[0]
        return crop_batch(tokens, self.length, step, rank, world_size, batch_size, seed)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        candidates, wanted = targets.unique(return_inverse=True)
        return F.cross_entropy(model(inputs, candidates).flatten(0, 1), wanted.flatten())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Loss in nats per word over 32 held-out crops, against the whole vocabulary."""
        device = next(model.parameters()).device
        _, held_out, n_words = word_tokens(self.vocabulary_size)
        inputs, targets = spread_crops(held_out, self.length, 32)
        everything = torch.arange(n_words, device=device)
        with evaluating(model):
            losses = [
                float(F.cross_entropy(model(x.to(device), everything).flatten(0, 1), y.to(device).flatten()))
                for x, y in zip(inputs.split(4), targets.split(4), strict=True)
            ]
        return {"held_out_loss": sum(losses) / len(losses)}
