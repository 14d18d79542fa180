"""The index of non-zeros as a Bloom filter: smaller than a bitmap where few values are not zero (paper: section 3.3).

A filter finds every non-zero again, and takes some zeros for non-zeros. Integers recover zeros for them, floats their
cell-mates' rounding: there each rank says of every candidate, in a bit, whether it is not zero (`bits_of`, `keep`).
"""

import math
from typing import NamedTuple

import torch

from gradwire import _native

_ROW_WORDS = _native.SKETCH_BLOOM_ROW_WORDS
_MAX_HASHES = 64
_LN2 = 0.6931471805599453


class BloomShape(NamedTuple):
    """The size of a filter. All ranks compute the same from the same numbers: only +, -, x, / and comparisons."""

    n_hashes: int  # rows that a non-zero sets a bit in
    n_words: int  # of 32 bits; a multiple of 32
    expected_candidates: float  # values that it lets through, if the union has as many non-zeros as it was made for
    expected_bits: float  # of the filter, and of what is sent of the values, in that case

    @classmethod
    def fit(
        cls, n_nonzeros: int, n_elements: int, value_bits: float, candidate_bits: float | None = None
    ) -> "BloomShape":
        """The paper's sizes for `n_nonzeros` of `n_elements`: 1/eps = ln(2)^2 gamma C lambda, log2(1/eps) hashes, n /
        ln(2) x log2(1/eps) bits. Rounded to whole hashes and rows of 1,024 bits. `value_bits`: gamma C, what a value
        costs that is sent. `candidate_bits`: a candidate; None: all of them are sent."""
        spill_bits = value_bits if candidate_bits is None else candidate_bits
        n_nonzeros = max(1, n_nonzeros)
        n_zeros = max(0, n_elements - n_nonzeros)
        n_hashes = min(_MAX_HASHES, max(1, _rounded_log2(_LN2 * _LN2 * spill_bits * n_zeros / n_nonzeros)))
        n_rows = max(1, math.ceil(n_nonzeros * n_hashes / _LN2 / (32 * _ROW_WORDS)))
        n_words = n_rows * _ROW_WORDS
        n_candidates = n_nonzeros + n_zeros / 2**n_hashes
        sent_bits = spill_bits * n_candidates + (0 if candidate_bits is None else value_bits * n_nonzeros)
        return cls(n_hashes, n_words, n_candidates, 32 * n_words + sent_bits)


class Found(NamedTuple):
    n_candidates: int  # values that a filter may hold
    n_nonzeros: int  # how many of them are not zero, estimated from how full it is
    share_set: float  # of its bits


def insert(index: torch.Tensor, n_elements: int, shape: BloomShape, seed: int, out: torch.Tensor) -> None:
    """Write into `out` (shape.n_words,) the filter of the bitmap `index` (index_words(n_elements),), both int32."""
    _native.sketch_insert_bloom(index.view(torch.uint32), n_elements, shape.n_hashes, seed, out.view(torch.uint32))


def query(bloom: torch.Tensor, n_elements: int, shape: BloomShape, seed: int, out: torch.Tensor) -> Found:
    """Write into `out` (index_words(n_elements),) the bitmap of everything that `bloom` (shape.n_words,) may hold."""
    words, n_bits = bloom.view(torch.uint32), 32 * shape.n_words
    n_candidates = _native.sketch_query_bloom(words, n_elements, shape.n_hashes, seed, out.view(torch.uint32))
    share_set = _native.sketch_count_index(words, n_bits) / n_bits
    false_positives = math.prod([share_set] * shape.n_hashes)
    if false_positives >= 1:
        return Found(n_candidates, n_candidates, share_set)
    estimated = (n_candidates - false_positives * n_elements) / (1 - false_positives)
    return Found(n_candidates, min(n_candidates, max(0, round(estimated))), share_set)


def bits_of(index: torch.Tensor, candidates: torch.Tensor, out: torch.Tensor) -> None:
    """Write the bits of `index` at the candidates, in order, to `out`, as many words as they take; both are bitmaps."""
    _native.sketch_pack_bits(index.view(torch.uint32), candidates.view(torch.uint32), out.view(torch.uint32))


def keep(bits: torch.Tensor, candidates: torch.Tensor) -> None:
    """Leave of the candidates those whose bit, as `bits_of` orders them, is set."""
    _native.sketch_keep_bits(bits.view(torch.uint32), candidates.view(torch.uint32))


def _rounded_log2(x: float) -> int:
    """The integer nearest to log2(x), without a library's logarithm, which may differ from machine to machine."""
    mantissa, exponent = math.frexp(x)
    return exponent if mantissa >= 0.7071067811865476 else exponent - 1
