"""homomorphic in training that it is made for: nothing goes plainly, and what comes back are the ranks' exact sums."""

from __future__ import annotations

import contextlib
import copy
import itertools
from typing import Any

import pytest
import torch
from sparse_models import MODELS, N_STEPS, batch, build, loss_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import schemes
from ranks import agree, on_ranks
from sketches import DTYPES, EPSILON, SMALLEST, check_mean

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


def check_values(mode: str, mean: Tensor, shares: Tensor) -> None:
    check_mean(MODES[mode], False, mean, shares)
    expected = shares.double().mean(0)
    if mode == "packed" and len(shares) == 2:  # two values have but one order of summation: DDP's bits
        assert torch.equal(mean, shares[0] * 0.5 + shares[1] * 0.5)
    if mode == "sketch" and len(shares) > 1:
        error = (mean.double() - expected).abs() - EPSILON[mean.dtype] * expected.abs() - SMALLEST[mean.dtype]
        assert float(error.clamp(min=0).norm()) <= 2e-6 * float(expected.norm())
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
            check_values(mode, mean, torch.stack(shares))
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


FEATURES: dict[str, dict[str, bool]] = {
    "views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
    "accumulated": {},
    "clipped": {},
    "autocast": {},
    "masked": {},
}


def take_step(feature: str, ddp: DistributedDataParallel, optimizer: Any, rank: int, step: int) -> None:
    """Where losses are masked, rank 1's is in every second step, and all ranks' in the last one."""
    is_masked = feature == "masked" and (step == N_STEPS - 1 or (rank == 1 and step % 2 == 1))
    n_parts = 2 if feature == "accumulated" else 1
    optimizer.zero_grad()
    for part in range(n_parts):
        with ddp.no_sync() if part < n_parts - 1 else contextlib.nullcontext():
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=feature == "autocast"):
                loss = loss_of(ddp, batch(rank, n_parts * step + part))
            (loss * (0.0 if is_masked else 1.0)).backward()
    if feature == "clipped":
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
    optimizer.step()


# By SGD, whose step is in proportion to the error: of the largest parameter. Two ranks' packed sums are DDP's own.
TOLERANCES = {"packed": 0.0, "sketch": 1e-6, "exact 32": 1e-7, "exact 64": 1e-7}


@pytest.mark.parametrize("feature", FEATURES)
@on_ranks(2, timeout_s=120)
def test_features_of_ddp_with_sparse_models_train_as_ddp_does(rank: int, world_size: int, feature: str) -> None:
    for name in MODELS:
        results: dict[str, Tensor] = {}
        for mode in ("ddp", *MODES):
            ddp = DistributedDataParallel(build(name), **FEATURES[feature])
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3)
            attachment = None
            if mode != "ddp":
                attachment = gradwire.attach(ddp, optimizer, schemes.by_name("homomorphic", **MODES[mode]))
            for step in range(2 * N_STEPS):
                take_step(feature, ddp, optimizer, rank, step % N_STEPS)
            if attachment is not None:
                stats = attachment.stats()
                attachment.close()
                assert stats["n_buckets_too_dense"] == stats["n_steps_not_finite"] == 0, (name, mode)
                assert 0 < stats["ratio"] < 0.5, (name, mode, stats["ratio"])
            results[mode] = torch.cat([parameter.detach().view(-1) for parameter in ddp.parameters()])
            assert agree(results[mode]), (name, mode)
            deviation = float((results[mode] - results["ddp"]).abs().max())
            assert deviation <= TOLERANCES.get(mode, 0.0) * float(results["ddp"].abs().max()), (name, mode, deviation)
