"""one-bit-adam in float64, by one process that knows all ranks; and the small training they are of."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gradwire
from gradwire import schemes
from gradwire.schemes.frozen_adam import FLOOR_SHARE
from small_training import Training

LR, BETAS, EPS, DECAY, FREEZE, STEPS = 0.01, (0.9, 0.99), 1e-8, 0.1, 4, 10
Q = 64  # values to a scale


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 5))


def adamw_of(parameters: Any, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, LR, BETAS, EPS, DECAY, **options)


def adamw(module: nn.Module, **options: Any) -> torch.optim.AdamW:
    return adamw_of(module.parameters(), **options)


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1_000 * rank + step)
    return torch.randn(16, 20, generator=generator), torch.randn(16, 5, generator=generator)


def loss_of(module: nn.Module, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step)
    return (module(x) - y).square().mean()


def quantised(values: Tensor) -> Tensor:
    """(n,) float64: sign times mean magnitude, group by group, the mean rounded to bfloat16."""
    groups = values.split(Q)
    scales = [group.abs().mean().to(torch.float32).to(torch.bfloat16).double() for group in groups]
    return torch.cat([torch.where(group < 0, -scale, scale) for group, scale in zip(groups, scales, strict=True)])


def attach(ddp: Any, optimizer: Any, scaler: Any = None, **options: Any) -> Any:
    made = schemes.by_name("one-bit-adam", **{"freeze_step": FREEZE, **options})
    return gradwire.attach(ddp, optimizer, made, scaler)


def start(
    rank: int, adam: dict[str, Any] | None = None, ddp: Any = None, scaler: Any = None, **options: Any
) -> Training:
    """The training that is transcribed; `adam`, `ddp`: options of AdamW and of DDP, `options` those of the scheme."""
    made = schemes.by_name("one-bit-adam", **{"freeze_step": FREEZE, **options})
    ddp = {"bucket_cap_mb": 25, **(ddp or {})}
    return Training(rank, made, lambda p: adamw_of(p, **(adam or {})), model, loss_of, ddp, scaler=scaler)


def check(ours: list[Tensor], expected: list[Tensor]) -> list[Tensor]:
    """Returns a rank's parameters, which are those of a transcription."""
    for mine, wanted in zip(ours, expected, strict=True):
        # A value at the very edge between two codes may fall to the other side; its error is fed back.
        close = torch.isclose(mine.double(), wanted, rtol=1e-4, atol=1e-5)
        assert close.float().mean() > 0.98, (mine.double() - wanted).abs().max()
    return ours


def as_set(step: int, name: str) -> tuple[float, float]:
    """Learning rate and weight decay of a parameter in a step."""
    return LR, DECAY


class OneBit:
    """Momenta, one tensor a message, pushed and pulled by hand.

    Every tensor is cut where the ranks' parts and chunks are; with two ranks and one bucket that is its middle.
    """

    def __init__(self, n_ranks: int, starts: list[int], total: int) -> None:
        self.starts, self.residuals = starts, [torch.zeros(total, dtype=torch.float64) for _ in range(n_ranks)]
        self.parts = [(total * rank // n_ranks, total * (rank + 1) // n_ranks) for rank in range(n_ranks)]

    def __call__(self, m: Tensor, gradients: list[Tensor], root: Tensor) -> tuple[Tensor, Tensor]:
        own = [BETAS[0] * m + (1 - BETAS[0]) * gradient for gradient in gradients]
        new, residuals = torch.empty_like(m), self.residuals
        for owner, (first, last) in enumerate(self.parts):
            summed = own[owner][first:last].clone()
            for rank in range(len(own)):
                if rank != owner:
                    term = own[rank][first:last] + residuals[rank][first:last]
                    sent = self.through_codec(term, first, last)
                    residuals[rank][first:last] = term - sent
                    summed += sent
            term = summed + residuals[owner][first:last]
            sent = self.through_codec(term, first, last)
            residuals[owner][first:last] = term - sent
            new[first:last] = sent / len(own)
        return new, new

    def through_codec(self, values: Tensor, first: int, last: int) -> Tensor:
        cuts = [first, *(start for start in self.starts if first < start < last), last]
        return torch.cat([quantised(values[a - first : b - first]) for a, b in itertools.pairwise(cuts)])


def transcribed(
    n_ranks: int,
    rates: Callable[[int, str], tuple[float, float]] = as_set,
) -> list[Tensor]:
    """The parameters after every rank's training, in float64."""
    module = model().double()
    names = [name for name, _ in module.named_parameters()][::-1]  # as DDP's one bucket holds them
    parameters = dict(module.named_parameters())
    sizes = [parameters[name].numel() for name in names]
    total, starts = sum(sizes), [sum(sizes[:i]) for i in range(len(sizes))]
    m, v = torch.zeros(total, dtype=torch.float64), torch.zeros(total, dtype=torch.float64)
    exchange = OneBit(n_ranks, starts, total)
    spans = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]

    for step in range(STEPS):
        gradients = []
        for rank in range(n_ranks):
            module.zero_grad()
            x, y = (one.double() for one in batch(rank, step))
            (module(x) - y).square().mean().backward()
            gradients.append(torch.cat([parameters[name].grad.reshape(-1) for name in names]))
        if step < FREEZE:
            mean = torch.stack(gradients).mean(0)
            m, v = BETAS[0] * m + (1 - BETAS[0]) * mean, BETAS[1] * v + (1 - BETAS[1]) * mean.square()
            taken, root = m, v.sqrt()
        else:
            root = torch.cat([_floored(v[span]).sqrt() for span in spans])
            m, taken = exchange(m, gradients, root)
        corrected = root / (1 - BETAS[1] ** min(step + 1, FREEZE)) ** 0.5 + EPS
        update = taken / (1 - BETAS[0] ** (step + 1)) / corrected
        for name, span in zip(names, spans, strict=True):
            with torch.no_grad():
                rate, decay = rates(step, name)
                parameters[name].view(-1).mul_(1 - rate * decay).sub_(rate * update[span])
    return [parameter.detach() for parameter in module.parameters()]


def _floored(variance: Tensor) -> Tensor:
    largest = float(variance.max())
    return torch.where(variance == 0, largest, variance.clamp(min=FLOOR_SHARE * largest))
