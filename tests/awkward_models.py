"""Small models with what makes them awkward to DDP: branches, ties, odd parameters, several dtypes, layers that run twice."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def build_model(seed: int = 1) -> nn.Sequential:
    """The one that is not awkward."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 3))


class Branches(nn.Module):
    """`left` or `right` by the batch, so by rank and step; `spare` is never used; one parameter has another memory order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.trunk, self.left, self.right, self.spare = (nn.Linear(20, 20) for _ in range(4))
        self.turned = nn.Parameter(torch.randn(20, 9).t())
        self.empty = nn.Parameter(torch.empty(0, 7))

    def forward(self, batch: Tensor) -> Tensor:
        branch = self.left if float(batch[0, 0]) > 0 else self.right
        return branch(self.trunk(batch).relu()) @ self.turned.t() + self.empty.sum()


class Oddments(nn.Module):
    """Parameters of size 0, a frozen one, a tied one, and one in another memory order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 20)
        self.second.weight = self.first.weight
        self.empty = nn.Parameter(torch.empty(0, 7))
        self.nothing = nn.Parameter(torch.empty(0))
        self.frozen = nn.Parameter(torch.ones(20), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(20, 9).t())

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.second(self.first(batch).relu()) * self.frozen
        return hidden @ self.turned.t() + self.empty.sum() + self.nothing.sum()


class Recomputed(nn.Module):
    """The hidden layers run again in the backward pass, in a backward pass of their own (re-entrant)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = build_model()

    def forward(self, batch: Tensor) -> Tensor:
        return self.layers[4](checkpoint(self.layers[1:4], self.layers[0](batch), use_reentrant=True))


class Mixed(nn.Module):
    """Three dtypes in one model: DDP makes buckets for each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.wide, self.short, self.narrow = nn.Linear(20, 20), nn.Linear(20, 20).bfloat16(), nn.Linear(20, 20).half()

    def forward(self, batch: Tensor) -> Tensor:
        return self.narrow(self.short(self.wide(batch).bfloat16()).relu().half()).float()
