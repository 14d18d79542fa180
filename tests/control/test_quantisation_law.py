"""AQGB's control law: the paper's worked examples, and its bounds for every input."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.schemes.aqgb.law import (
    WORD_BITS,
    Deadlines,
    Profile,
    RateEstimate,
    Timetable,
    bits_of_ratio,
    first_stage_ratio,
    second_stage_bits,
    second_stage_ratio,
)


def first_stage_bits(*arguments, **options) -> int:
    return bits_of_ratio(first_stage_ratio(*arguments, **options))


rates = st.floats(0, 1e12)
times = st.floats(-1e4, 1e4)
sizes = st.floats(0, 1e13)
floors = st.floats(0.01, 1)


# ---- worked examples


def test_the_first_block_is_sent_in_the_time_until_the_second_appears():
    # Fig. 5(a): q1 = (t2 - t1) b / u. Table 1's last block, 11 M values, at 2.5 Gb/s / 15 receivers' copies: the next
    # block appears after 12.9 % of a backward pass of 0.9525 s.
    rate_bps, remaining_s, undelivered_bits = 2.5e9 / 15, 0.129 * 0.9525, 11e6 * 32
    assert first_stage_ratio(rate_bps, remaining_s, undelivered_bits, floor=0.01) == pytest.approx(
        rate_bps * remaining_s / undelivered_bits
    )
    assert first_stage_bits(rate_bps, remaining_s, undelivered_bits) == 4  # 0.058 is below the floor of 4 bits


def test_what_was_not_delivered_in_time_counts_with_the_next_block():
    late = first_stage_ratio(1e9, 0.1, 2e8)
    assert late == 0.5
    assert first_stage_ratio(1e9, 0.1, 4e8) == 0.25


def test_after_the_last_block_everything_goes_at_the_floor():
    assert first_stage_ratio(1e12, None, 1.0) == 0.125
    assert first_stage_bits(1e12, None, 1.0, floor=0.375) == 12  # Fig. 9's floor


def test_the_second_stage_sends_the_share_of_the_rest_that_passes_in_time():
    # 20 bits of 1000 values are left: 20,000 bits, of which half pass.
    assert second_stage_bits(1e6, 0.01, 1_000, sent_bits=12) == 10
    assert second_stage_bits(1e6, 0.0, 1_000, sent_bits=12) == 0
    assert second_stage_bits(1e9, 1.0, 1_000, sent_bits=12) == 20
    assert second_stage_bits(1e9, 1.0, 1_000, sent_bits=32) == 0


def test_bits_are_rounded_up_and_never_below_two():
    assert [bits_of_ratio(ratio) for ratio in (0.01, 0.125, 0.126, 1.0)] == [2, 4, 5, 32]


# ---- for every input


@given(rates, times, sizes, floors)
def test_the_first_ratio_stays_between_floor_and_one(rate_bps, remaining_s, undelivered_bits, floor):
    assert floor <= first_stage_ratio(rate_bps, remaining_s, undelivered_bits, floor) <= 1
    assert 2 <= first_stage_bits(rate_bps, remaining_s, undelivered_bits, floor) <= WORD_BITS


@given(rates, times, sizes)
def test_the_second_ratio_stays_between_zero_and_one(rate_bps, remaining_s, remaining_bits):
    assert 0 <= second_stage_ratio(rate_bps, remaining_s, remaining_bits) <= 1


@given(rates, rates, st.floats(0.001, 1e4), sizes, floors)
def test_a_faster_link_never_sends_fewer_bits(one, other, remaining_s, bits, floor):
    slow, fast = sorted((one, other))
    assert first_stage_bits(slow, remaining_s, bits, floor) <= first_stage_bits(fast, remaining_s, bits, floor)


@given(rates, st.floats(0, 1e4), st.integers(1, 10**9), st.integers(2, 32))
def test_both_stages_together_never_exceed_the_word(rate_bps, remaining_s, n_values, sent_bits):
    assert 0 <= second_stage_bits(rate_bps, remaining_s, n_values, sent_bits) <= WORD_BITS - sent_bits


@given(st.floats(1e3, 1e12), st.lists(st.floats(1e-6, 10), min_size=1, max_size=30))
def test_a_steady_rate_is_estimated_exactly(rate_bps, durations):
    estimate = RateEstimate()
    for duration_s in durations:
        estimate.observe(rate_bps * duration_s, duration_s)
    assert estimate.rate_bps == pytest.approx(rate_bps)


def test_a_rate_that_changes_is_followed():
    estimate = RateEstimate()
    for _ in range(20):
        estimate.observe(1e9 * 0.1, 0.1)
    assert estimate.rate_bps == pytest.approx(1e9)
    for _ in range(20):
        estimate.observe(1e8 * 0.1, 0.1)
    assert estimate.rate_bps == pytest.approx(1e8, rel=0.2)


def test_nothing_arriving_falls_to_the_floor():
    estimate = RateEstimate()
    assert estimate.rate_bps == 0
    estimate.observe(0, 3.0)
    assert first_stage_bits(estimate.rate_bps, 1.0, 1e6) == 4
    estimate.observe(1e6, 0.0)  # too short for the clock
    assert estimate.rate_bps == 0


# ---- deadlines

_TIMES = Timetable(backward_s=(0.1, 0.2, 0.3), turnaround_s=0.05, forward_s=(0.1, 0.2, 0.4))


def test_times_until_events_count_down_from_the_last_gradient():
    assert _TIMES.until_next_gradient(1, 0.05) == pytest.approx(0.15)
    assert _TIMES.until_next_gradient(1, 0.5) == pytest.approx(-0.3)
    assert _TIMES.until_next_gradient(3, 0.0) is None
    assert _TIMES.until_forward(3, 0.0) == pytest.approx([0.05, 0.15, 0.35])
    assert _TIMES.until_forward(1, 0.1) == pytest.approx([0.45, 0.55, 0.75])


def test_one_odd_round_does_not_move_the_profile():
    profile = Profile()
    assert profile.timetable is None
    for _ in range(4):
        profile.add(_TIMES)
    profile.add(Timetable((9.0, 9.0, 9.0), 9.0, (9.0, 9.0, 9.0)))  # a host that was suspended
    assert profile.timetable == _TIMES


def test_a_deadline_is_the_latest_of_all_ranks_on_whatever_clock():
    deadlines = Deadlines(n_ranks=3)
    assert deadlines.remaining_s(0, 0.0) is None
    deadlines.tell(0, [1.0, 2.0], now_s=100.0)
    deadlines.tell(2, [0.5, 3.0], now_s=100.1)
    assert deadlines.remaining_s(0, 100.5) == pytest.approx(0.5)
    assert deadlines.remaining_s(1, 100.5) == pytest.approx(2.6)
    deadlines.tell(0, [0.1, 0.2], now_s=100.6)
    assert deadlines.remaining_s(0, 101.0) == pytest.approx(-0.3)
