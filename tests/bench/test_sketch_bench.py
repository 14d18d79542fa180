"""Sketches as measures: sizes obey the paper's bound, what is measured has a record a cell."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from gradwire.codecs import sketch_sizes
from gradwire.errors import InvalidArgument
from gradwire_lab.bench.measures import Call, sketches
from gradwire_lab.bench.sources import GradientSource

DENSITIES = [10 ** (exponent / 5) for exponent in range(-25, 0)] + [0.7, 0.9, 0.99]


@pytest.mark.parametrize("value_bits", [2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("density", DENSITIES)
def test_the_smaller_of_both_indices_is_within_1_6_times_the_bound_and_never_below_it(
    value_bits: int, density: float
) -> None:
    bound = sketch_sizes.bound_bits(1e6, density, value_bits)
    best = min(sketch_sizes.bitmap_bits(1e6, density, value_bits), sketch_sizes.bloom_bits(1e6, density, value_bits))
    assert bound < best < 1.6 * bound


def test_the_bound_is_that_of_counting_all_gradients() -> None:
    # log2 of how many gradients of 60 values of 3 bits have exactly 6 non-zeros, against the formula's limit for many.
    exact = math.log2(math.comb(60_000, 6_000)) + 6_000 * math.log2(7)
    assert sketch_sizes.bound_bits(60_000, 0.1, 3) == pytest.approx(exact, rel=1e-3)


def test_the_filters_rate_of_false_positives_is_where_filter_and_sketch_are_smallest() -> None:
    for density in (0.001, 0.01, 0.05):
        share = sketch_sizes.false_positive_rate(density, 32)

        def size(share: float, density: float = density) -> float:
            return density / math.log(2) * math.log2(1 / share) + 1.23 * 32 * (density + share * (1 - density))

        assert sketch_sizes.bloom_bits(1.0, density, 32) == pytest.approx(size(share))
        assert size(share) < min(size(0.9 * share), size(1.1 * share))
    assert sketch_sizes.false_positive_rate(0.99, 2) == 1.0
    assert sketch_sizes.bloom_bits(1000, 0.0, 32) == 0


@pytest.mark.parametrize("pattern", ["element", "row", "batch"])
def test_built_sketches_and_indices_are_as_large_as_the_formulas_say(pattern: str) -> None:
    for density in (0.01, 0.1):
        record = sketches.built_sizes(1 << 18, density, pattern)
        assert record["bound_share"] < record["bitmap_share"]
        assert record["bitmap_over_formula"] < 1.05
        assert record["bloom_over_formula"] < 1.1


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
    assert [(c["value_bits"], c["density"]) for c, _ in formulas] == [
        (r["value_bits"], r["density"]) for _, r in formulas
    ]
    (sizes,) = sketches.measure_sizes(call({"pattern": ["row"], "density": [0.02]}, n_elements=65536))
    assert sizes[1]["pattern"] == "row"
    recovery = sketches.measure_recovery(call({"sketch_size": [0.1, 2.0]}, n_elements=65536, density=0.5))
    assert [record["recovery_rate"] for _, record in recovery][1] == 1.0
    (speed,) = sketches.measure_speed(call({"n_elements": [65536], "density": [0.02]}, rounds=1, threads=1))
    assert min(speed[1]["recover_gb_per_s"], speed[1]["compress_gb_per_s"]) > 0


def test_density_out_of_range_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="density"):
        sketches.measure_sizes(call({"pattern": ["row"], "density": [1.5]}, n_elements=65536))
