"""Count sketches of several ranks in one process: their sums are made here instead of by an aggregator."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPSILON = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SMALLEST = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}
PATTERNS = ("random", "clustered", "columns", "cancelling")


def gradient_of(
    pattern: str, n_elements: int, rank: int, density: float, dtype: torch.dtype, seed: int
) -> torch.Tensor:
    """(n_elements,): ranks share half of their non-zeros; `density` is the union's, about."""
    common = torch.Generator().manual_seed(seed)
    own = torch.Generator().manual_seed(seed * 10 + rank)
    if pattern == "columns":  # blocks of 16 columns in rows of 512
        in_union = torch.zeros(-(-n_elements // 512), 512, dtype=torch.bool)
        in_union[:, : 16 * round(32 * density)] = True
        in_union = in_union.view(-1)[:n_elements]
    else:
        run = 700 if pattern == "clustered" else 1
        in_union = torch.rand(-(-n_elements // run), generator=common).lt(density)
        in_union = in_union.repeat_interleave(run)[:n_elements]
    shared = torch.rand(n_elements, generator=common) < 0.5
    mine = in_union & (shared | (torch.rand(n_elements, generator=own) < 0.5)) if density < 1 else in_union
    values = torch.randn(n_elements, generator=own) * torch.exp2(3 * torch.randn(n_elements, generator=own))
    if pattern == "cancelling":
        base = torch.randn(n_elements, generator=common)
        values = base * (1 if rank % 2 else -1) * (1 + 1e-4 * rank)
    return (values * mine).to(dtype)


def gradients_of(
    pattern: str, n_elements: int, world_size: int, density: float, dtype: torch.dtype, seed: int
) -> torch.Tensor:
    """(world_size, n_elements): those of all ranks."""
    return torch.stack([gradient_of(pattern, n_elements, rank, density, dtype, seed) for rank in range(world_size)])


@dataclass
class Sketches:
    """What the ranks hold after the index and the sketch were summed."""

    sketch: CountSketch
    index: torch.Tensor
    own_indices: list[torch.Tensor]
    cells: torch.Tensor
    n_core: int
    n_attempts: int


def index_of(gradient: torch.Tensor) -> torch.Tensor:
    index = torch.empty(index_words(gradient.numel()), dtype=torch.int32)
    write_index(gradient, index)
    return index


def sum_sketches(
    gradients: Sequence[torch.Tensor], fixed: FixedPoint | None = None, sketch: CountSketch | None = None
) -> Sketches:
    """The sum of all ranks' sketches, planned as the scheme plans it: another salt until at most MAX_CORE are left."""
    sketch = sketch or CountSketch()
    n_elements = gradients[0].numel()
    own_indices = [index_of(gradient) for gradient in gradients]
    index = functools.reduce(torch.bitwise_or, own_indices).clone()
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


def check_mean(options: Mapping[str, Any], is_plain: bool, mean: Tensor, shares: Tensor) -> None:
    """homomorphic's mean (n,) of `shares` (ranks, n) against float64, or where integers are summed against their own sum.

    `is_plain`: the backend itself has summed the values, and rounded every partial sum to the dtype.
    """
    world_size, dtype = len(shares), mean.dtype
    exact = shares.double()
    expected, summed = exact.mean(0), exact.abs().sum(0) / world_size
    error = (mean.double() - expected).abs()
    if world_size == 1:
        assert torch.equal(mean, shares[0])
    elif is_plain or "mode" not in options:
        assert bool((error <= 2 * world_size * (EPSILON[dtype] * summed + SMALLEST[dtype])).all())
    elif options["mode"] == "exact":
        bits = torch.int32 if options.get("integer_bits") is None else torch.int64
        fixed = FixedPoint.fit(math.frexp(float(exact.abs().max()))[1], world_size, bits)
        total = torch.stack([quantise(share, fixed) for share in shares]).sum(0)
        assert torch.equal(mean, (total.double() * (fixed.scale / world_size)).float().to(dtype))
    else:  # a value may lose digits to its cell-mates, but not more than they and the ranks' rounding make
        rounding = EPSILON[dtype] * expected.abs() + SMALLEST[dtype]
        assert float((error - rounding).max()) <= 2.0**-16 * float(exact.abs().amax(1).sum())
    assert not bool(mean[(shares == 0).all(0)].any())
