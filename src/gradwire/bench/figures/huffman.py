"""Code lengths of a native Huffman code and of the paper's escaped one, to count bits (Fig. 12); nothing is encoded."""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

Histogram = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.int64]

# The paper's n_theta and n_s: codes over 8 bits are replaced by an 8-bit escape and the raw 8-bit symbol (its Table 1).
THRESHOLD_BITS = 8
RAW_BITS = 8


def native_lengths(histogram: Histogram) -> Lengths:
    """Bits of each symbol's Huffman code, (256,).

    Every symbol counts once more than seen: without that an unseen one has no code, and other data could not be coded.
    """
    lengths = np.zeros(histogram.size, np.int64)
    # (count, tie-breaker, symbols below): ties go to the lower first symbol, so that the code is the same everywhere.
    heap = [(int(count) + 1, symbol, [symbol]) for symbol, count in enumerate(histogram)]
    heapq.heapify(heap)
    while len(heap) > 1:
        count_a, tie_a, symbols_a = heapq.heappop(heap)
        count_b, tie_b, symbols_b = heapq.heappop(heap)
        lengths[symbols_a + symbols_b] += 1
        heapq.heappush(heap, (count_a + count_b, min(tie_a, tie_b), symbols_a + symbols_b))
    return lengths


def escaped_lengths(histogram: Histogram, threshold_bits: int = THRESHOLD_BITS) -> Lengths:
    """As `native_lengths`, over-long codes replaced by the escape and the raw symbol (paper, section 4.3)."""
    lengths = native_lengths(histogram)
    return np.where(lengths > threshold_bits, threshold_bits + RAW_BITS, lengths)


def mean_bits(lengths: Lengths, histogram: Histogram) -> float:
    """Bits a symbol when data with `histogram` is coded with `lengths`."""
    return float((lengths * histogram).sum() / histogram.sum())
