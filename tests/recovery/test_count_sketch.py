"""Sums of count sketches give back the sum of the gradients: exactly in integers, to rounding in floats, always whole."""

import math
from collections import Counter

import pytest
import torch

import gradwire
from float_messages import DTYPES
from gradwire import _native
from gradwire.codecs import bloom_filter, packed_values
from gradwire.codecs.bloom_filter import BloomShape
from gradwire.codecs.count_sketch import MAX_ATTEMPTS, CountSketch, FixedPoint, Outcome, index_words, write_index
from sketches import index_of, quantise, sparse_gradients, sum_sketches

SIZES = (0, 1, 15, 16, 17, 1023, 1024, 1025, 40_000, 1_500_001)
# By norms; measured 3e-7 to 7e-7 for values of one scale. Here scales spread over 2^4 x normal.
LOSSLESS_BOUND = 2e-6


def exponent_of(gradients: list[torch.Tensor]) -> int:
    largest = max((float(g.abs().max()) for g in gradients if g.numel()), default=0.0)
    return math.frexp(largest)[1] if largest else 0


@pytest.mark.parametrize("n_elements", SIZES)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_exact_mode_is_the_integer_sum_of_the_quantised_gradients(n_elements: int, dtype: torch.dtype) -> None:
    """Worlds 1 to 17, densities from none to all, alone, in rows and in whole batches."""
    worlds = range(1, 18) if n_elements < 10_000 else (3, 17) if n_elements < 100_000 else (3,)
    for world_size in worlds:
        density = (0.0, 0.003, 0.02, 0.1, 0.5, 1.0)[world_size % 6]
        run = (1, 32, 1024)[world_size % 3]
        gradients = sparse_gradients(n_elements, density, world_size, run, seed=world_size)
        fixed = FixedPoint.fit(exponent_of(gradients), world_size, dtype)
        summed = sum_sketches(gradients, fixed)
        result = torch.empty(n_elements)
        assert summed.sketch.recover(summed.cells, 1.0, result) is Outcome.COMPLETE
        quantised = [quantise(gradient, fixed) for gradient in gradients]
        expected = torch.stack(quantised).sum(0)
        assert int(expected.abs().max() if n_elements else 0) <= 2 ** (31 if dtype is torch.int32 else 62)
        core = summed.sketch.core()
        assert core.numel() <= 64
        result[core] = expected[core].float()
        assert torch.equal(result, expected.double().float())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("world_size", [1, 2, 17])
def test_quantisation_error_is_at_most_half_a_unit(world_size: int, dtype: torch.dtype) -> None:
    gradient = torch.randn(10_000)
    fixed = FixedPoint.fit(exponent_of([gradient]), world_size, dtype)
    error = quantise(gradient, fixed).double() * fixed.scale - gradient.double()
    assert float(error.abs().max()) <= 0.5 * fixed.scale


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_elements", SIZES)
def test_lossless_mode_is_the_sum_to_rounding(n_elements: int, dtype: torch.dtype) -> None:
    for world_size, density, run in ((1, 0.01, 1), (4, 0.05, 32), (17, 0.3, 1), (3, 0.02, 1024)):
        if world_size * n_elements > 10_000_000:
            continue
        gradients = sparse_gradients(n_elements, density, world_size, run, seed=n_elements, dtype=dtype)
        summed, result = sum_sketches(gradients), torch.empty(n_elements)
        assert summed.sketch.recover(summed.cells, 1 / world_size, result) is Outcome.COMPLETE
        expected = torch.stack([gradient.double() for gradient in gradients]).sum(0) / world_size
        result[summed.sketch.core()] = expected[summed.sketch.core()].float()
        assert float((result.double() - expected).norm()) <= LOSSLESS_BOUND * float(expected.norm())
        assert not result[expected == 0].any() or world_size > 1  # where values cancel, their rounding is left


