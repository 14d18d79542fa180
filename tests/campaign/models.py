"""Models, gradients and optimizers for drawn trainings; gradients at the ends of their ranges too."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from awkward_models import Branches, Oddments, Recomputed, build_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHAPES = [(64, 48), (48,), (3, 7, 5), (1,), (128, 33), (256,), (0, 4), (17,)]


def _places(values: Tensor) -> Tensor:
    return torch.arange(values.numel()).view(values.shape)


# (values ~ N(0, 1), generator, largest, smallest normal, rank, world size) -> a rank's gradient
_PATTERNS: dict[str, Callable[..., Tensor]] = {
    "normal": lambda v, *_: v,
    "constant": lambda v, *_: torch.full_like(v, 0.125),
    "zero": lambda v, *_: torch.zeros_like(v),
    "tiny": lambda v, g, big, small, *_: v * small * 4,
    "huge": lambda v, g, big, small, rank, world: v.clamp(-3, 3) * (big / 4 / world),
    "huge sums": lambda v, g, big, *_: v.sign() * (big * 0.6),
    "cancelling": lambda v, g, big, small, rank, world: v * (1 if rank == 0 else -1 / (world - 1)) if world > 1 else v,
    "one-hot": lambda v, *_: (_places(v) == v.numel() // 3).to(v.dtype),
    "sparse": lambda v, g, *_: v * (torch.rand(v.shape, generator=g) < 0.02),
    "aligned": lambda v, *_: torch.where(_places(v) % 16 == 0, v, 0.0),
    "heavy": lambda v, *_: v**5,
    "one rank only": lambda v, g, big, small, rank, world: v if rank == world - 1 else torch.zeros_like(v),
}
SHARED = ("cancelling", "equal", "huge sums")  # all ranks draw the same values
PATTERNS = [*_PATTERNS, "equal", "scales"]


def gradients_for(pattern: str, dtype: torch.dtype, rank: int, world_size: int, step: int) -> list[Tensor]:
    """One gradient a shape, the same for the same arguments."""
    seed = 7_919 * step + (0 if pattern in SHARED else 104_729 * (rank + 1))
    draw = torch.Generator().manual_seed(seed)
    limits = torch.finfo(dtype)
    out = []
    for index, shape in enumerate(SHAPES):
        values = torch.randn(shape, generator=draw).double()
        if pattern == "scales":
            values = values * 10.0 ** (-4 + index)
        elif pattern != "equal":
            values = _PATTERNS[pattern](values, draw, limits.max, limits.tiny, rank, world_size)
        out.append(values.to(dtype))
    return out


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3)).to(
            memory_format=torch.channels_last
        )
        self.head = nn.Linear(6, 3)

    def forward(self, batch: Tensor) -> Tensor:
        images = batch.repeat(1, 10)[:, : 3 * 8 * 8].view(-1, 3, 8, 8).contiguous(memory_format=torch.channels_last)
        return self.head(self.body(images).mean((2, 3)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.TransformerEncoderLayer(20, 2, 40, dropout=0.0, batch_first=True)
        self.head = nn.Linear(20, 4)

    def forward(self, batch: Tensor) -> Tensor:
        return self.head(self.mix(batch[:, None, :].expand(-1, 3, -1)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": build_model,
    "branches": Branches,
    "oddments": Oddments,
    "recomputed": Recomputed,
    "convolutions": Convolutions,
    "attention": Attention,
}


def batch_for(rank: int, step: int) -> Tensor:
    return torch.randn(4, 20, generator=torch.Generator().manual_seed(1_000 * rank + step))


def take_step(model: nn.Module, batch: Tensor, *optimizers: torch.optim.Optimizer, factor: float = 1.0) -> None:
    """Of every optimizer, by the gradients of the loss times `factor`."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    ((model(batch) - 1).square().mean() * factor).backward()
    for optimizer in optimizers:
        optimizer.step()


def nudge(parameter: Tensor) -> None:
    """The least change: the first value becomes its neighbour."""
    first = parameter.detach().view(-1)[:1]
    first.copy_(torch.nextafter(first, first + 1))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "foreach adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def rounding_of(gradients: list[Tensor], dtype: torch.dtype) -> Tensor:
    """(n,) float64: how far a sum of the ranks' values in `dtype` may be from their mean in float64.

    `gradients`: every rank's, flat. A sum in any order errs by (N - 1) eps of the magnitudes; scaling and the last
    rounding add one each. Subnormals may be lost, as the formats say.
    """
    limits = torch.finfo(dtype)
    magnitudes = torch.stack(gradients).double().abs().sum(0) / len(gradients)
    return (len(gradients) + 2) * limits.eps * magnitudes + 2 * limits.tiny * math.sqrt(len(gradients))
