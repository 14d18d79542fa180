"""ROW, T_wait, OSF and utilisation, from intervals: worked examples and bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.control.overlap import length_s, osf, overlap_s, row, union, utilisation
from gradwire.errors import InvalidArgument

intervals = st.lists(
    st.tuples(st.integers(0, 100), st.integers(0, 20)).map(lambda pair: (float(pair[0]), float(sum(pair)))), max_size=12
)


def covers(some: list[tuple[float, float]], moment: float) -> bool:
    return any(start <= moment < end for start, end in some)


@given(intervals, intervals)
def test_overlap_counts_every_moment_that_both_cover_once(first, second):
    seconds = [moment + 0.5 for moment in range(121)]
    assert overlap_s(first, second) == sum(covers(first, at) and covers(second, at) for at in seconds)
    assert length_s(first) == sum(covers(first, at) for at in seconds)
    assert overlap_s(first, second) == overlap_s(second, first) <= min(length_s(first), length_s(second))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (union([(3.0, 4.0), (0.0, 1.0), (1.0, 2.0), (3.5, 3.6)]), [(0.0, 2.0), (3.0, 4.0)]),  # sorted and joined
        (row([2.0, 3.0], [0.5, 1.0]), 2.0),  # Eq. 2: the least overlap by the longest wait
        (row([2.0], [0.0]), math.inf),
        (row([0.0, 1.0], [0.0, 0.0]), 0.0),
        # Fig. 3(b) in form: 6 s of backward and forward, synchronised from 1 s to 5 s, of which 2 s wait, in a round without
        # overlap into the forward pass: T_comp / (T_comp + T_wait), as the paper derives.
        (osf([(0.0, 3.0), (5.0, 8.0)], (1.0, 5.0)), pytest.approx(6 / (6 + 2))),
        (utilisation(5e8, 1e9, 1.0), 0.5),
    ],
)
def test_metrics_are_those_worked_out_by_hand(found, expected):
    assert found == expected


@pytest.mark.parametrize(
    "call",
    [
        lambda: union([(1.0, 0.5)]),
        lambda: union([(math.nan, 1.0)]),
        lambda: union([(0.0, math.inf)]),
        lambda: row([], []),
        lambda: row([-1.0], [1.0]),
        lambda: row([1.0], [math.nan]),
        lambda: osf([], (0.0, 1.0)),
        lambda: utilisation(1.0, 0.0, 1.0),
        lambda: utilisation(1.0, 1.0, 0.0),
        lambda: utilisation(-1.0, 1.0, 1.0),
    ],
)
def test_bad_intervals_and_rates_are_refused(call):
    with pytest.raises(InvalidArgument):
        call()
