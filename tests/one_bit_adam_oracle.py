"""one-bit-adam in float64, by one process that knows all ranks; and the small training that it is of."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gradwire
from gradwire import schemes
from gradwire.schemes.frozen_adam import FLOOR_SHARE

LR, BETAS, EPS, DECAY, FREEZE, STEPS = 0.01, (0.9, 0.99), 1e-8, 0.1, 4, 10
Q = 64  # values to a scale


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 5))


def adamw(module: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), LR, BETAS, EPS, DECAY, **options)


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
    scheme = schemes.by_name("one-bit-adam", **{"freeze_step": FREEZE, **options})
    return gradwire.attach(ddp, optimizer, scheme, scaler)


def as_set(step: int, name: str) -> tuple[float, float]:
    """Learning rate and weight decay of a parameter in a step."""
    return LR, DECAY


def transcribed(n_ranks: int, rates: Callable[[int, str], tuple[float, float]] = as_set) -> list[Tensor]:
    """The parameters after every rank's training, in float64, one tensor a message: pushed and pulled by hand.

    Every tensor is cut where the ranks' parts and chunks are; with two ranks and one bucket that is its middle.
    """
    module = model().double()
    names = [name for name, _ in module.named_parameters()][::-1]  # as DDP's one bucket holds them
    parameters = dict(module.named_parameters())
    sizes = [parameters[name].numel() for name in names]
    total, starts = sum(sizes), [sum(sizes[:i]) for i in range(len(sizes))]
    m, v = torch.zeros(total, dtype=torch.float64), torch.zeros(total, dtype=torch.float64)
    residuals = [torch.zeros(total, dtype=torch.float64) for _ in range(n_ranks)]
    parts = [(total * rank // n_ranks, total * (rank + 1) // n_ranks) for rank in range(n_ranks)]

    def through_codec(values: Tensor, first: int, last: int) -> Tensor:
        cuts = [first, *(start for start in starts if first < start < last), last]
        return torch.cat([quantised(values[a - first : b - first]) for a, b in itertools.pairwise(cuts)])

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
        else:
            own = [BETAS[0] * m + (1 - BETAS[0]) * gradient for gradient in gradients]
            new = torch.empty_like(m)
            for owner, (first, last) in enumerate(parts):
                summed = own[owner][first:last].clone()
                for rank in range(n_ranks):
                    if rank != owner:
                        term = own[rank][first:last] + residuals[rank][first:last]
                        sent = through_codec(term, first, last)
                        residuals[rank][first:last] = term - sent
                        summed += sent
                term = summed + residuals[owner][first:last]
                sent = through_codec(term, first, last)
                residuals[owner][first:last] = term - sent
                new[first:last] = sent / n_ranks
            m = new
        for name, start, size in zip(names, starts, sizes, strict=True):
            mine = slice(start, start + size)
            seen = min(step + 1, FREEZE)
            variance = v[mine]
            if step >= FREEZE:
                largest = float(variance.max())
                variance = torch.where(variance == 0, largest, variance.clamp(min=FLOOR_SHARE * largest))
            root = (variance / (1 - BETAS[1] ** seen)).sqrt() + EPS
            update = m[mine] / (1 - BETAS[0] ** (step + 1)) / root
            with torch.no_grad():
                flat = parameters[name].view(-1)
                rate, decay = rates(step, name)
                flat.mul_(1 - rate * decay).sub_(rate * update)
    return [parameter.detach() for parameter in module.parameters()]
