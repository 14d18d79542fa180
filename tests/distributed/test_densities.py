"""homomorphic from no gradient at all to a dense one and back, in one run: right sums, and bytes that follow the density."""

import itertools
from typing import Any

import pytest
import torch

from buckets import Driver
from gradwire import schemes
from gradwire.exchange.aggregators.process_group import ProcessGroup
from ranks import agree, on_ranks
from sketches import DTYPES, EPSILON, PATTERNS, SMALLEST, check_mean, gradients_of

N = 30_011
UP = (0.0, 0.0, 1e-4, 0.002, 0.0, 0.03, 0.3, 0.6, 0.8, 0.87, 0.95, 1.0)
# A bucket that was too dense is tried again after 16 steps, and then its counts are those of the last 8.
DENSITIES = (*UP, *(0.0,) * 9, *(0.02,) * 16)
MODES: tuple[dict[str, Any], ...] = (
    {},
    {"index": "bloom"},
    {"mode": "sketch"},
    {"mode": "sketch", "index": "bloom"},
    {"mode": "exact"},
    {"mode": "exact", "integer_bits": 64},
)
# With values that all-to-all brings together, and other shapes of a table: among other numbers of ranks.
MORE: tuple[dict[str, Any], ...] = (
    {"index": "bloom", "aggregator": "all-to-all"},
    {"mode": "sketch", "index": "bloom", "aggregator": "all-to-all"},
    {"mode": "sketch", "index": "bitmap", "batch_values": 64, "gamma": 1.5, "seed": 9},
    {"mode": "exact"},
)


def cell_bytes_of(options: dict[str, Any], dtype: torch.dtype) -> float:
    """What a non-zero of the union costs."""
    if "mode" not in options:
        return dtype.itemsize
    return 1.3 * options.get("integer_bits", 32) / 8


@pytest.mark.parametrize(
    ("world_size", "pattern"), [*((3, pattern) for pattern in PATTERNS), (1, "random"), (2, "random"), (4, "random")]
)
@on_ranks(timeout_s=200)
def test_densities_from_none_to_all_and_back_in_one_run(rank: int, world_size: int, pattern: str) -> None:
    ring = 2 * (world_size - 1) / world_size
    for options, dtype in itertools.product({1: (*MODES, *MORE), 3: MODES}.get(world_size, MORE), DTYPES):
        aggregator = ProcessGroup(options.get("aggregator", "all-reduce"))
        scheme = schemes.by_name("homomorphic", **{**options, "aggregator": aggregator})
        driver = Driver(scheme, [torch.zeros(N, dtype=dtype)])
        cell_bytes = cell_bytes_of(options, dtype)
        was_dense = False
        for step, density in enumerate(DENSITIES):
            shares = gradients_of(pattern, N, world_size, density, dtype, step + 1)
            (mean,) = driver.reduce([shares[rank].clone()])
            where = (options, dtype, step, density)
            assert agree(mean), where
            record = driver.last_buckets[0].record
            is_plain = any("too dense" in why for why in record.fallbacks)
            check_mean(options, is_plain, mean, shares)
            n_nonzeros = int((shares != 0).any(0).sum())
            if is_plain:  # for a reason, or for one that was there a few steps ago
                assert was_dense or N / 8 + 1.1 * cell_bytes * n_nonzeros > 0.85 * N * dtype.itemsize, where
            elif n_nonzeros:
                assert record.bytes_sent >= ring * cell_bytes / 1.3 * n_nonzeros - 64, where
                most = 2.0 if options.get("mode") == "sketch" else 1.1  # a table that was too small went in vain
                assert record.bytes_sent <= ring * most * N * dtype.itemsize, where
            was_dense = was_dense or is_plain
        assert not is_plain, where
        # A filter for few values, and no more: what was learnt of dense steps is forgotten. A sketch's tables are each as
        # large as its block asked for in the last 8 steps, and clusters move from block to block.
        most = 1.7 if options.get("mode") == "sketch" else 1.3
        assert record.bytes_sent <= ring * (N / 8 + most * cell_bytes * n_nonzeros + 1_000), (where, record.bytes_sent)
        stats = driver.scheme.stats()
        assert was_dense or world_size == 1  # alone nothing is ever sent
        assert stats["n_steps_not_finite"] == stats["n_buckets_too_large"] == 0
        if options.get("index") == "bloom" and world_size > 1:
            assert stats["n_bloom_indices"] > 0
            assert stats["n_bloom_fallbacks"] > 0, "no filter was too small for the step after it"
        driver.close()


# ---- values at the ends of their dtype


@on_ranks(2, timeout_s=100)
def test_values_at_the_ends_of_their_dtype_arrive(rank: int, world_size: int) -> None:
    """Subnormals and the largest finite values are values like any other; -0.0 is a zero."""
    for options, dtype in itertools.product(MODES, DTYPES):
        info = torch.finfo(dtype)
        driver = Driver(schemes.by_name("homomorphic", **options), [torch.zeros(N, dtype=dtype)])
        for step in range(3):
            shares = gradients_of("random", N, world_size, 0.02, dtype, step + 1)
            shares[:, 0] = info.max
            shares[0, 1], shares[1:, 1] = info.max, -info.max
            shares[:, 2] = SMALLEST[dtype]
            shares[:, 3] = -SMALLEST[dtype] * torch.arange(1, world_size + 1)
            shares[:, 4] = info.smallest_normal
            shares[:, 5] = -0.0
            (mean,) = driver.reduce([shares[rank].clone()])
            assert agree(mean), (options, dtype)
            assert bool(mean.isfinite().all()), (options, dtype, mean[:6])
            is_plain = bool(driver.last_buckets[0].record.fallbacks) or driver.scheme.stats()["n_buckets_too_large"] > 0
            check_mean(options, is_plain, mean, shares)
            if "mode" not in options:
                assert not is_plain
                assert float(mean[0]) == pytest.approx(info.max, rel=4 * EPSILON[dtype])
        driver.close()
