"""What the tests of DDP's features share: a small model, batches that differ by rank, and one run per scheme."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from reducing_cases import REDUCING
from torch import Tensor, nn

from awkward_models import build_model
from gradwire import schemes
from gradwire.schemes import Scheme
from ranks import agree
from small_training import Loss, MakeOptimizer, Training, adamw, from_one

N_STEPS = 5
ONE_BIT = "one-bit:warmup_steps=0"

# Schemes that take the optimizer's step themselves have tests of their own (tests/stepping, tests/broadcast): what
# scripts may do to `.grad` is not the same there. Here is every other one, and the lossless gcomp; tables are refreshed
# within the few steps of a test.
SCHEMES: dict[str, Callable[[], Scheme]] = {
    **{name: lambda name=name: schemes.by_name(name, **schemes.as_published(name, {})) for name in REDUCING},
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
    **dict.fromkeys(("zlib", "zstd", "gcomp none", "gcomp direct"), 1e-6),
    "gcomp": 1e-5,
    "homomorphic": 1e-6,  # packed: the backend's sum, in another order
    "homomorphic exact": 1e-6,  # float sketches lose digits of small values, which AdamW divides by their own size
}

Case = Callable[[int, Scheme | None], Tensor]
sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def start(
    rank: int,
    scheme: Any = None,
    model: Callable[[], nn.Module] = build_model,
    optimizer: MakeOptimizer = adamw,
    loss: Loss = from_one,
    scaler: Any = None,
    **ddp: Any,
) -> Training:
    """With a scheme or DDP alone, in several buckets, which DDP rebuilds after the first step; `ddp` are its options."""
    return Training(rank, scheme, optimizer, model, loss, {"bucket_cap_mb": 0.01, **ddp}, timeout_s=100, scaler=scaler)


def finish(training: Training) -> Tensor:
    """(n,) float64: all parameters. Every attachment must have seen steps, lost none, and close."""
    if training.attachment is not None:
        stats = training.close()
        assert stats["n_steps"] == training.attachment.step > 0
        assert stats["bytes_sent"] > 0
    return training.flat().double()


def check_case(rank: int, case: Case, tolerance: float = 1.0) -> None:
    """Run `case` with DDP alone, then with every scheme: ranks agree, and no scheme is farther off than it may be.
    `tolerance`: factor on TOLERANCE, for dtypes coarser than float32."""
    expected = case(rank, None)
    assert agree(expected)
    for name, make in SCHEMES.items():
        found = case(rank, make())
        assert bool(found.isfinite().all()), name
        assert name == "periodic" or agree(found), f"{name}: ranks differ"
        deviation = float((found - expected).abs().max()) if found.numel() else 0.0
        assert deviation <= TOLERANCE.get(name, math.inf) * tolerance, f"{name}: off by {deviation}"
