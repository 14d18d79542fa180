"""homomorphic's packed sums against brute force: the backend's own sum of the values under the union's mask, bit by bit."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from buckets import Driver
from gcomp_gradients import make_gradient
from gradwire import schemes
from gradwire.exchange import aggregators
from ranks import assert_alike, bits_of, on_ranks, run_ranks
from sketches import DTYPES, EPSILON, PATTERNS, gradients_of
from switch_cases import Serving

N = 40_013
DENSITIES = (0.02, 0.0, 0.0, 0.3, 0.001, 0.8, 0.01, 1.0)


def summed(mine: torch.Tensor, union: torch.Tensor) -> torch.Tensor:
    """The backend's mean of what lies at the places of `union`, zeros elsewhere."""
    packed = mine[union] * (1.0 / dist.get_world_size())
    dist.all_reduce(packed)
    return torch.zeros_like(mine).masked_scatter(union, packed)


def same(mean: torch.Tensor, expected: torch.Tensor) -> bool:
    """To the bit, but for the signs of zeros."""
    return bits_of(mean + 0) == bits_of(expected + 0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@on_ranks()
def test_packed_sums_are_the_backends_own_bit_by_bit(rank: int, world_size: int) -> None:
    for dtype in DTYPES:
        for pattern in PATTERNS:
            driver = Driver(schemes.by_name("homomorphic"), [torch.zeros(N, dtype=dtype)])
            for step, density in enumerate(DENSITIES):
                everyone = gradients_of(pattern, N, world_size, density, dtype, step + 1)
                (mean,) = driver.reduce([everyone[rank].clone()])
                union, everywhere = (everyone != 0).any(0), torch.ones(N, dtype=torch.bool)
                expected = summed(everyone[rank], everywhere if density == 1 else union)
                assert same(mean, expected), (dtype, pattern, density)
                if dtype == torch.float32:
                    shares = everyone.double()
                    error = (mean.double() - shares.sum(0) / world_size).abs()
                    assert bool((error <= world_size * 2.0**-23 * shares.abs().sum(0) + 1e-44).all())
                if world_size == 2:  # two values have but one order of summation: plain's bits
                    assert same(mean, summed(everyone[rank], everywhere))
                record = driver.last_buckets[0].record
                if world_size > 1:
                    assert any("too dense" in why for why in record.fallbacks) == (density == 1), (pattern, density)
                    ring = 2 * (world_size - 1) / world_size
                    n_bytes = int(union.sum()) * dtype.itemsize + N / 8 + 48
                    assert record.fallbacks or record.bytes_sent <= ring * n_bytes * 1.02 + 64
            driver.close()


def specials_of(dtype: torch.dtype, rank: int, step: int) -> torch.Tensor:
    """(N,): 4 % of every kind of finite value: normal, subnormal, largest, -0; from step 3 on Inf and NaN too."""
    gradient = make_gradient("special", N, dtype, 10 * step + rank)
    if step < 3:
        gradient[~gradient.isfinite()] = -0.0
    gradient[torch.rand(N, generator=torch.Generator().manual_seed(step)) >= 0.04] = 0.0
    return gradient


@pytest.mark.parametrize("world_size", [2, 3])
@on_ranks()
def test_special_values_of_every_dtype_are_summed_as_the_backend_sums_them(rank: int, world_size: int) -> None:
    for dtype in DTYPES:
        # A Bloom filter's false positives move the places at which the backend's sum begins with another rank.
        driver = Driver(schemes.by_name("homomorphic", index="bitmap"), [torch.zeros(N, dtype=dtype)])
        for step in range(6):
            everyone = torch.stack([specials_of(dtype, other, step) for other in range(world_size)])
            (mean,) = driver.reduce([everyone[rank].clone()])
            union = (everyone != 0).any(0)
            if step >= 3:  # which hold Inf and NaN
                assert bool(mean.isnan().all()), (dtype, step)
                continue
            assert same(mean, summed(everyone[rank], union)), (dtype, step)
        driver.close()


def reduce_by_switch(rank: int, world_size: int, address: str) -> torch.Tensor:
    results = []
    for dtype, (bits, kept, mode) in itertools.product(
        DTYPES,
        ((32, 31, "packed"), (64, 62, "packed"), (64, 62, "exact"), (16, 15, "packed"), (8, 7, "packed"),
         (16, 13, "exact"), (8, 5, "exact")),
    ):  # fmt: skip
        switch = aggregators.by_name("switch", address=address)
        options: dict[str, Any] = {"mode": mode, "integer_bits": bits, "error_feedback": None if bits > 16 else False}
        driver = Driver(schemes.by_name("homomorphic", aggregator=switch, **options), [torch.zeros(N, dtype=dtype)])
        for step, density in enumerate((0.05, 0.0, 0.4 if bits <= 32 and mode == "packed" else 0.1)):
            everyone = gradients_of("random", N, world_size, density, dtype, step + 1)
            (mean,) = driver.reduce([everyone[rank].clone()])
            shares = everyone.double()
            largest = float(shares.abs().max())
            # Each rank rounds to half a unit of 2^(e - bits + ceil(log2 ranks)), the result to its dtype once.
            unit = 4 * 2.0**-kept * 2 * largest
            expected = shares.sum(0) / world_size
            assert bool(((mean.double() - expected).abs() <= unit + EPSILON[dtype] * expected.abs() + 2.0**-25).all())
            assert not bool(mean[(shares == 0).all(0)].any())
            assert not any("too dense" in why for why in driver.last_buckets[0].record.fallbacks)
            results.append(mean.float())
        driver.close()
    return torch.cat(results)


def test_a_switch_sums_integers_of_8_to_64_bits() -> None:
    with Serving() as serving:
        results = run_ranks(reduce_by_switch, 3, f"127.0.0.1:{serving.port}")
    assert_alike(results)
