"""How far each scheme's mean may lie from the exact one, element by element: what `bench allreduce` verifies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from gradwire_lab.bench.level_rule import Float64Array, allowed_scale
from gradwire_lab.workloads.gradients import OptimizerState

# Half a unit in the last place, relative: what one rounding to the format may change.
_FLOAT32_ROUNDING = 2.0**-24
_BFLOAT16_ROUNDING = 2.0**-9
# Below this a float32 is subnormal, and GComp's message has no mantissa for it.
_SMALLEST_NORMAL = 2.0**-126
# Rounding may make a partial sum larger, by less than this in all, before the next one is rounded.
_CREEP = 1.01


@dataclass(frozen=True)
class Exact:
    """The exact result at the checked elements, and what the bounds are made of."""

    mean: Float64Array  # of the ranks' gradients
    mean_magnitude: Float64Array  # mean of their absolute values: no partial sum, divided by the ranks, is larger
    positions: np.ndarray  # of the checked elements in the gradient
    n_ranks: int


def error_bound(
    name: str, options: dict[str, Any], exact: Exact, state: OptimizerState | None, quantum: float | None = None
) -> Float64Array | None:
    """The largest allowed |result - mean| of each checked element; None where a scheme promises none.

    Every scheme of sums pays one rounding a rank and one for the division; GComp adds N truncations of partial sums;
    fixed point rounds each rank's value to a multiple of `quantum`.
    """
    n_roundings = exact.n_ranks + 1
    sums = n_roundings * _FLOAT32_ROUNDING * exact.mean_magnitude + _SMALLEST_NORMAL
    if name in ("ddp", "plain", "zstd", "zlib"):
        return sums
    if name == "dense-switch" and quantum is not None:
        return sums + 0.5 * quantum
    if name == "ddp-bf16":
        return 2 * n_roundings * _BFLOAT16_ROUNDING * exact.mean_magnitude + _SMALLEST_NORMAL
    if name == "truncate":
        return sums + exact.n_ranks * 2.0 ** (options.get("bits", 18) - 23) * exact.mean_magnitude
    if name == "gcomp":
        flushed = exact.n_ranks * _SMALLEST_NORMAL
        importance = options.get("importance", "paper")
        if importance == "none":
            return sums + flushed
        if importance == "uniform":
            return sums + flushed + exact.n_ranks * 2.0 ** -(options["bits"] + 1) * exact.mean_magnitude * _CREEP
        if importance == "paper" and state is not None:
            # n bits of a partial sum s go only where S > 2^n |s|: each of the N cuts is below 2^(n-23) |s| < 2^-23 S,
            # and the mean divides their sum by N. In format 2 their squares add up to the promise's, half of it the mean's.
            is_published, n = options.get("format", 2) == 1, exact.n_ranks
            scale, slack = allowed_scale(state, n if is_published else 1)
            repeated = exact.positions % scale.size
            worst = 1.0 if is_published or n == 1 else math.sqrt((n - 1) / 2) + math.sqrt(1 / 2)
            worst *= float(options.get("tolerance", 1.0))
            return sums + flushed + 2.0**-23 * worst * (scale + slack)[repeated]
    if name == "homomorphic" and not options.get("sparsifier"):
        mode = options.get("mode", "packed")
        if mode == "packed":
            mode = "exact" if options.get("aggregator") == "switch" else "plain"
        return sums if mode == "plain" else _sketch_bound(mode, int(options.get("integer_bits", 32)), exact, sums)
    return None


def _sketch_bound(mode: str, integer_bits: int, exact: Exact, sums: Float64Array) -> Float64Array | None:
    """Sketch: a value comes out of a cell that held others, some of them peeled from such cells before: its error is
    relative to the largest value, not to itself (measured: 15 units of 2^-24; promised: 256). Exact: each rank rounds
    to half a unit of the fixed point, whose exponent is that of the largest value of all ranks.
    """
    largest_mean = float(exact.mean_magnitude.max(initial=0.0))
    if mode == "sketch":
        return sums + 2.0**-16 * largest_mean
    if mode == "exact":
        bits = (31 if integer_bits == 32 else 62) - (exact.n_ranks - 1).bit_length()
        # The largest value is at most n_ranks times the largest mean magnitude, and below twice a power of two.
        return sums + 2.0 ** (1 - bits) * exact.n_ranks * largest_mean
    return None
