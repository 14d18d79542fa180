"""Models that are hard on a scheme: three whose gradients are mostly zero rows, and one of many tiny tensors."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.errors import InvalidArgument
from gradwire_lab.workloads.base import Batch, Workload, evaluating, step_generator
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
        if not model.training:  # against the whole vocabulary
            candidates, wanted = torch.arange(word_tokens(self.vocabulary_size)[2], device=targets.device), targets
        return F.cross_entropy(model(inputs, candidates).flatten(0, 1), wanted.flatten())

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Loss in nats per word over 32 held-out crops, against the whole vocabulary."""
        crops = spread_crops(word_tokens(self.vocabulary_size)[1], self.length, 32)
        return {"held_out_loss": self.mean_loss(model, crops, 4)}


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
        return self.score(torch.cat((product, dense), 1)).squeeze(1)


class NcfWorkload(Workload):
    """NeuMF on random interactions with Zipf's popularity, each with `n_negatives` items drawn at random (shape-only)."""

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