def test_ten_thousand_random_instances_without_one_incomplete_recovery() -> None:
    generator = torch.Generator().manual_seed(3)
    sketch = CountSketch()
    n_attempts: Counter[int] = Counter()
    for _ in range(10_000):
        n_elements = int(2 ** (4 + 9 * float(torch.rand(1, generator=generator))))
        density = 2 ** (-6 * float(torch.rand(1, generator=generator)))
        run = (1, 16, 64)[int(torch.randint(3, (1,), generator=generator))]
        present = torch.rand(-(-n_elements // run), generator=generator).lt(density).repeat_interleave(run)[:n_elements]
        gradient = torch.randint(-1000, 1001, (n_elements,), generator=generator) * present.float()
        summed, result = sum_sketches([gradient], sketch=sketch), torch.empty(n_elements)
        n_attempts[summed.n_attempts] += 1
        assert sketch.recover(summed.cells, 1.0, result) is Outcome.COMPLETE
        core = sketch.core()
        assert core.numel() == summed.n_core <= 64
        result[core] = gradient[core]
        assert torch.equal(result, gradient)  # sums of small integers are exact in float32
    assert max(n_attempts) <= MAX_ATTEMPTS  # no instance had to do without a table
    assert n_attempts[1] > 8_000


@pytest.mark.parametrize("run", [1, 32, 768, 1024, 50_000, "one lane of each granule"])
def test_every_pattern_of_a_million_values_peels_with_the_first_salt(run: int | str) -> None:
    """One lane: as in a matrix of 16 columns of which one has a gradient, where rotations by whole vectors would fail."""
    for seed in range(3):
        if isinstance(run, int):
            (gradient,) = sparse_gradients(1_500_000, 0.03, 1, run, seed)
        else:
            gradient = torch.zeros(1_000_000)
            gradient[3 + seed :: 16] = torch.randn(gradient[3 + seed :: 16].numel())
        summed = sum_sketches([gradient], sketch=CountSketch(seed=seed))
        assert (summed.n_attempts, summed.n_core) == (1, 0)


@pytest.mark.parametrize(("density", "run"), [(0.005, 1), (0.01, 1), (0.05, 32), (0.2, 1024)])
def test_sketch_has_gamma_cells_for_each_non_zero_of_the_union(density: float, run: int) -> None:
    gradients = sparse_gradients(2_000_000, density, 2, run)
    sketch = sum_sketches(gradients).sketch
    in_union = int(torch.stack([gradient != 0 for gradient in gradients]).any(0).sum())
    assert sketch.n_nonzeros == in_union
    assert 1.3 * in_union <= sketch.n_cells <= 1.03 * 1.3 * in_union


def test_table_that_is_too_small_is_estimated_by_the_median_of_three() -> None:
    """A tenth of what peeling needs: the estimates of a few large values among many small ones find the large ones."""
    gradient, is_large = torch.randn(200_000), torch.zeros(200_000, dtype=torch.bool)
    is_large[::5_000] = True
    gradient[is_large] = 1e4
    index, sketch, result = index_of(gradient), CountSketch(), torch.empty(200_000)
    cells = torch.empty(sketch.prepare(index, 200_000, max_cells=26_000))
    assert cells.numel() <= 1.05 * 26_000
    assert sketch.peel(index) > 190_000
    sketch.add(gradient, index, cells)
    assert sketch.recover(cells, 1.0, result, estimate=True) is Outcome.COMPLETE
    assert float((result[is_large] / 1e4 - 1).abs().max()) < 0.01
    assert abs(float(result[~is_large].mean())) < 50  # unbiased, if noisy


@pytest.mark.parametrize(("density", "run"), [(0.0005, 1), (0.01, 1), (0.01, 32), (0.01, 1024), (0.05, 1)])
def test_bloom_filter_finds_all_non_zeros_and_as_many_zeros_as_the_formula_says(density: float, run: int) -> None:
    n_elements = 2_000_003
    indices = [index_of(gradient) for gradient in sparse_gradients(n_elements, density, 3, run)]
    union = indices[0] | indices[1] | indices[2]
    n_nonzeros = _native.sketch_count_index(union.view(torch.uint32), n_elements)
    shape = BloomShape.fit(n_nonzeros, n_elements, 1.3)
    ored = torch.zeros(shape.n_words, dtype=torch.int32)
    for index in indices:
        mine = torch.empty_like(ored)
        bloom_filter.insert(index, n_elements, shape, 7, mine)
        ored |= mine
    found = torch.empty_like(union)
    n_candidates, n_estimated, _ = bloom_filter.query(ored, n_elements, shape, 7, found)
    assert torch.equal(found & union, union)
    expected = n_nonzeros + (n_elements - n_nonzeros) / 2**shape.n_hashes
    assert 0.97 * n_nonzeros <= n_candidates <= 1.15 * expected
    assert abs(n_estimated - n_nonzeros) <= 0.1 * n_nonzeros
    confirmed = torch.zeros(index_words(n_candidates), dtype=torch.int32)
    for index in indices:
        mine = torch.full_like(confirmed, -1)
        bloom_filter.bits_of(index, found, mine)
        confirmed |= mine
    bloom_filter.keep(confirmed, found)
    assert torch.equal(found, union)
    with pytest.raises(gradwire.InvalidArgument, match="bits take"):
        bloom_filter.keep(confirmed[:-1], union)


def test_bloom_filter_has_the_papers_size() -> None:
    n, n_elements, gamma = 250_000, 25_000_000, 1.3
    shape = BloomShape.fit(n, n_elements, 32 * gamma)
    n_hashes = math.log2(math.log(2) ** 2 * gamma * 32 * (n_elements - n) / n)
    assert abs(shape.n_hashes - n_hashes) <= 0.5
    assert 32 * shape.n_words == pytest.approx(n / math.log(2) * shape.n_hashes, rel=0.01)
    bits_of_bitmap = n_elements + 32 * gamma * n
    assert shape.expected_bits < 0.5 * bits_of_bitmap
    assert BloomShape.fit(10 * n, n_elements, 32 * gamma).expected_bits > n_elements + 32 * gamma * 10 * n


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_foreign_or_altered_sketches_raise(dtype: torch.dtype) -> None:
    gradients, result = sparse_gradients(300_000, 0.02, 2), torch.empty(300_000)
    fixed = None if dtype is torch.float32 else FixedPoint.fit(exponent_of(gradients), 2, dtype)
    summed = sum_sketches(gradients, fixed)
    cells, other_seed = summed.cells, sum_sketches(gradients, fixed, CountSketch(seed=1)).cells
    assert summed.sketch.recover(cells.clone(), 1.0, result) is Outcome.COMPLETE
    for position in (0, 1_000, cells.numel() - 1):
        altered = cells.clone()
        altered[position] += 1 << 20
        assert summed.sketch.recover(altered, 1.0, result) is Outcome.FOREIGN
    assert summed.sketch.recover(other_seed[: cells.numel()].clone(), 1.0, result) is Outcome.FOREIGN
    with pytest.raises(gradwire.CorruptMessage, match="do not belong together"):
        summed.sketch.recover(cells[:-1], 1.0, result)
    for value in (float("nan"), float("inf")) if fixed is None else ():
        poisoned = cells.clone()
        poisoned[5] = value
        assert summed.sketch.recover(poisoned, 1.0, result) is not Outcome.COMPLETE


def test_an_index_of_other_values_and_values_beyond_the_agreed_exponent_raise() -> None:
    index = torch.zeros(index_words(33), dtype=torch.int32)
    index[1] = 2  # value 33 of 33
    with pytest.raises(gradwire.CorruptMessage, match="past its 33 values"):
        CountSketch().prepare(index, 33)
    with pytest.raises(gradwire.InvalidArgument, match="words"):
        CountSketch().prepare(index, 65)
    (gradient,) = sparse_gradients(10_000, 0.2, 1)
    fixed = FixedPoint.fit(exponent_of([gradient]) - 3, 1, torch.int32)
    with pytest.raises(gradwire.InvalidArgument, match="does not fit the fixed point"):
        sum_sketches([gradient], fixed)


def test_cells_altered_by_little_are_found_and_cancelling_ranks_are_not_accused() -> None:
    (gradient,) = sparse_gradients(300_000, 0.02, 1)
    largest = float(gradient.abs().max())
    result = torch.empty(300_000)
    summed = sum_sketches([gradient * (1 if rank % 2 else -1) * (1 + 1e-4 * rank) for rank in range(4)])
    bound = 4 * 2.0 ** exponent_of([gradient * 1.0003])
    assert summed.sketch.recover(summed.cells.clone(), 1.0, result, bound=bound) is Outcome.COMPLETE
    for position in range(0, summed.cells.numel(), summed.cells.numel() // 50):
        altered = summed.cells.clone()
        altered[position] += 5e-4 * largest
        assert summed.sketch.recover(altered, 1.0, result, bound=bound) is Outcome.FOREIGN


def test_random_indices_and_cells_never_crash() -> None:
    generator = torch.Generator().manual_seed(0)
    for n_elements in (1, 31, 32, 1000, 70_001):
        for _ in range(10):
            gradient = torch.randn(n_elements, generator=generator)
            words = torch.randint(-(2**31), 2**31, (index_words(n_elements),), generator=generator).to(torch.int32)
            if n_elements % 32:
                words[-1] &= (1 << n_elements % 32) - 1
            own, sketch = index_of(gradient), CountSketch()
            cells = torch.randn(sketch.prepare(words, n_elements), generator=generator)
            sketch.peel(words)
            sketch.add(gradient, own, torch.empty_like(cells))  # with non-zeros that the index does not know
            # Sums of nothing: said to be foreign, but for an index that asks for no value, or whose few cells leave no check.
            assert isinstance(sketch.recover(cells, 1.0, gradient), Outcome)
            assert gradient.shape == (n_elements,)


@pytest.mark.parametrize("dtype", DTYPES)
def test_index_reports_non_zeros_the_largest_magnitude_and_what_is_not_finite(dtype: torch.dtype) -> None:
    for value in (0.0, 6e-8, 1.5, -65_504.0, float("inf"), float("-inf"), float("nan")):
        for position in (0, 40, 99):
            gradient, index = torch.zeros(100, dtype=dtype), torch.empty(4, dtype=torch.int32)
            gradient[position] = value
            largest = float(gradient[position].abs())
            assert write_index(gradient, index) == (value != 0, largest if math.isfinite(largest) else math.inf)
            assert (
                int(packed_values.count(index, 100)) == (value != 0) == bool(index[position // 32] & 1 << position % 32)
            )
    gradient = torch.tensor([0.0, -0.0, 6e-8 if dtype == torch.float16 else 1e-39, -3.0] * 20, dtype=dtype)
    assert write_index(gradient, torch.empty(3, dtype=torch.int32)) == (40, 3.0)
