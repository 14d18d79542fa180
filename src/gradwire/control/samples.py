"""Robust statistics of a few whole numbers, in whole numbers: the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence

_DEVIATION_SQUARED = 1571  # permille: pi / 2, which makes a normal distribution's mean deviation its standard deviation
_FEW = 8  # samples, which may lie together by chance
_MEDIAN_VARIANCE = 157  # percent: of a median against that of a mean, pi / 2
_SURE_ABOVE = 4  # squared: two standard errors


def median(values: Sequence[int]) -> int:
    """The middle value; of an even number the mean of the two, rounded down."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) // 2


def variance(values: Sequence[int]) -> int:
    """Of one sample, from the mean absolute deviation without the largest eighth: a slow step in ten does not move it, and
    steps of two or three kinds are not taken for steps of one.

    Never below (2 % of the median)^2; of fewer than eight samples never below (7 %)^2.
    """
    middle = median(values)
    deviations = sorted(abs(value - middle) for value in values)
    if len(deviations) > 3:
        deviations = deviations[: -max(1, len(deviations) // 8)]
    deviation = sum(deviations) // len(deviations)
    floor = middle * middle // (200 if len(values) < _FEW else 2500)
    return max(_DEVIATION_SQUARED * deviation * deviation // 1000, floor)


def noise_of(*groups: Sequence[int]) -> int:
    """The variance of the medians' difference: of one group, of its median."""
    return _MEDIAN_VARIANCE * sum(variance(values) // len(values) for values in groups) // 100


def is_beyond_noise(difference: int, noise: int) -> bool:
    """Whether a difference is more than two standard errors, the square of which is `noise`."""
    return difference * difference > _SURE_ABOVE * noise
