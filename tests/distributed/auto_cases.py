"""A model, its steps, and an `auto` with clocks of its own, for auto's tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.schemes.auto.scheme import Auto


def build(rank: int, **options: Any) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 3))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.2, **options)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)


def step_once(ddp: nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
    optimizer.zero_grad()
    ddp(torch.randn(8, 20, generator=generator)).square().mean().backward()
    optimizer.step()


def flat(ddp: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in ddp.parameters()])


def train(rank: int, n_steps: int, scheme: Any = None, **options: Any) -> tuple[torch.Tensor, dict[str, Any], bool]:
    ddp, optimizer = build(rank, **options)
    attachment = gradwire.attach(ddp, optimizer, scheme) if scheme is not None else None
    generator = torch.Generator().manual_seed(rank)
    for _ in range(n_steps):
        step_once(ddp, optimizer, generator)
    stats = attachment.stats() if attachment else {}
    if attachment:
        attachment.close()
    return flat(ddp), stats, bool(ddp._comm_hooks)


class Quick(Auto):
    """Believes every scheme to be twice as fast as plain, and sees clocks of its own: to see the law at work."""

    def __init__(self, seed: int, gains: dict[str, float], noise: float = 0.1, **options: Any) -> None:
        super().__init__(**options)
        self.generator, self.gains, self.noise = torch.Generator().manual_seed(seed), gains, noise

    def end_watched_step(self, step: int, took_ns: int, waited_ns: int) -> None:
        noise = 1 + self.noise * float(torch.randn((), generator=self.generator))
        took_us = 100_000 / self.gains.get(self.active, 1.0) * max(0.2, noise)
        super().end_watched_step(step, int(1000 * took_us), int(800 * took_us))

    def _predict(self, computing_us: int) -> dict[str, int]:
        return {row.spec: 100_000 if row.spec == "plain" else 50_000 for row in self._rows}
