"""AQGB's control law: the paper's worked examples, its bounds for every input, and the metrics of overlap."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.schemes.aqgb.law import (
    WORD_BITS,
    BitCeiling,
    Deadlines,
    Profile,
    RateEstimate,
    Timetable,
    bits_of_ratio,
    first_stage_ratio,
    second_stage_bits,
)
from gradwire.schemes.aqgb.overlap import length_s, osf, overlap_s, row, union, without
from gradwire.schemes.aqgb.pacing import Pacing, read_core_times


def first_stage_bits(*arguments, **options) -> int:
    return bits_of_ratio(first_stage_ratio(*arguments, **options))


rates = st.floats(0, 1e12)
times = st.floats(-1e4, 1e4)
sizes = st.floats(0, 1e13)
floors = st.floats(0.01, 1)


def test_the_first_block_is_sent_in_the_time_until_the_second_appears():
    # Fig. 5(a): q1 = (t2 - t1) b / u. Table 1's last block, 11 M values, at 2.5 Gb/s / 15 receivers' copies: the next
    # block appears after 12.9 % of a backward pass of 0.9525 s.
    rate_bps, remaining_s, undelivered_bits = 2.5e9 / 15, 0.129 * 0.9525, 11e6 * 32
    assert first_stage_ratio(rate_bps, remaining_s, undelivered_bits, floor=0.01) == pytest.approx(
        rate_bps * remaining_s / undelivered_bits
    )
    assert first_stage_bits(rate_bps, remaining_s, undelivered_bits) == 4  # 0.058 is below the floor of 4 bits


def test_what_was_late_counts_with_the_next_block_and_after_the_last_everything_goes_at_the_floor():
    assert [first_stage_ratio(1e9, 0.1, undelivered_bits) for undelivered_bits in (2e8, 4e8)] == [0.5, 0.25]
    assert first_stage_ratio(1e12, None, 1.0) == 0.125
    assert first_stage_bits(1e12, None, 1.0, floor=0.375) == 12  # Fig. 9's floor


def test_the_second_stage_sends_the_share_of_the_rest_that_passes_in_time():
    # 20 bits of 1000 values are left: 20,000 bits, of which half pass.
    for rate_bps, remaining_s, sent_bits, bits in (
        (1e6, 0.01, 12, 10),
        (1e6, 0.0, 12, 0),
        (1e9, 1.0, 12, 20),
        (1e9, 1.0, 32, 0),
    ):
        assert second_stage_bits(rate_bps, remaining_s, 1_000, sent_bits) == bits


def test_bits_are_rounded_up_and_never_below_two():
    assert [bits_of_ratio(ratio) for ratio in (0.01, 0.125, 0.126, 1.0)] == [2, 4, 5, 32]


@given(rates, times, sizes, floors)
def test_the_first_ratio_stays_between_floor_and_one(rate_bps, remaining_s, undelivered_bits, floor):
    assert floor <= first_stage_ratio(rate_bps, remaining_s, undelivered_bits, floor) <= 1
    assert 2 <= first_stage_bits(rate_bps, remaining_s, undelivered_bits, floor) <= WORD_BITS


@given(rates, rates, st.floats(0.001, 1e4), sizes, floors)
def test_a_faster_link_never_sends_fewer_bits(one, other, remaining_s, bits, floor):
    slow, fast = sorted((one, other))
    assert first_stage_bits(slow, remaining_s, bits, floor) <= first_stage_bits(fast, remaining_s, bits, floor)


@given(rates, times, st.integers(1, 10**9), st.integers(2, 32))
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
    for rate_bps, off in ((1e9, 1e-6), (1e8, 0.2)):
        for _ in range(20):
            estimate.observe(rate_bps * 0.1, 0.1)
        assert estimate.rate_bps == pytest.approx(rate_bps, rel=off)


def test_nothing_arriving_falls_to_the_floor():
    estimate = RateEstimate()
    assert estimate.rate_bps == 0
    estimate.observe(0, 3.0)
    assert first_stage_bits(estimate.rate_bps, 1.0, 1e6) == 4
    estimate.observe(1e6, 0.0)  # too short for the clock
    assert estimate.rate_bps == 0


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


# ---- how many bits the processors have time for: from injected times, and agreed between two ranks

FREE, CROWDED = (1.0, 0.0), (1.0, 1.0)  # running and waiting seconds of a round


@pytest.mark.parametrize(
    ("arguments", "rounds", "bits"),
    [
        # Free processors let the bits double up to the most.
        ((4, 32), 4 * [FREE], [8, 16, 32, 32]),
        ((4, 20), 4 * [FREE], [8, 16, 20, 20]),
        # Crowded ones halve them every second round down to the floor: half of the runnable time is waited from the first
        # round on, 0.25 on average, then 0.375, ...
        ((4, 32), 3 * [FREE] + 9 * [CROWDED], [8, 16, 32, 32, 16, 16, 8, 8, 4, 4, 4, 4]),
        # After a decrease, and a round that settles, bits rise by addition.
        ((4, 32), 3 * [FREE] + 2 * [CROWDED] + 4 * [FREE], [8, 16, 32, 32, 16, 16, 18, 20, 22]),
        # A limit of one never lowers them.
        ((4, 32, 1.0), 5 * [(0.0, 1.0)], [8, 16, 32, 32, 32]),
    ],
)
def test_bits_follow_the_processors_time(arguments, rounds, bits):
    ceiling = BitCeiling(*arguments)
    for times, expected in zip(rounds, bits, strict=True):
        ceiling.observe(*times, agreed_bits=ceiling.bits)
        assert ceiling.bits == expected


def test_a_rank_with_free_processors_follows_the_one_without():
    ceiling = BitCeiling(4, 32)
    for agreed_bits, bits in ((4, 8), (8, 16), (16, 32), (8, 10)):
        ceiling.observe(*FREE, agreed_bits=agreed_bits)
        assert ceiling.bits == bits


def test_all_ranks_send_with_the_lowest_ceiling():
    running = [0.0]

    def core_times() -> tuple[float, float]:
        running[0] += 1.0
        return running[0], 0.0

    pacing = Pacing(0, 3, [10], lambda: 1.0, core_times=core_times)
    assert pacing.ceiling_bits == 4
    for _ in range(3):
        pacing.begin_step()
    assert (pacing.own_ceiling_bits, pacing.ceiling_bits) == (32, 32)
    pacing.hear(1, 0, 0, None, ceiling_bits=32)
    pacing.hear(2, 0, 0, None, ceiling_bits=6)
    assert pacing.ceiling_bits == 32, "within a round it stays"
    pacing.begin_step()
    assert pacing.ceiling_bits == 6
    pacing.begin_step()
    assert pacing.own_ceiling_bits == 8


def test_without_core_times_only_the_network_bounds_the_bits():
    for core_times in (None, lambda: None):
        pacing = Pacing(0, 2, [10], lambda: 1.0, core_times=core_times)
        pacing.begin_step()
        assert pacing.ceiling_bits == 32


def test_this_process_has_run_and_time_does_not_go_back():
    if (before := read_core_times()) is None or (after := read_core_times()) is None:
        pytest.skip("this system does not count how long threads wait for a core")
    assert after[0] >= before[0] > 0
    assert after[1] >= before[1] >= 0


# ---- ROW, T_wait and OSF, from intervals: worked examples and bounds

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
