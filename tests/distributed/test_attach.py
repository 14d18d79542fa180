"""attach(): two lines in a script, and training goes on as DDP alone would do it."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from ranks import run_ranks


def build_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 3))


def train(rank: int, scheme: str | None, n_steps: int = 4) -> list[torch.Tensor]:
    ddp = DistributedDataParallel(build_model(), bucket_cap_mb=0.2)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    attachment = gradwire.attach(ddp, optimizer, scheme) if scheme else None
    generator = torch.Generator().manual_seed(rank)
    for _ in range(n_steps):
        optimizer.zero_grad()
        ddp(torch.randn(8, 20, generator=generator)).square().mean().backward()
        optimizer.step()
    if attachment:
        stats = attachment.stats()
        assert stats["scheme"] == scheme
        attachment.close()
    return [parameter.detach().clone() for parameter in ddp.parameters()]


def plain_against_ddp(rank: int, world_size: int) -> bool:
    return all(torch.equal(a, b) for a, b in zip(train(rank, None), train(rank, "plain"), strict=True))


def test_plain_gives_the_bits_of_ddp_without_a_hook() -> None:
    for world_size in (1, 2, 3):
        assert all(run_ranks(plain_against_ddp, world_size))
