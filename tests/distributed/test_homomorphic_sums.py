"""homomorphic's sums: packed ones are the backend's own, bit by bit; all follow the density, from none to a dense gradient."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradwire
from buckets import Driver
from gcomp_gradients import make_gradient
from gradwire import schemes
from gradwire.codecs.count_sketch import MAX_CORE, CountSketch, FixedPoint, Outcome
from gradwire.exchange import aggregators
from gradwire.exchange.aggregators import Sum
from gradwire.exchange.aggregators.process_group import ProcessGroup
from ranks import agree, assert_alike, at_end, bits_of, on_ranks, run_ranks
from sketches import DTYPES, EPSILON, PATTERNS, SMALLEST, check_mean, gradients_of, index_of, quantise, sparse_gradients
from switch_cases import Serving

N = 40_013
DENSITIES = (0.02, 0.0, 0.0, 0.3, 0.001, 0.8, 0.01, 1.0)
N_DENSE = 30_011
N_SKETCHED = 50_021
UP = (0.0, 0.0, 1e-4, 0.002, 0.0, 0.03, 0.3, 0.6, 0.8, 0.87, 0.95, 1.0)
# A bucket that was too dense is tried again after 16 steps, and then its counts are those of the last 8.
UP_AND_DOWN = (*UP, *(0.0,) * 9, *(0.02,) * 16)
EXACT = ({"mode": "exact"}, {"mode": "exact", "integer_bits": 64})
MODES = ({}, {"index": "bloom"}, {"mode": "sketch"}, {"mode": "sketch", "index": "bloom"}, *EXACT)
# With values that all-to-all brings together, and other shapes of a table: among other numbers of ranks.
MORE: tuple[dict[str, Any], ...] = (
    {"index": "bloom", "aggregator": "all-to-all"},
    {"mode": "sketch", "index": "bloom", "aggregator": "all-to-all"},
    {"mode": "sketch", "index": "bitmap", "batch_values": 64, "gamma": 1.5, "seed": 9},
    {"mode": "exact"},
)


def summed(mine: torch.Tensor, union: torch.Tensor) -> torch.Tensor:
    """The backend's mean of what lies at the places of `union`, zeros elsewhere."""
    packed = mine[union] * (1.0 / dist.get_world_size())
    dist.all_reduce(packed)
    return torch.zeros_like(mine).masked_scatter(union, packed)


def same(mean: torch.Tensor, expected: torch.Tensor) -> bool:
    """To the bit, but for the signs of zeros."""
    return bits_of(mean + 0) == bits_of(expected + 0)


@on_ranks([1, 2, 3, 4])
def test_packed_sums_are_the_backends_own_bit_by_bit(rank: int, world_size: int) -> None:
    for dtype, pattern in itertools.product(DTYPES, PATTERNS):
        driver = Driver(schemes.by_name("homomorphic"), [torch.zeros(N, dtype=dtype)])
        for step, density in enumerate(DENSITIES):
            everyone = gradients_of(pattern, N, world_size, density, dtype, step + 1)
            (mean,) = driver.reduce([everyone[rank].clone()])
            union, everywhere = (everyone != 0).any(0), torch.ones(N, dtype=torch.bool)
            assert same(mean, summed(everyone[rank], everywhere if density == 1 else union)), (dtype, pattern, density)
            if dtype == torch.float32:
                shares = everyone.double()
                error = (mean.double() - shares.sum(0) / world_size).abs()
                assert bool((error <= world_size * 2.0**-23 * shares.abs().sum(0) + 1e-44).all())
            if world_size == 2:  # two values have but one order of summation: plain's bits
                assert same(mean, summed(everyone[rank], everywhere))
            record = driver.last_buckets[0].record
            if world_size > 1:
                assert any("too dense" in why for why in record.fallbacks) == (density == 1), (pattern, density)
                n_bytes = int(union.sum()) * dtype.itemsize + N / 8 + 48
                assert record.fallbacks or record.bytes_sent <= 2 * (world_size - 1) / world_size * n_bytes * 1.02 + 64


def specials_of(dtype: torch.dtype, rank: int, step: int) -> torch.Tensor:
    """(N,): 4 % of every kind of finite value: normal, subnormal, largest, -0; from step 3 on Inf and NaN too."""
    gradient = make_gradient("special", N, dtype, 10 * step + rank)
    if step < 3:
        gradient[~gradient.isfinite()] = -0.0
    gradient[torch.rand(N, generator=torch.Generator().manual_seed(step)) >= 0.04] = 0.0
    return gradient


@on_ranks([2, 3])
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
        at_end.close()  # a job of the switch, which has slots for few
    return torch.cat(results)


def test_a_switch_sums_integers_of_8_to_64_bits() -> None:
    with Serving() as serving:
        results = run_ranks(reduce_by_switch, 3, f"127.0.0.1:{serving.port}")
    assert_alike(results)


