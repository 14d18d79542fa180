"""The scheme homomorphic: whole sums on every rank, and the bytes it promises."""

from __future__ import annotations

import math

import pytest
import torch
from homomorphic_cases import DTYPES, gradients_of, make, parameters

from buckets import LAYOUT, Driver, by_bucket, flat
from gradwire.codecs.count_sketch import FixedPoint
from gradwire.exchange.aggregators.process_group import ProcessGroup
from ranks import on_ranks
from sketches import quantise, sparse_gradients


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@on_ranks()
def test_every_mode_gives_the_mean_and_the_same_bits_on_all_ranks(rank: int, world_size: int) -> torch.Tensor:
    results = []
    for dtype in DTYPES:
        rounding = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
        for options in (
            {},
            {"mode": "sketch"},
            {"index": "bloom", "aggregator": ProcessGroup("all-to-all")},
            {"mode": "sketch", "index": "bloom", "aggregator": ProcessGroup("all-to-all")},
            {"mode": "exact"},
            {"mode": "exact", "integer_bits": 64},
            {"mode": "sketch", "index": "bitmap", "batch_values": 64, "gamma": 1.5, "seed": 9},
        ):
            scheme = make(**options)
            driver = Driver(scheme, parameters(dtype), LAYOUT)
            for step, density in enumerate((0.01, 0.03, 0.0, 0.001, 0.3, 1.0)):
                everyone = [gradients_of(other, world_size, step, density, dtype) for other in range(world_size)]
                result = by_bucket(driver.reduce(everyone[rank]))
                results.append(flat(result).float())
                for index, mean in enumerate(result):
                    shares = torch.stack([by_bucket(tensors)[index].double() for tensors in everyone])
                    expected = shares.sum(0) / world_size
                    # Packed values and dense buckets take the backend's own sum, which rounds every partial sum to the dtype.
                    is_plain = density > 0.03 or "mode" not in options
                    summed = shares.abs().sum(0) / world_size
                    rounded = rounding * (world_size * summed if is_plain else expected.abs())
                    error = (mean.double() - expected).abs() - rounded - 2.0**-24 * (dtype != DTYPES[0])
                    if options.get("mode") == "exact" and world_size > 1 and density <= 0.03:
                        largest = float(shares.abs().max())
                        bits = torch.int32 if options.get("integer_bits") is None else torch.int64
                        fixed = FixedPoint.fit(math.frexp(largest)[1], world_size, bits)
                        total = torch.stack([quantise(share, fixed) for share in shares]).sum(0)
                        exact = (total.double() * (fixed.scale / world_size)).float().to(dtype)
                        assert torch.equal(mean, exact)
                    else:
                        assert float(error.clamp(min=0).norm()) <= 2e-6 * float(expected.norm())
            if world_size > 1:
                stats = scheme.stats()
                assert stats["n_buckets_too_dense"] > 0
                assert (stats["n_bloom_indices"] > 0) == (options.get("index") != "bitmap")
            driver.close()
    return torch.cat(results)


