"""homomorphic in training that it is made for: nothing goes plainly, and what comes back are the ranks' exact sums."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sparse_models import MODELS, N_STEPS, batch, build, loss_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import schemes
from gradwire.codecs.count_sketch import FixedPoint
from ranks import agree, on_ranks
from sketches import quantise

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}
MODES: dict[str, dict[str, Any]] = {
    "packed": {},
    "sketch": {"mode": "sketch"},
    "exact 32": {"mode": "exact"},
    "exact 64": {"mode": "exact", "integer_bits": 64},
}
HEADER_BYTES = 48


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])


def shares_of(model: nn.Module, world_size: int, step: int) -> list[Tensor]:
    """Every rank's own gradient, (n,) each, made here: the same code on the same batch."""
    shares = []
    for rank in range(world_size):
        alone = copy.deepcopy(model)
        alone.zero_grad()
        loss_of(alone, batch(rank, step)).backward()
        shares.append(flat_gradient(alone))
    return shares


def check_mean(mode: str, mean: Tensor, shares: list[Tensor]) -> None:
    """Against integers where integers are summed, else against float64."""
    world_size, dtype = len(shares), mean.dtype
    exact = torch.stack(shares).double()
    expected, summed = exact.mean(0), exact.abs().sum(0) / world_size
    if world_size == 1:
        assert torch.equal(mean, shares[0])
    elif mode.startswith("exact"):
        bits = torch.int32 if mode == "exact 32" else torch.int64
        fixed = FixedPoint.fit(math.frexp(float(exact.abs().max()))[1], world_size, bits)
        total = torch.stack([quantise(share, fixed) for share in shares]).sum(0)
        assert torch.equal(mean, (total.double() * (fixed.scale / world_size)).float().to(dtype))
    elif mode == "packed":
        if world_size == 2:  # two values have but one order of summation: DDP's bits
            assert torch.equal(mean, shares[0] * 0.5 + shares[1] * 0.5)
        bound = 2 * world_size * (EPSILON[dtype] * summed + SMALLEST[dtype])
        assert bool(((mean.double() - expected).abs() <= bound).all())
    else:
        error = (mean.double() - expected).abs() - EPSILON[dtype] * expected.abs() - SMALLEST[dtype]
        assert float(error.clamp(min=0).norm()) <= 2e-6 * float(expected.norm())
        # A value may lose digits to its cell-mates, but not more than they and the ranks' rounding make.
        assert float(error.max()) <= 2.0**-16 * float(exact.abs().amax(1).sum())
    assert not bool(mean[(exact == 0).all(0)].any())
    assert torch.equal(mean == 0, expected == 0) or float(expected.abs()[expected != 0].min()) < 1e-6