@pytest.mark.parametrize(("world_size", "pattern"), [(n, "random") for n in (1, 2, 4)] + [(3, one) for one in PATTERNS])
@on_ranks(timeout_s=200)
def test_densities_from_none_to_all_and_back_in_one_run(rank: int, world_size: int, pattern: str) -> None:
    ring = 2 * (world_size - 1) / world_size
    for options, dtype in itertools.product({1: (*MODES, *MORE), 3: MODES}.get(world_size, MORE), DTYPES):
        aggregator = ProcessGroup(options.get("aggregator", "all-reduce"))
        scheme = schemes.by_name("homomorphic", **{**options, "aggregator": aggregator})
        driver = Driver(scheme, [torch.zeros(N_DENSE, dtype=dtype)])
        cell_bytes = 1.3 * options.get("integer_bits", 32) / 8 if "mode" in options else dtype.itemsize  # per non-zero
        was_dense = False
        for step, density in enumerate(UP_AND_DOWN):
            shares = gradients_of(pattern, N_DENSE, world_size, density, dtype, step + 1)
            (mean,) = driver.reduce([shares[rank].clone()])
            where = (options, dtype, step, density)
            assert agree(mean), where
            record = driver.last_buckets[0].record
            is_plain = any("too dense" in why for why in record.fallbacks)
            check_mean(options, is_plain, mean, shares)
            n_nonzeros = int((shares != 0).any(0).sum())
            if is_plain:  # for a reason, or for one that was there a few steps ago
                assert was_dense or N_DENSE / 8 + 1.1 * cell_bytes * n_nonzeros > 0.85 * N_DENSE * dtype.itemsize, where
            elif n_nonzeros:
                assert record.bytes_sent >= ring * cell_bytes / 1.3 * n_nonzeros - 64, where
                most = 2.0 if options.get("mode") == "sketch" else 1.1  # a table that was too small went in vain
                assert record.bytes_sent <= ring * most * N_DENSE * dtype.itemsize, where
            was_dense = was_dense or is_plain
        assert not is_plain, where
        # A filter for few values, and no more: what was learnt of dense steps is forgotten. A sketch's tables are each as
        # large as its block asked for in the last 8 steps, and clusters move from block to block.
        most = 1.7 if options.get("mode") == "sketch" else 1.3
        n_most = ring * (N_DENSE / 8 + most * cell_bytes * n_nonzeros + 1_000)
        assert record.bytes_sent <= n_most, (where, record.bytes_sent)
        stats = driver.scheme.stats()
        assert was_dense or world_size == 1  # alone nothing is ever sent
        assert stats["n_steps_not_finite"] == stats["n_buckets_too_large"] == 0
        if options.get("index") == "bloom" and world_size > 1:
            assert stats["n_bloom_indices"] > 0
            assert stats["n_bloom_fallbacks"] > 0, "no filter was too small for the step after it"


@on_ranks(2, timeout_s=100)
def test_values_at_the_ends_of_their_dtype_arrive(rank: int, world_size: int) -> None:
    """Subnormals and the largest finite values are values like any other; -0.0 is a zero."""
    for options, dtype in itertools.product(MODES, DTYPES):
        info = torch.finfo(dtype)
        driver = Driver(schemes.by_name("homomorphic", **options), [torch.zeros(N_DENSE, dtype=dtype)])
        for step in range(3):
            shares = gradients_of("random", N_DENSE, world_size, 0.02, dtype, step + 1)
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


# ---- float sketches: index and cells in one aggregation, as soon as the last steps tell how large they are
class Counting(ProcessGroup):
    """How often it is asked to aggregate, and to wait."""

    n_calls = 0

    def or_words(self, *arguments: Any) -> None:
        self.n_calls += 1
        super().or_words(*arguments)

    def start_sum(self, *arguments: Any) -> Any:
        self.n_calls += 1
        return super().start_sum(*arguments)

    def start_or_and_sum(self, *arguments: Any) -> tuple[Sum, Sum]:
        before = self.n_calls
        both = super().start_or_and_sum(*arguments)
        self.n_calls = before + 1
        return both


