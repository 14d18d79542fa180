"""What the tests on the late device share: one training on the CPU or on the device, and the bits of its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import late
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import schemes
from gradwire.schemes import Scheme

N_STEPS = 4
CPU = torch.device("cpu")

# Every scheme of the registry, with what makes it work within few steps; and those whose options lead elsewhere.
SCHEMES: dict[str, Callable[[], Scheme]] = {
    **{
        name: lambda name=name: schemes.by_name(name, **schemes.as_published(name, {}))
        for name in schemes.names()
        if name not in ("aqgb", "gcomp", "slimgc") and not schemes.needs_momenta(name)
    },
    "gcomp": lambda: schemes.by_name("gcomp", refresh_every=3),
    "gcomp direct": lambda: schemes.by_name("gcomp", importance="none", topology="direct", chunk_elements=1_000),
    "homomorphic exact": lambda: schemes.by_name("homomorphic", mode="exact", integer_bits=64),
    "slimgc": lambda: schemes.by_name("slimgc", threshold_bytes=4_000),
    "slimgc gcomp": lambda: schemes.by_name("slimgc", codec="gcomp", importance="paper", threshold_bytes=4_000),
    "slimgc ring": lambda: schemes.by_name("slimgc", threshold_bytes=0, topology="all-reduce"),
    "slimgc backup": lambda: schemes.by_name("slimgc", threshold_bytes=0, backup=True, sync_steps=1),
    "one-bit-adam": lambda: schemes.by_name("one-bit-adam", freeze_step=2),
    # Its bits follow the clock, so its floor and its ceiling are one: 4 bits.
    "aqgb": lambda: schemes.by_name("aqgb", floor=0.125, ceiling=0.125),
}


class Place:
    """Where a training runs: the CPU, or the late device with its group and lateness."""

    def __init__(self, device: torch.device, group: Any = None) -> None:
        self.device, self.group = device, group

    def model(self, module: nn.Module, **options: Any) -> DistributedDataParallel:
        """With several buckets, which DDP rebuilds after the first step."""
        module = module.to(self.device)
        return DistributedDataParallel(module, **{"bucket_cap_mb": 0.01, "process_group": self.group, **options})


def begin(library: Path) -> tuple[Any, Place]:
    """In a rank: the device's functions, and the place to train on it."""
    functions = late.load(library)
    return functions, Place(torch.device("late", 0), dist.new_group(backend="like_nccl"))


def build_model(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 3))


def batch(rank: int, step: int, place: Place, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 20, generator=torch.Generator().manual_seed(1_000 * rank + step)).to(place.device, dtype)


def adamw(ddp: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(ddp.parameters(), lr=1e-3)


def attach(ddp: nn.Module, optimizer: torch.optim.Optimizer, scheme: Scheme, **options: Any) -> Any:
    return gradwire.attach(ddp, optimizer, scheme, timeout_s=30, **options)


def bits_of(ddp: nn.Module) -> Tensor:
    """(n,) float64 on the CPU: all parameters."""
    return torch.cat([parameter.detach().cpu().double().reshape(-1) for parameter in ddp.parameters()])


def train(rank: int, place: Place, scheme: Scheme, n_steps: int = N_STEPS) -> Tensor:
    ddp = place.model(build_model())
    optimizer = adamw(ddp)
    attachment = attach(ddp, optimizer, scheme)
    for step in range(n_steps):
        optimizer.zero_grad()
        (ddp(batch(rank, step, place)) - 1.0).square().mean().backward()
        optimizer.step()
    attachment.flush()
    attachment.close()
    return bits_of(ddp)
