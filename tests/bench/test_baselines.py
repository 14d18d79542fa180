"""Every baseline gives back every bit, so that its ratio and its times mean something."""

from __future__ import annotations

import numpy as np
import pytest

from gradwire.errors import InvalidArgument
from gradwire_lab.bench.codec import BASELINES, baseline_by_name

_SPECIAL = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-42, -1.5, 3.4e38], np.float32)


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("name", BASELINES)
def test_baseline_returns_every_bit(name: str, n_threads: int) -> None:
    baseline = baseline_by_name(name, n_threads)
    numbers = np.random.default_rng(5)
    normal = (numbers.standard_normal(50_000) * 1e-3).astype(np.float32)
    for array in (normal, np.zeros(10_000, np.float32), np.tile(_SPECIAL, 200)):
        before = array.copy()
        decoded = baseline.decode(baseline.encode(array))
        assert np.array_equal(decoded.view(np.uint32), before.view(np.uint32))
        assert np.array_equal(array.view(np.uint32), before.view(np.uint32)), "the input was changed"


def test_unknown_baseline_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(InvalidArgument, match="zstd, zlib, lz4, blosc2, zipnn, pcodec"):
        baseline_by_name("lzma")
