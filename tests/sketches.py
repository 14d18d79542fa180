"""Count sketches of several ranks in one process: their sums are made here instead of by an aggregator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.codecs.count_sketch import MAX_ATTEMPTS, MAX_CORE, CountSketch, FixedPoint, index_words, write_index


def sparse_gradients(
    n_elements: int, density: float, world_size: int, run: int = 1, seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """One gradient a rank; non-zeros come in runs, and each rank lacks a third of the union's."""
    generator = torch.Generator().manual_seed(seed)
    in_union = torch.rand(-(-n_elements // run), generator=generator).lt(density).repeat_interleave(run)[:n_elements]
    places = in_union.nonzero().view(-1)
    gradients = []
    for _ in range(world_size):
        mine = places[torch.rand(places.numel(), generator=generator) < 0.67]
        normal = torch.randn(2, mine.numel(), generator=generator)
        gradient = torch.zeros(n_elements, dtype=dtype)
        gradient[mine] = (normal[0] * torch.exp2(4 * normal[1])).to(dtype)
        gradients.append(gradient)
    return gradients


@dataclass
class Sketches:
    """What the ranks hold after the index and the sketch were summed."""

    sketch: CountSketch
    index: torch.Tensor
    own_indices: list[torch.Tensor]
    cells: torch.Tensor
    n_core: int
    n_attempts: int


def sum_sketches(
    gradients: Sequence[torch.Tensor], fixed: FixedPoint | None = None, sketch: CountSketch | None = None
) -> Sketches:
    """The sum of all ranks' sketches, planned as the scheme plans it: another salt until at most MAX_CORE are left."""
    sketch = sketch or CountSketch()
    n_elements = gradients[0].numel()
    own_indices = []
    for gradient in gradients:
        own_indices.append(torch.empty(index_words(n_elements), dtype=torch.int32))
        write_index(gradient, own_indices[-1])
    index = torch.zeros_like(own_indices[0])
    for own in own_indices:
        index |= own
    for attempt in range(MAX_ATTEMPTS + 1):
        sketch.prepare(index, n_elements, attempt)
        n_core = sketch.peel(index)
        if n_core <= MAX_CORE or sketch.n_cells == 0:
            break
    dtype = torch.float32 if fixed is None else fixed.dtype
    cells = torch.zeros(sketch.n_cells, dtype=dtype)
    for gradient, own in zip(gradients, own_indices, strict=True):
        mine = torch.empty(sketch.n_cells, dtype=dtype)
        sketch.add(gradient, own, mine, fixed)
        cells += mine
    return Sketches(sketch, index, own_indices, cells, n_core, attempt + 1)


def quantise(gradient: torch.Tensor, fixed: FixedPoint) -> torch.Tensor:
    """The definition of FixedPoint, in float64."""
    scaled = gradient.double() * math.ldexp(1.0, fixed.shift)
    return torch.clamp(torch.round(scaled), -fixed.limit, fixed.limit).to(torch.int64)