@pytest.mark.parametrize("or_by", ["all-reduce", "all-to-all"])
@on_ranks(3)
def test_warm_sketch_takes_one_aggregation_a_bucket(rank: int, world_size: int, or_by: str) -> None:
    for index in ("bitmap", "bloom", "auto"):
        aggregator = Counting(or_by)
        scheme = schemes.by_name("homomorphic", mode="sketch", index=index, aggregator=aggregator)
        driver = Driver(scheme, [torch.zeros(N_SKETCHED)])
        n_calls = []
        for step in range(6):
            shares = gradients_of("random", N_SKETCHED, world_size, 0.05, torch.float32, step + 1)
            before = aggregator.n_calls
            (mean,) = driver.reduce([shares[rank].clone()])
            n_calls.append(aggregator.n_calls - before)
            assert agree(mean)
            expected = shares.double().mean(0)
            assert float((mean.double() - expected).norm()) <= 2e-6 * float(expected.norm())
        stats = scheme.stats()
        n_more = stats["n_sketches_resent"] + stats["n_bloom_fallbacks"] + (stats["n_core_values"] > 0) * 5
        n_more += stats["n_bloom_indices"]  # whose candidates are confirmed, while the cells travel
        assert n_calls[0] == 2
        assert sum(n_calls[1:]) <= 5 + n_more, (index, n_calls)
        assert stats["n_sketches_at_once"] + stats["n_sketches_resent"] == 5
        assert stats["n_sketches_at_once"] >= 4


@pytest.mark.parametrize("pattern", PATTERNS)
@on_ranks(2)
def test_density_that_changes_is_sent_again_or_learnt_anew(rank: int, world_size: int, pattern: str) -> None:
    """More non-zeros than the table was made for: sent again, at the right size; far fewer: learnt anew."""
    driver = Driver(schemes.by_name("homomorphic", mode="sketch"), [torch.zeros(N_SKETCHED)])
    for step, density in enumerate((0.02, 0.02, 0.3, 0.3, 0.02, 0.02, 0.0, 0.0, 0.02, 0.02, 0.02)):
        shares = gradients_of(pattern, N_SKETCHED, world_size, density, torch.float32, step + 1)
        (mean,) = driver.reduce([shares[rank].clone()])
        assert agree(mean)
        error = (mean.double() - shares.double().mean(0)).abs()
        assert float(error.max()) <= 2.0**-16 * float(shares.double().abs().amax(1).sum())
    stats = driver.scheme.stats()
    assert stats["n_sketches_at_once"] > 0
    assert stats["n_sketches_resent"] > 0
    assert stats["n_buckets_too_dense"] == stats["n_steps_not_finite"] == 0
    # What it has learnt is in the checkpoint, and older ones that lack it are read.
    state = driver.scheme.state_dict()
    assert state["tables"] or pattern == "clustered"  # whose counts halve from step to step
    driver.scheme.load_state_dict(state)
    assert driver.scheme.state_dict() == state
    for broken in ({}, {"batch_values": 64, "counts": [[-1]]}, {"batch_values": 64, "counts": []}):
        with pytest.raises(gradwire.InvalidArgument, match="tables"):
            driver.scheme.load_state_dict({**state, "tables": {"0:x": broken}})
    del state["tables"]
    driver.scheme.load_state_dict(state)
    assert driver.scheme.state_dict()["tables"] == {}


@pytest.mark.parametrize("n_elements", [3_000, 200_003, 3_000_000])
def test_assumed_tables_give_back_the_exact_sums(n_elements: int) -> None:
    gradients = [gradient.clamp_(-1000, 1000) for gradient in sparse_gradients(n_elements, 0.05, 3)]
    fixed = FixedPoint.fit(10, 3, torch.int64)
    own = [index_of(gradient) for gradient in gradients]
    index = own[0] | own[1] | own[2]
    known = CountSketch()
    known.prepare(index, n_elements)
    counts = known.block_nonzeros()
    assert sum(counts) == known.n_nonzeros
    sketch = CountSketch()
    rows = [max(3, int(1.5 * n / known.table_batch_values) + 1) for n in counts]
    assert sketch.assume(n_elements, known.table_batch_values, rows) == sum(rows) * known.table_batch_values
    total = torch.zeros(sketch.n_cells, dtype=torch.int64)
    for gradient, words in zip(gradients, own, strict=True):
        cells = torch.empty_like(total)
        sketch.add(gradient, words, cells, fixed)
        total += cells
    sketch.adopt(index)
    assert sketch.block_nonzeros() == counts
    n_core = sketch.peel(index)
    assert n_core <= MAX_CORE
    out = torch.empty(n_elements)
    assert sketch.recover(total, fixed.scale, out) is Outcome.COMPLETE
    expected = torch.stack([quantise(gradient, fixed) for gradient in gradients]).sum(0).double() * fixed.scale
    core = sketch.core() if n_core else torch.empty(0, dtype=torch.int64)
    out[core] = expected[core].float()
    assert torch.equal(out, expected.float())


def test_tables_that_cannot_be_are_refused() -> None:
    wrong = {
        "power of two": (48, 3),
        "a block at least": (64,),
        "three rows": (64, 2),
        "than batches": (64, *[3] * 4_000),
    }
    for match, (batch_values, *rows) in wrong.items():
        with pytest.raises(gradwire.InvalidArgument, match=match):
            CountSketch().assume(10_000, batch_values, rows)
