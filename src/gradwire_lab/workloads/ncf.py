"""Neural collaborative filtering: embeddings of users and items whose gradient is dense with mostly zero rows."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.errors import CorruptMessage, InvalidArgument
from gradwire_lab.workloads.base import Batch, Workload, draw_from_epochs, evaluating, step_generator

# MovieLens, in its three spellings: file name and what separates its columns.
_RATING_FILES = {"u.data": "\t", "ratings.dat": "::", "ratings.csv": ","}


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
    """NeuMF on the user's MovieLens folder, else on random interactions with Zipf's popularity (shape-only).

    Args:
        data_dir: a folder with MovieLens' u.data, ratings.dat or ratings.csv.
        n_users, n_items: embedding rows; default 100,000 and 40,000, with `data_dir` what the data holds.
        width: embedding columns, even. The published 29.7 M (ml-25m) is about `data_dir=ml-25m, width=128`.
        n_negatives: items drawn at random for each real one.
    """

    stands_for = "NCF recommenders: homomorphic compression (29.7 M parameters, batch 1,024, 98.9 % zero)"
    default_optimizer = "adam"
    default_batch_size = 1024

    def __init__(
        self,
        *,
        data_dir: str | None = None,
        n_users: int | None = None,
        n_items: int | None = None,
        width: int = 32,
        n_negatives: int = 3,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if width < 2 or width % 2 or n_negatives < 1:
            raise InvalidArgument(f"{width=}, {n_negatives=}: expected an even width and at least one negative")
        self.width, self.n_negatives = width, n_negatives
        self.data = "shape-only" if data_dir is None else "real"
        self._pairs = None if data_dir is None else read_interactions(data_dir)
        most_users, most_items = (100_000, 40_000) if self._pairs is None else (self._pairs.amax(0) + 1).tolist()
        self.n_users, self.n_items = n_users or most_users, n_items or most_items
        if self._pairs is not None and (self.n_users < most_users or self.n_items < most_items):
            raise InvalidArgument(
                f"{data_dir} holds {most_users} users and {most_items} items, more than was asked for"
            )

    def make_model(self) -> nn.Module:
        return NeuMf(self.n_users, self.n_items, self.width)

    @functools.cached_property
    def _training(self) -> tuple[Tensor, Tensor]:
        """((n, 2) training pairs, (m, 2) held out): every tenth pair of a fixed shuffle is held out."""
        assert self._pairs is not None
        order = torch.randperm(len(self._pairs), generator=step_generator("ncf", "split"))
        return self._pairs[order[torch.arange(len(order)) % 10 != 0]], self._pairs[order[::10]]

    def batch_at(self, step: int, rank: int, world_size: int, batch_size: int, seed: int) -> Batch:
        generator = step_generator(seed, "interactions", step, rank, world_size)
        n_real = max(1, batch_size // (1 + self.n_negatives))
        if self._pairs is None:
            real = torch.stack((_zipf(self.n_users, n_real, generator), _zipf(self.n_items, n_real, generator)), 1)
        else:
            training = self._training[0]
            real = training[draw_from_epochs(len(training), step, rank, world_size, n_real, seed)]
        return self._with_negatives(real, batch_size, generator)

    def _with_negatives(self, real: Tensor, batch_size: int, generator: torch.Generator) -> Batch:
        users = real[torch.arange(batch_size) % len(real), 0]
        items = torch.randint(self.n_items, (batch_size,), generator=generator)
        items[: len(real)] = real[:, 1]
        targets = torch.zeros(batch_size)
        targets[: len(real)] = 1.0
        return torch.stack((users, items), 1), targets

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Loss over up to 4,096 held-out interactions and as many negatives each as in training."""
        if self._pairs is None:
            return {}
        device = next(model.parameters()).device
        real = self._training[1][:4096]
        batch_size = len(real) * (1 + self.n_negatives)
        pairs, targets = self._with_negatives(real, batch_size, step_generator("ncf", "held out"))
        with evaluating(model):
            return {"held_out_loss": float(self.loss(model, (pairs.to(device), targets.to(device))))}


def read_interactions(data_dir: str) -> Tensor:
    """(n, 2) int64: user and item of each rating in a MovieLens folder, renumbered from 0.

    Raises: InvalidArgument (no rating file), CorruptMessage (a file that does not hold whole numbers).
    """
    folder = Path(data_dir).expanduser()
    name = next((name for name in _RATING_FILES if (folder / name).is_file()), None)
    if name is None:
        raise InvalidArgument(f"data_dir={data_dir!r} holds none of {', '.join(_RATING_FILES)} (MovieLens)")
    path, separator = folder / name, _RATING_FILES[name]
    columns: list[np.ndarray] = []
    try:
        lines = path.read_text("utf-8").splitlines()[1 if name.endswith(".csv") else 0 :]
        table = np.array([line.split(separator, 2)[:2] for line in lines if line]).astype(np.int64)
        if table.ndim != 2 or table.shape[1] != 2:
            raise ValueError(f"{table.shape} is not a table of users and items")
        columns = [np.unique(table[:, column], return_inverse=True)[1] for column in (0, 1)]
    except (ValueError, OverflowError) as error:
        raise CorruptMessage(f"{path}: not a MovieLens rating file ({error})") from error
    return torch.from_numpy(np.stack(columns, 1).astype(np.int64))


def _zipf(n_values: int, n_draws: int, generator: torch.Generator) -> Tensor:
    """(n_draws,) int64 from 0 to n_values - 1, the k-th with a chance of about 1/k."""
    # The inverse of the continuous law: k = (n + 1)^u with u uniform.
    uniform = torch.rand(n_draws, generator=generator, dtype=torch.float64)
    return (torch.pow(float(n_values + 1), uniform) - 1).long().clamp_(0, n_values - 1)
