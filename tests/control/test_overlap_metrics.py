"""ROW, T_wait and OSF, from intervals: worked examples and bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.schemes.aqgb.overlap import length_s, osf, overlap_s, row, union, without

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
    assert length_s(without(first, second)) == length_s(first) - overlap_s(first, second)
    assert overlap_s(first, second) == overlap_s(second, first) <= min(length_s(first), length_s(second))


def test_union_sorts_and_joins():
    assert union([(3.0, 4.0), (0.0, 1.0), (1.0, 2.0), (3.5, 3.6)]) == [(0.0, 2.0), (3.0, 4.0)]


def test_row_is_the_least_overlap_by_the_longest_wait():
    assert row([2.0, 3.0], [0.5, 1.0]) == 2.0  # Eq. 2
    assert row([2.0], [0.0]) == math.inf
    assert row([0.0, 1.0], [0.0, 0.0]) == 0.0


def test_osf_of_a_round_without_overlap_into_the_forward_pass():
    # Fig. 3(b) in form: 6 s of backward and forward, synchronised from 1 s to 5 s, of which 2 s wait.
    compute, update = [(0.0, 3.0), (5.0, 8.0)], (1.0, 5.0)
    assert osf(compute, update) == pytest.approx(6 / (6 + 4 - 2))
    assert osf(compute, update) == pytest.approx(6 / (6 + 2))  # = T_comp / (T_comp + T_wait), as the paper derives
