"""Sketches as measures: sizes obey the paper's bound, what is measured has a record a cell."""

import itertools
import math
from pathlib import Path

import pytest
import torch

from gradwire.codecs import bloom_filter
from gradwire.codecs.bloom_filter import BloomShape
from gradwire.codecs.count_sketch import MAX_CORE, CountSketch, index_words, write_index
from gradwire_lab.bench.measures import Call, sketches
from gradwire_lab.bench.sources import GradientSource

DENSITIES = [10 ** (exponent / 5) for exponent in range(-25, 0)] + [0.7, 0.9, 0.99]


@pytest.mark.parametrize("value_bits", [2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("density", DENSITIES)
def test_the_smaller_index_is_within_1_6_times_the_bound_and_never_below_it(value_bits: int, density: float) -> None:
    bound = sketches.bound_bits(1e6, density, value_bits)
    best = min(sketches.bitmap_bits(1e6, density, value_bits), sketches.bloom_bits(1e6, density, value_bits))
    assert bound < best < 1.6 * bound


def test_the_bound_is_that_of_counting_all_gradients() -> None:
    # log2 of how many gradients of 60 values of 3 bits have exactly 6 non-zeros, against the formula's limit for many.
    exact = math.log2(math.comb(60_000, 6_000)) + 6_000 * math.log2(7)
    assert sketches.bound_bits(60_000, 0.1, 3) == pytest.approx(exact, rel=1e-3)


def test_the_filters_rate_of_false_positives_is_where_filter_and_sketch_are_smallest() -> None:
    for density in (0.001, 0.01, 0.05):
        share = sketches.false_positive_rate(density, 32)

        def size(share: float, density: float = density) -> float:
            return density / math.log(2) * math.log2(1 / share) + 1.23 * 32 * (density + share * (1 - density))

        assert sketches.bloom_bits(1.0, density, 32) == pytest.approx(size(share))
        assert size(share) < min(size(0.9 * share), size(1.1 * share))
    assert sketches.false_positive_rate(0.99, 2) == 1.0
    assert sketches.bloom_bits(1000, 0.0, 32) == 0


@pytest.mark.parametrize("pattern", ["element", "row", "batch"])
@pytest.mark.parametrize("density", [0.01, 0.1])
def test_built_sketches_and_indices_are_as_large_as_the_formulas_say(pattern: str, density: float) -> None:
    n_elements, sketch = 1 << 18, CountSketch()
    gradient = torch.from_numpy(GradientSource(None, density, pattern).gradient(0, n_elements))
    index = torch.empty(index_words(n_elements), dtype=torch.int32)
    n_nonzeros = write_index(gradient, index).n_nonzeros
    shape = BloomShape.fit(n_nonzeros, n_elements, 32 * sketch.gamma)
    words, candidates = torch.empty(shape.n_words, dtype=torch.int32), torch.empty_like(index)
    bloom_filter.insert(index, n_elements, shape, 0, words)
    bloom_filter.query(words, n_elements, shape, 0, candidates)
    built = {}
    for name, held, n_words in (("bitmap", index, index.numel()), ("bloom", candidates, shape.n_words)):
        sizes = (sketch.prepare(held, n_elements, attempt) for attempt in range(64))
        n_cells = next(n for n in sizes if sketch.peel(held) <= MAX_CORE)
        built[name] = 32 * (n_words + n_cells)
    share = n_nonzeros / n_elements
    assert sketches.bound_bits(n_elements, share, 32) < built["bitmap"]
    assert built["bitmap"] < 1.05 * sketches.bitmap_bits(n_elements, share, 32, sketch.gamma)
    assert built["bloom"] < 1.1 * sketches.bloom_bits(n_elements, share, 32, sketch.gamma)


def test_recovery_is_complete_from_gamma_on_and_only_partial_below() -> None:
    gradient = torch.from_numpy(GradientSource(None, 0.1, "element").gradient(0, 1 << 17))
    below, above = (sketches.recovery(gradient, size) for size in (0.08, 0.15))
    assert below["recovery_rate"] < 0.5
    assert below["relative_error"] > 0.5
    assert above["recovery_rate"] == 1.0
    assert above["relative_error"] < 1e-4


def call(axes: dict[str, list], **fixed: object) -> Call:
    cells = [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    return Call("k", cells, {}, fixed, Path("unused"))


def test_every_measure_has_a_record_a_cell() -> None:
    formulas = sketches.measure_formulas(call({"value_bits": [4, 32], "density": [0.01, 0.1]}))
    assert len(formulas) == 4
    for cell, record in formulas:
        share = sketches.bound_bits(1.0, cell["density"], cell["value_bits"]) / cell["value_bits"]
        assert record["bound_share"] == pytest.approx(share)
    recovery = sketches.measure_recovery(call({"sketch_size": [0.1, 2.0]}, n_elements=65536, density=0.5))
    assert [record["recovery_rate"] for _, record in recovery][1] == 1.0
