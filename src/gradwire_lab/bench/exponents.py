"""The exponent field of float32 values: histogram and entropy, the floor under every lossless exponent code."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gradwire_lab.workloads.gradients import FloatArray


def exponent_histogram(values: FloatArray) -> npt.NDArray[np.int64]:
    """(256,) counts of the biased exponent field of `values` (n,) float32; zeros and subnormals are field 0."""
    return np.bincount(values.view(np.uint32) >> 23 & 0xFF, minlength=256).astype(np.int64)


def entropy_bits(histogram: npt.NDArray[np.int64]) -> float:
    """Shannon entropy of one symbol drawn from `histogram`, in bits."""
    share = histogram[histogram > 0] / histogram.sum()
    return float(-(share * np.log2(share)).sum()) if share.size > 1 else 0.0
