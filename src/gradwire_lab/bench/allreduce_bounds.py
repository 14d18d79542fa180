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


def error_bound(name: str, options: dict[str, Any], exact: Exact, state: OptimizerState | None) -> Float64Array | None:
    """The largest allowed |result - mean| of each checked element; None where a scheme promises none.

    Every scheme of sums pays one rounding a rank and one for the division; GComp adds N truncations of partial sums.
    """
    n_roundings = exact.n_ranks + 1
    sums = n_roundings * _FLOAT32_ROUNDING * exact.mean_magnitude + _SMALLEST_NORMAL
    if name in ("ddp", "plain", "zstd", "zlib"):
        return sums
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
        sums_plainly = options.get("mode", "packed") == "packed" and options.get("aggregator") != "switch"
        return sums if sums_plainly or options.get("mode") == "plain" else None
    return None
