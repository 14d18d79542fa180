"""Gradients for the all-reduce: any process makes any rank's, and sparse ones have the density that was asked for."""

from pathlib import Path

import numpy as np
import pytest
from gradient_files import load, sparse_arrays

from gradwire.errors import InvalidArgument
from gradwire_lab.bench.sources import PATTERNS, GradientSource


@pytest.mark.parametrize(("pattern", "run"), PATTERNS.items())
@pytest.mark.parametrize("density", [0.0, 0.01, 0.05, 0.3])
def test_union_over_the_ranks_has_the_density_in_whole_runs(pattern: str, run: int, density: float) -> None:
    n_elements = 1024 * 300
    source = GradientSource(density=density, pattern=pattern)
    supports = [np.flatnonzero(source.gradient(rank, n_elements)) for rank in range(3)]
    assert all(np.array_equal(supports[0], support) for support in supports)
    assert supports[0].size / n_elements == pytest.approx(density, abs=run / n_elements)
    support = source.positions(n_elements).reshape(-1, run)
    assert np.array_equal(support % run, np.tile(np.arange(run), (len(support), 1)))


def test_ranks_differ_and_every_process_makes_the_same() -> None:
    for source in (GradientSource(), GradientSource(density=0.1)):
        assert np.array_equal(source.gradient(1, 1000), GradientSource(density=source.density).gradient(1, 1000))
        assert not np.array_equal(source.gradient(0, 1000), source.gradient(1, 1000))


def test_file_gradient_keeps_zeros_and_magnitudes_at_any_length(tmp_path: Path) -> None:
    file = load(tmp_path, sparse_arrays())
    gradient = GradientSource(file=file).gradient(2, 12_000)
    original = np.resize(file.gradient, 12_000)
    assert np.array_equal(gradient == 0, original == 0)
    factor = np.abs(gradient[original != 0] / original[original != 0])
    assert 0.7499 < factor.min() < factor.max() < 1.2501


def test_impossible_sources_are_refused(tmp_path: Path) -> None:
    file = load(tmp_path, sparse_arrays())
    for options in ({"density": 1.5}, {"density": -0.1}, {"pattern": "diagonal"}, {"file": file, "density": 0.5}):
        with pytest.raises(InvalidArgument):
            GradientSource(**options)  # type: ignore[arg-type]
