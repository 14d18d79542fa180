"""What the tests of DDP's features share: a small model, batches that differ by rank, and one run per scheme."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import schemes
from gradwire.schemes import Scheme
from ranks import agree

N_STEPS = 5
ONE_BIT = "one-bit:warmup_steps=0"

# Schemes that take the optimizer's step themselves have tests of their own (tests/stepping, tests/broadcast): what
# scripts may do to `.grad` is not the same there.
STEP_OWNERS = ("aqgb", "broadcast")
# Every other scheme of the registry, and the lossless gcomp; tables are refreshed within the few steps of a test.
SCHEMES: dict[str, Callable[[], Scheme]] = {
    **{
        name: lambda name=name: schemes.by_name(name, **schemes.as_published(name, {}))
        for name in schemes.names()
        if name not in ("auto", "gcomp", "periodic", *STEP_OWNERS) and not schemes.needs_momenta(name)
    },
    # Every step through a hook of its own, from the first step on; what it decides is test_auto.py's matter.
    "auto": lambda: schemes.by_name(
        "auto", fidelity=["bf16", ONE_BIT], replay=[(0, "bf16"), (2, ONE_BIT), (3, "bf16")]
    ),
    "truncate": lambda: schemes.by_name("truncate", bits=5),  # fits bfloat16 too, whose mantissa has 7
    "gcomp": lambda: schemes.by_name("gcomp", refresh_every=3),
    "gcomp none": lambda: schemes.by_name("gcomp", importance="none"),
    "gcomp direct": lambda: schemes.by_name("gcomp", importance="none", topology="direct", chunk_elements=1_000),
    "homomorphic exact": lambda: schemes.by_name("homomorphic", mode="exact", integer_bits=64),
    "periodic": lambda: schemes.by_name("periodic", every=2),
}
# How far a scheme may be from plain DDP: `plain` has its bits; a lossless ring sums in another order; gcomp drops what
# the optimizer's addition would lose, `truncate` far more.
TOLERANCE = {
    "plain": 0.0,
    "zlib": 1e-6,
    "zstd": 1e-6,
    "gcomp none": 1e-6,
    "gcomp direct": 1e-6,
    "gcomp": 1e-5,
    "homomorphic": 1e-6,  # packed: the backend's sum, in another order
    "homomorphic exact": 1e-6,  # float sketches lose digits of small values, which AdamW divides by their own size
}

Case = Callable[[int, Scheme | None], Tensor]


def build_model(seed: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 3))


def wrap(model: nn.Module, **options: Any) -> DistributedDataParallel:
    """A DDP model with several buckets, which DDP rebuilds after the first step."""
    return DistributedDataParallel(model, **{"bucket_cap_mb": 0.01, **options})


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batches(rank: int, n_steps: int = N_STEPS, width: int = 20) -> Iterator[Tensor]:
    for step in range(n_steps):
        yield torch.randn(4, width, generator=torch.Generator().manual_seed(1_000 * rank + step))


def attach(ddp: nn.Module, optimizer: torch.optim.Optimizer, scheme: Scheme | None, **options: Any) -> Any:
    """The attachment, or None for the run of DDP alone."""
    return gradwire.attach(ddp, optimizer, scheme, timeout_s=100, **options) if scheme else None


def take_step(ddp: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, goal: float = 1.0) -> None:
    optimizer.zero_grad()
    (ddp(batch).float() - goal).square().mean().backward()
    optimizer.step()


def finish(ddp: nn.Module, attachment: Any) -> Tensor:
    """(n,) float64: all parameters. Every attachment must have seen steps, lost none, and close."""
    if attachment is not None:
        stats = attachment.stats()
        assert stats["n_steps"] == attachment.step > 0
        assert stats["bytes_sent"] > 0
        attachment.close()
    return torch.cat([parameter.detach().double().reshape(-1) for parameter in ddp.parameters()])


def train(
    rank: int,
    scheme: Scheme | None,
    ddp: Any,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    step: Callable[[Any, torch.optim.Optimizer, Tensor], None] = take_step,
    look_at: Callable[[Any], None] = lambda attachment: None,
    **options: Any,
) -> Tensor:
    """All parameters after N_STEPS steps, before whose end `look_at` sees the attachment; `options` are its own."""
    made = optimizer(ddp)
    attachment = attach(ddp, made, scheme, **options)
    for batch in batches(rank):
        step(ddp, made, batch)
    if attachment is not None:
        look_at(attachment)
    return finish(ddp, attachment)


def check_case(rank: int, world_size: int, case: Case, tolerance: float = 1.0) -> None:
    """Run `case` with DDP alone, then with every scheme: ranks agree, and no scheme is farther off than it may be.

    `tolerance`: factor on TOLERANCE, for dtypes coarser than float32.
    """
    expected = case(rank, None)
    assert agree(expected)
    for name, make in SCHEMES.items():
        found = case(rank, make())
        assert bool(found.isfinite().all()), name
        assert name == "periodic" or agree(found), f"{name}: ranks differ"
        deviation = float((found - expected).abs().max()) if found.numel() else 0.0
        assert deviation <= TOLERANCE.get(name, math.inf) * tolerance, f"{name}: off by {deviation}"