@on_ranks(2)
def test_wire_volume_is_index_plus_gamma_times_density(rank: int, world_size: int) -> None:
    """Single values, rows of 32 and whole batches, by bitmap or confirmed filter: 5 % for all that is round."""
    n_elements = 3_000_000
    for density in (0.01, 0.05):
        for run in (1, 32, 1024):
            parameter = torch.zeros(n_elements)
            generator = torch.Generator().manual_seed(run)
            in_union = torch.rand(-(-n_elements // run), generator=generator).lt(density)
            in_union = in_union.repeat_interleave(run)[:n_elements]
            gradient = torch.randn(n_elements) * in_union
            true_density = float(in_union.float().mean())
            for index in ("bitmap", "bloom"):
                driver = Driver(make(mode="sketch", index=index), [parameter])
                for _ in range(2):
                    driver.reduce([gradient])
                sent = driver.last_buckets[0].record.bytes_sent * 8 / (2 * (world_size - 1) / world_size)
                driver.close()
                n = true_density * n_elements
                n_hashes = round(math.log2(math.log(2) ** 2 * (n_elements - n) / n))  # a zero let through costs a bit
                bits = n / math.log(2) * n_hashes + n + (n_elements - n) / 2**n_hashes
                promised = (n_elements if index == "bitmap" else bits) + 1.3 * 32 * n
                assert 0.95 * promised <= sent <= 1.05 * promised, (density, run, sent / promised)


# ---- awkward steps and layouts


@on_ranks(2)
def test_step_without_gradients_is_not_followed_by_plain_ones(rank: int, world_size: int) -> None:
    """A step without gradients, then what came before it: never taken for a dense bucket, whatever the mode."""
    for mode in ("packed", "sketch"):
        driver = Driver(make(mode=mode), parameters(), LAYOUT)
        n_sent = []
        for density in (0.02, *(0.0,) * 10, 0.02, 0.02, 0.02):  # longer than counts are kept
            driver.reduce(gradients_of(rank, world_size, 0, density))
            n_sent.append(sum(bucket.record.bytes_sent for bucket in driver.last_buckets))
            for bucket in driver.last_buckets:
                assert not any("too dense" in why for why in bucket.record.fallbacks)
        assert n_sent[-3] <= 1.2 * n_sent[0]  # a filter of one row came first
        assert n_sent[-1] <= n_sent[0]
        assert driver.scheme.stats()["n_bloom_fallbacks"] > 0
        driver.close()


@on_ranks(4)
def test_ranks_that_nearly_cancel_are_summed(rank: int, world_size: int) -> None:
    """Sums 10^-4 of the values, with other ranks' rounding in every cell."""
    for mode in ("packed", "sketch"):
        driver = Driver(make(mode=mode), parameters(), LAYOUT)
        for step in range(3):
            base = gradients_of(0, 1, step, 0.03)
            everyone = [[g * (1 if r % 2 else -1) * (1 + 1e-4 * r) for g in base] for r in range(world_size)]
            mean = flat(driver.reduce([gradient.clone() for gradient in everyone[rank]])).double()
            shares = torch.stack([flat(gradients).double() for gradients in everyone])
            error = (mean - shares.mean(0)).abs()
            assert float(error.max()) <= 2.0**-16 * float(shares.abs().max())
            if mode == "packed":
                assert bool((error <= 2.0**-21 * shares.abs().sum(0)).all())
        assert driver.scheme.stats()["n_buckets_too_dense"] == 0
        driver.close()


@on_ranks(2)
def test_columns_of_a_matrix_are_sent_once(rank: int, world_size: int) -> None:
    parameter = torch.zeros(1024, 1024)
    gradient = torch.zeros(1024, 1024)
    gradient[:, 64:80] = torch.randn(1024, 16, generator=torch.Generator().manual_seed(rank))
    driver = Driver(make(mode="sketch", index="bitmap"), [parameter])
    for _ in range(2):
        driver.reduce([gradient.clone()])
        assert driver.last_buckets[0].record.bytes_sent <= 1.05 * (1024 * 1024 / 8 + 1.3 * 4 * 16 * 1024)
    assert driver.scheme.stats()["n_sketches_resent"] == 0
    driver.close()


@pytest.mark.parametrize("mode", ["packed", "sketch", "exact", "lossy"])
@on_ranks(2)
def test_zeros_of_all_ranks_are_zeros_and_adam_leaves_them_alone(rank: int, world_size: int, mode: str) -> None:
    """As in NCF: few rows of an embedding have gradients, of very different sizes; from the second step on by a filter."""
    n_elements, n_false = 400_000, 0
    parameter = torch.nn.Parameter(torch.zeros(n_elements))
    optimizer = torch.optim.Adam([parameter], lr=1e-3)
    is_touched = torch.zeros(n_elements, dtype=torch.bool)
    driver = Driver(make(mode=mode), [parameter])
    for step in range(4):
        everyone = sparse_gradients(n_elements, 0.01, world_size, run=32, seed=step)
        is_touched |= torch.stack(everyone).ne(0).any(0)
        (parameter.grad,) = driver.reduce([everyone[rank].clone()])
        n_false += int(parameter.grad[torch.stack(everyone).eq(0).all(0)].count_nonzero())
        optimizer.step()
    assert driver.scheme.stats()["n_bloom_indices"] == 3
    assert n_false == 0
    assert not bool(parameter.detach()[~is_touched].any())
    driver.close()