def check_bytes(mode: str, index: str, gradient: Tensor, n_nonzeros: int, n_bytes: int, world_size: int) -> None:
    """What a ring of index and values, or of index and sketch, sends: so neither was replaced by the gradient itself."""
    n, n_sent = gradient.numel(), n_bytes * world_size / (2 * (world_size - 1))
    if mode == "packed":
        cell_bytes, least, most = gradient.element_size(), 1.0, 1.0
    else:  # tables are of whole rows
        cell_bytes, least, most = 8 if mode == "exact 64" else 4, 1.3, 1.5
    if index == "bitmap":
        n_index = HEADER_BYTES + 4 * -(-n // 32)
        assert n_index + least * cell_bytes * n_nonzeros - 16 <= n_sent
        assert n_sent <= n_index + most * cell_bytes * n_nonzeros + 16 * world_size + 64 * cell_bytes
    else:  # a filter lets some zeros through, and one that was made for another step may be followed by a bitmap
        assert least * cell_bytes * n_nonzeros < n_sent < 0.75 * n * gradient.element_size()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
@on_ranks(timeout_s=200)
def test_sparse_gradients_are_sent_compressed_and_summed_exactly(rank: int, world_size: int, name: str) -> None:
    for (mode, options), dtype, index in itertools.product(MODES.items(), DTYPES, ("bitmap", "auto")):
        model = build(name, dtype)
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        attachment = gradwire.attach(ddp, optimizer, schemes.by_name("homomorphic", index=index, **options))
        for step in range(N_STEPS):
            shares = shares_of(model, world_size, step)
            optimizer.zero_grad()
            loss_of(ddp, batch(rank, step)).backward()
            mean = flat_gradient(model)
            assert agree(mean), (mode, dtype, index)
            check_mean(mode, mean, shares)
            (record,) = (bucket for bucket in attachment.recorder.last_buckets if bucket.bucket >= 0)
            if world_size > 1:
                n_nonzeros = int((torch.stack(shares) != 0).any(0).sum())
                check_bytes(mode, index, mean, n_nonzeros, record.bytes_sent, world_size)
            optimizer.step()
        stats = attachment.stats()
        attachment.close()
        assert stats["n_buckets_too_dense"] == stats["n_steps_not_finite"] == stats["n_sketches_resent"] == 0
        assert stats["n_fallbacks"] == stats["n_bloom_fallbacks"]


# ---- DDP's features


def step_plainly(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    loss_of(ddp, batch(rank, step)).backward()
    optimizer.step()


def accumulate(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    for part in range(2):
        with ddp.no_sync() if part == 0 else contextlib.nullcontext():
            loss_of(ddp, batch(rank, 2 * step + part)).backward()
    optimizer.step()


def clip(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    loss_of(ddp, batch(rank, step)).backward()
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
    optimizer.step()


def cast(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(ddp, batch(rank, step))
    loss.backward()
    optimizer.step()


def skip_loss(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """Rank 1 masks its loss in every second step; in the last one all ranks do."""
    is_masked = step == N_STEPS - 1 or (rank == 1 and step % 2 == 1)
    optimizer.zero_grad()
    (loss_of(ddp, batch(rank, step)) * (0.0 if is_masked else 1.0)).backward()
    optimizer.step()


Step = Callable[[DistributedDataParallel, torch.optim.Optimizer, int, int], None]
FEATURES: dict[str, tuple[dict[str, bool], Step]] = {
    "views": ({"gradient_as_bucket_view": True}, step_plainly),
    "static graph": ({"static_graph": True}, step_plainly),
    "unused": ({"find_unused_parameters": True}, step_plainly),
    "accumulated": ({}, accumulate),
    "clipped": ({}, clip),
    "autocast": ({}, cast),
    "masked": ({}, skip_loss),
}
# By SGD, whose step is in proportion to the error: of the largest parameter. Two ranks' packed sums are DDP's own.
TOLERANCES = {"packed": 0.0, "sketch": 1e-6, "exact 32": 1e-7, "exact 64": 1e-7}


@pytest.mark.parametrize("feature", FEATURES)
@on_ranks(2, timeout_s=120)
def test_features_of_ddp_with_sparse_models_train_as_ddp_does(rank: int, world_size: int, feature: str) -> None:
    options, take_step = FEATURES[feature]
    for name in MODELS:
        results: dict[str, Tensor] = {}
        for mode in ("ddp", *MODES):
            ddp = DistributedDataParallel(build(name), **options)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3)
            attachment = None
            if mode != "ddp":
                attachment = gradwire.attach(ddp, optimizer, schemes.by_name("homomorphic", **MODES[mode]))
            for step in range(2 * N_STEPS):
                take_step(ddp, optimizer, rank, step % N_STEPS)
            if attachment is not None:
                stats = attachment.stats()
                attachment.close()
                assert stats["n_buckets_too_dense"] == stats["n_steps_not_finite"] == 0, (name, mode)
                assert 0 < stats["ratio"] < 0.5, (name, mode, stats["ratio"])
            results[mode] = torch.cat([parameter.detach().view(-1) for parameter in ddp.parameters()])
            assert agree(results[mode]), (name, mode)
            deviation = float((results[mode] - results["ddp"]).abs().max())
            assert deviation <= TOLERANCES.get(mode, 0.0) * float(results["ddp"].abs().max()), (name, mode, deviation)
