"""Numbers of the homomorphic paper's figures 2 and 3."""

import math

import torch

from gradwire.codecs.count_sketch import CountSketch, index_words, write_index
from gradwire_lab.bench.measures import Call, Measured, cell_by_cell
from gradwire_lab.bench.sources import GradientSource
from gradwire_lab.results.records import Record

PAPER_GAMMA = 1.23  # cells a non-zero, for infinitely many of them (Jiang et al., 2017)
_LN2 = math.log(2)


@cell_by_cell
def measure_formulas(_: Call, value_bits: int, density: float) -> Record:
    """Fig. 2 in theory: bits of bitmap + sketch, Bloom filter + sketch and the bound, as shares of the plain values."""
    sizes = (bound_bits, bitmap_bits, bloom_bits)
    bound, bitmap, bloom = (size(1.0, density, value_bits) / value_bits for size in sizes)
    shares = {"bound_share": bound, "bitmap_share": bitmap, "bloom_share": bloom}
    return {**shares, "best_over_bound": min(bitmap, bloom) / bound}


def measure_recovery(call: Call) -> Measured:
    """Fig. 3: axis `sketch_size`, as a share of the gradient's."""
    source = GradientSource(None, float(call.get("density")), str(call.get("pattern", "element")))
    gradient = torch.from_numpy(source.gradient(0, int(call.get("n_elements"))))
    return [(cell, recovery(gradient, cell["sketch_size"])) for cell in call.cells]


def recovery(gradient: torch.Tensor, size: float) -> Record:
    """Fig. 3: share recovered, average relative error and rounds, by a sketch of `size` of the gradient's."""
    n_elements = gradient.numel()
    own = torch.empty(index_words(n_elements), dtype=torch.int32)
    n_nonzeros = write_index(gradient, own).n_nonzeros
    sketch = CountSketch()
    # A sketch that may be as large as it likes is given gamma of the size asked for.
    gamma = size * n_elements / n_nonzeros
    if gamma >= sketch.gamma:
        sketch = CountSketch(gamma=min(gamma, 10.0))
        sketch.prepare(own, n_elements)
    else:
        sketch.prepare(own, n_elements, max_cells=max(1, int(size * n_elements)))
    cells, out = torch.empty(sketch.n_cells), torch.empty(n_elements)
    sketch.add(gradient, own, cells)
    n_core = sketch.peel(own)
    sketch.recover(cells, 1.0, out, estimate=True)
    wanted, found = (values[gradient != 0].double() for values in (gradient, out))
    return {
        "density": n_nonzeros / n_elements,
        "sketch_share": sketch.n_cells / n_elements,
        "cells_a_nonzero": sketch.n_cells / n_nonzeros,
        "recovery_rate": 1 - n_core / n_nonzeros,
        "relative_error": float(((found - wanted).abs() / wanted.abs()).mean()),
        "rounds": sketch.n_rounds,
    }


# ---- sizes by the paper's formulas (Li et al., ICML 2024, 3.3)
# All in bits for a gradient of `n_elements` values of `value_bits` bits, of which a share `density` is not zero. Whole
# numbers of hashes, rows and cells are not rounded here: a built sketch is larger by what native/sketch/plan.hpp says.


def bound_bits(n_elements: float, density: float, value_bits: int) -> float:
    """The least that any code needs: which values are not zero, n f(0, lambda) = N H(n/N), and what they are."""
    entropy = -sum(p * math.log2(p) for p in (density, 1 - density) if p > 0)
    log2_nonzeros = value_bits + math.log1p(-(2.0**-value_bits)) / _LN2  # of how many values there are beside zero
    return n_elements * (entropy + density * log2_nonzeros)


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
