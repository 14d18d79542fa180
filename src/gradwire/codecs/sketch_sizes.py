"""Sizes of index and sketch by the paper's formulas, beside the information-theoretic bound (Li et al., ICML 2024, 3.3).

All in bits for a gradient of `n_elements` values of `value_bits` bits, of which a share `density` is not zero. Whole
numbers of hashes, rows and cells are not rounded here: a built sketch is larger by what docs/format.md#count-sketch says.
"""

from __future__ import annotations

import math

__all__ = ["PAPER_GAMMA", "bitmap_bits", "bloom_bits", "bound_bits", "false_positive_rate"]

PAPER_GAMMA = 1.23  # cells a non-zero, for infinitely many of them (Jiang et al., 2017)
_LN2 = math.log(2)


def bound_bits(n_elements: float, density: float, value_bits: int) -> float:
    """The least that any code needs: which values are not zero, n f(0, lambda) = N H(n/N), and what they are."""
    return n_elements * (_entropy_bits(density) + density * _log2_nonzeros(value_bits))


def bitmap_bits(n_elements: float, density: float, value_bits: int, gamma: float = PAPER_GAMMA) -> float:
    """A bit a value, and gamma cells a non-zero."""
    return n_elements * (1 + gamma * value_bits * density)


def false_positive_rate(density: float, value_bits: int, gamma: float = PAPER_GAMMA) -> float:
    """The share of zeros for which filter and sketch together are smallest; 1 where no filter is."""
    zeros_a_nonzero = (1 - density) / density if density > 0 else math.inf
    inverse = _LN2 * _LN2 * gamma * value_bits * zeros_a_nonzero
    return 1.0 if inverse <= 1 else 1 / inverse


def bloom_bits(n_elements: float, density: float, value_bits: int, gamma: float = PAPER_GAMMA) -> float:
    """A Bloom filter of the non-zeros, and gamma cells for each of them and for each zero that the filter lets through."""
    share = false_positive_rate(density, value_bits, gamma)
    filter_bits = 0.0 if share in (0.0, 1.0) else density / _LN2 * -math.log2(share)
    return n_elements * (filter_bits + gamma * value_bits * (density + share * (1 - density)))


def _entropy_bits(share: float) -> float:
    """The entropy of a yes that comes with this probability."""
    return -sum(p * math.log2(p) for p in (share, 1 - share) if p > 0)


def _log2_nonzeros(value_bits: int) -> float:
    """log2 of how many values there are beside zero."""
    return value_bits + math.log1p(-(2.0**-value_bits)) / _LN2
