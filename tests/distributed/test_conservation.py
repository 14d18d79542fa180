"""What is sent and what is left is what was given and what had been left: on the average over the ranks, in every step."""

from typing import Any

import pytest
import torch

from buckets import Driver, flat, gradients_of, mean_over_ranks
from gradwire import schemes
from ranks import on_ranks

SHAPES = [(40, 300), (7,), (70, 11), (0, 5), (), (10, 4, 3, 3), (1, 9), (30_000,)]
LAYOUT = [3, 5]
LOW_RANK = {"rank": 3, "min_compression_rate": 0}
IN_BFLOAT16 = {**LOW_RANK, "factor_dtype": "bfloat16"}
# Scheme, options, how far off the balance may be, and the dtype of the gradients.
CASES: list[tuple[str, dict[str, Any], float, torch.dtype]] = [
    ("one-bit", {}, 1e-5, torch.float32),
    ("one-bit", {"scale": "two-means", "pull": "raw"}, 1e-5, torch.float32),
    ("one-bit", {"scale": "fixed", "chunk_elements": 64}, 1e-5, torch.float32),
    ("two-bit", {"chunk_elements": 100}, 1e-5, torch.float32),
    ("two-bit", {"threshold": 1.0, "relative": False, "pull": "raw"}, 1e-5, torch.float32),
    ("thc", {}, 1e-5, torch.float32),
    ("top-k", {"share": 0.05}, 1e-5, torch.float32),
    *((name, {}, 0.02, torch.bfloat16) for name in ("one-bit", "two-bit", "thc")),
    ("top-k", {"share": 0.05}, 0.02, torch.bfloat16),
    *((name, LOW_RANK, 5e-5, torch.float32) for name in ("acp-sgd", "power-sgd", "power-sgd-overlap")),
    # Gloo rounds the sums of bfloat16 factors themselves, once a hop: 2^-8 each of what is sent. A power error is relative
    # to the aggregate as it is, rounded sums included.
    ("acp-sgd", IN_BFLOAT16, 5e-2, torch.float32),
    *((name, IN_BFLOAT16, 5e-5, torch.float32) for name in ("power-sgd", "power-sgd-overlap")),
    ("homomorphic", {"sparsifier": "top-k", "density": 0.05}, 2e-5, torch.float32),
    ("homomorphic", {"mode": "lossy", "budget": 0.05, "error_feedback": True}, 2e-5, torch.float32),
    ("homomorphic", {"integer_bits": 16}, 2e-5, torch.float32),
    ("homomorphic", {"integer_bits": 8}, 2e-5, torch.float32),
    ("homomorphic", {"integer_bits": 16, "mode": "exact"}, 2e-5, torch.float32),
    ("homomorphic", {"integer_bits": 8, "mode": "exact"}, 2e-5, torch.float32),
]


@pytest.mark.parametrize(("name", "options", "tolerance", "dtype"), CASES, ids=str)
@on_ranks(3, timeout_s=60)
def test_what_is_sent_and_what_is_left_is_what_was_given(
    rank: int, world_size: int, name: str, options: dict[str, Any], tolerance: float, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Parameters go unused, buckets are rebuilt and the loss scale changes on the way."""
    scheme = schemes.by_name(name, **options)
    driver = Driver(scheme, [torch.zeros(shape, dtype=dtype) for shape in SHAPES], [len(SHAPES)])
    # Factors of bfloat16 round vectors, which travel beside them and have no residuals.
    is_checked = flat([torch.full(shape, len(shape) > 1 or "factor_dtype" not in options) for shape in SHAPES])
    old, results = driver.state().double(), []
    for step in range(6):
        driver.loss_scale = 2.0 ** (step % 3)
        gradients = gradients_of(rank, step, dtype, SHAPES)
        if step == 3:
            gradients[0].zero_()  # unused everywhere: what was left out of it stays
            driver.bucket_sizes = LAYOUT  # as DDP rebuilds them
        if step in (4, 5) and rank == 1:
            gradients[2].zero_()  # unused on one rank
        result = driver.reduce([gradient * driver.loss_scale for gradient in gradients])
        new = driver.state().double()
        if step == 3:
            assert torch.equal(new[:12_000], old[:12_000])  # bit by bit, across the rebuild
            assert not result[0].any()
        balance = flat(result).double() / driver.loss_scale + new - flat(gradients).double() - old
        limit = tolerance * max(1.0, float(new.abs().max())) if name == "homomorphic" else tolerance
        assert float((mean_over_ranks(balance) * is_checked).abs().max()) < limit, step
        assert bool(new.any()), "nothing was left out, so nothing is shown"
        old = new
        results.append(flat(result))
    stats = scheme.stats()
    assert stats.get("n_buckets_too_dense", 0) == stats.get("n_steps_not_finite", 0) == 0
    return results
