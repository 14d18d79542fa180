"""Models whose gradients are mostly zeros, as homomorphic compression is made for: in each step few rows are touched."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

N_ROWS, N_USERS, N_ITEMS, N_WORDS = 3_000, 1_500, 1_200, 1_800
N_STEPS = 4


class Rows(nn.Module):
    """One embedding, whose touched rows are summed and judged."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(N_ROWS, 16), nn.Linear(16, 1)

    def forward(self, places: Tensor) -> Tensor:
        output: Tensor = self.head(self.embedding(places % N_ROWS).sum(1).tanh())
        return output


class Filtering(nn.Module):
    """Neural collaborative filtering: users' and items' embeddings for a product and for layers."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(N_USERS, 24), nn.Embedding(N_ITEMS, 24)
        self.layers = nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 4))
        self.head = nn.Linear(12, 1)

    def forward(self, places: Tensor) -> Tensor:
        user, item = self.users(places[:, 0] % N_USERS), self.items(places[:, 1] % N_ITEMS)
        deep = self.layers(torch.cat([user[:, 8:], item[:, 8:]], 1))
        output: Tensor = self.head(torch.cat([user[:, :8] * item[:, :8], deep], 1))
        return output


class Reading(nn.Module):
    """An LSTM over words of which a batch holds few."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(N_WORDS, 24), nn.LSTM(24, 8), nn.Linear(8, 1)

    def forward(self, places: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embedding(places.t() % N_WORDS))
        output: Tensor = self.head(hidden[-1])
        return output


MODELS: dict[str, Callable[[], nn.Module]] = {"embedding": Rows, "ncf": Filtering, "lstm": Reading}


def build(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same parameters on every rank."""
    torch.manual_seed(7)
    return MODELS[name]().to(dtype)


def batch(rank: int, step: int) -> Tensor:
    """(12, 3) int64: of rows that differ by rank and step, and some that all ranks share."""
    own = torch.Generator().manual_seed(1_000 * rank + step)
    places = torch.randint(0, 1_000_000, (12, 3), generator=own)
    places[:3] = torch.randint(0, 1_000_000, (3, 3), generator=torch.Generator().manual_seed(step))
    return places


def loss_of(model: nn.Module, places: Tensor) -> Tensor:
    loss: Tensor = (model(places).float().view(-1) - (places.sum(1) % 3 - 1)).square().mean()
    return loss
