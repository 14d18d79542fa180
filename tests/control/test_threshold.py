"""The threshold law: the paper's table, its corrections, and what it refuses."""

import itertools
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.errors import InvalidArgument
from gradwire.schemes.slimgc.threshold import (
    MARGIN,
    NEVER,
    BucketSizes,
    LinearCost,
    SizeTimes,
    ThresholdTable,
    check_threshold,
    choose,
    crossing_bytes,
    exposed_s,
    has_drifted,
    log_spaced,
)

# Fig. 6: size in MB, t_c, t_c^q, t_p^q in ms.
FIGURE_6 = [(1.0, 28.5, 24.3, 6.3), (1.6, 30.5, 25.3, 6.5), (2.2, 40.2, 28.3, 6.8), (4.0, 75.5, 37.3, 8.5)]


def figure_6() -> ThresholdTable:
    return ThresholdTable(SizeTimes(int(mb * 1e6), *(ms / 1e3 for ms in times_ms)) for mb, *times_ms in FIGURE_6)


def seconds(line: LinearCost, size_bytes: int) -> float:
    return line.alpha_s + line.beta_s_per_byte * size_bytes


def times(sizes: list[int], raw: LinearCost, compressed: LinearCost) -> ThresholdTable:
    return ThresholdTable(
        SizeTimes(size, seconds(raw, size), 0.75 * seconds(compressed, size), 0.25 * seconds(compressed, size))
        for size in sizes
    )


def test_figure_6_of_the_paper_gives_its_benefits_and_its_threshold() -> None:
    table = figure_6()
    # The printed 1.15 and 1.65 are 40.2/35.1 = 1.145 and 75.5/45.8 = 1.648.
    assert [round(row.benefit, 2) for row in table.rows] == [0.93, 0.96, 1.15, 1.65]
    assert table.threshold_bytes("measured") == 2_200_000
    assert 1_000_000 < table.threshold_bytes("fit") < 2_200_000


def test_threshold_is_the_smallest_size_above_which_all_sizes_win() -> None:
    wins_in_between = [
        SizeTimes(1_000, 2.0, 1.0, 0.5),
        SizeTimes(10_000, 2.0, 2.0, 0.5),
        SizeTimes(100_000, 9.0, 2.0, 0.5),
        SizeTimes(1_000_000, 90.0, 5.0, 0.5),
    ]
    assert ThresholdTable(wins_in_between).threshold_bytes("measured") == 100_000
    loses_at_the_end = [*wins_in_between, SizeTimes(10_000_000, 90.0, 90.0, 1.0)]
    assert ThresholdTable(loses_at_the_end).threshold_bytes("measured") == NEVER
    even = [SizeTimes(10, 1.0, 0.5, 0.5)]  # a benefit of exactly 1 is none
    assert ThresholdTable(even).threshold_bytes("measured") == NEVER
    assert ThresholdTable(even).threshold_bytes("fit") == NEVER


@given(st.floats(0, 1e-2), st.floats(1e-10, 1e-7), st.floats(0, 1e-2), st.floats(1e-10, 1e-7))
def test_fit_finds_the_crossing_of_two_lines_from_their_points(
    raw_alpha: float, raw_beta: float, alpha: float, beta: float
) -> None:
    raw, compressed = LinearCost(raw_alpha, raw_beta), LinearCost(alpha, beta)
    table = times([400, 4_000, 40_000, 400_000, 4_000_000], raw, compressed)
    fitted = table.threshold_bytes("fit")
    assert table.raw.alpha_s == pytest.approx(raw.alpha_s, rel=1e-6, abs=1e-9)
    assert table.compressed.beta_s_per_byte == pytest.approx(compressed.beta_s_per_byte, rel=1e-6, abs=1e-14)
    assert 0 <= fitted <= NEVER
    for size in (400, 4_000, 40_000, 400_000, 4_000_000, 40_000_000, fitted - 1):
        gap, tolerance_s = seconds(raw, size) - seconds(compressed, size), 1e-6 * seconds(raw, size)
        if size >= fitted:
            assert gap >= -tolerance_s
        elif size == fitted - 1 >= 0 and fitted < NEVER:
            assert gap <= tolerance_s + 1e-15  # s: below what a sum keeps


def test_crossing_at_the_edges() -> None:
    for compressed, crossing in (((0.5, 0.5), 0), ((0.5, 1.0), 0), ((1.0, 1.0), NEVER)):
        assert crossing_bytes(LinearCost(1.0, 1.0), LinearCost(*compressed)) == crossing
    assert crossing_bytes(LinearCost(1.0, 0.5), LinearCost(0.5, 1.0)) == NEVER  # wins for small sizes only
    assert crossing_bytes(LinearCost(0.0, 1.0), LinearCost(10.0, 0.5)) == 21  # at 20 bytes both cost the same
    assert crossing_bytes(LinearCost(0.0, 1e-300), LinearCost(1.0, 0.0)) == NEVER


def test_fit_keeps_both_coefficients_from_being_negative() -> None:
    falling = LinearCost.fit([10, 1_000], [2.0, 1.0])
    assert falling.beta_s_per_byte == 0
    assert falling.alpha_s > 0
    assert LinearCost.fit([10, 1_000], [1e-9, 1.0]).alpha_s == 0
    assert LinearCost.fit([500], [1.0]) == LinearCost(0.0, 0.002)
    assert LinearCost.fit([500, 5_000], [0.0, 0.0]) == LinearCost(0.0, 0.0)


def test_noise_at_the_largest_size_does_not_move_the_start_up_cost() -> None:
    exact = [1e-3 + 1e-8 * size for size in (400, 40_000, 4_000_000)]
    noisy = LinearCost.fit([400, 40_000, 4_000_000], [*exact[:2], 1.5 * exact[2]])
    assert noisy.alpha_s == pytest.approx(1e-3, rel=0.1)


def test_rows_are_sorted_by_their_size_and_survive_their_plain_values() -> None:
    rows = SizeTimes(8, 3.0, 2.0, 1.5), SizeTimes(4, 1.0, 1.0, 1.0)
    assert ThresholdTable(rows).rows == (rows[1], rows[0])
    table = figure_6()
    assert ThresholdTable.from_rows(table.as_rows()).rows == table.rows
    for row in ({"size_bytes": 4}, 3):
        with pytest.raises(InvalidArgument):
            ThresholdTable.from_rows([row])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("size", "raw", "compressed", "codec"),
    [
        *((size, 1.0, 1.0, 1.0) for size in (0, -4, 4.5, True)),
        *((4, raw, 1.0, 1.0) for raw in (0.0, -1.0)),
        *((4, 1.0, compressed, 1.0) for compressed in (math.nan, "1")),
        (4, 1.0, 1.0, math.inf),
    ],
)
def test_impossible_measurements_are_refused(size: Any, raw: Any, compressed: Any, codec: Any) -> None:
    with pytest.raises(InvalidArgument):
        SizeTimes(size, raw, compressed, codec)


def test_other_bad_input_is_refused() -> None:
    with pytest.raises(InvalidArgument):
        ThresholdTable([])
    for bad in (-1, 0.5, math.nan, math.inf, "4096", True, None, NEVER + 1):
        with pytest.raises(InvalidArgument):
            check_threshold(bad)
    assert [check_threshold(good) for good in (0, 1500, 2e6, NEVER)] == [0, 1500, 2_000_000, NEVER]


def test_drift_is_a_change_in_either_direction_beyond_the_factor() -> None:
    assert has_drifted(1.0, 1.51, 1.5)
    assert has_drifted(1.52, 1.0, 1.5)
    assert not any(has_drifted(before, after, 1.5) for before, after in ((1.0, 1.5), (1.5, 1.0), (0.0, 5.0)))


def test_chosen_sizes_span_all_of_them_evenly_in_logarithm() -> None:
    assert log_spaced([40, 4, 400, 4], 8) == [4, 40, 400]
    sizes = [4 * n for n in range(1, 10_000)]
    chosen = log_spaced(sizes, 5)
    assert (chosen[0], chosen[-1]) == (4, 4 * 9_999)
    assert chosen == sorted(set(chosen))
    ratios = [b / a for a, b in itertools.pairwise(chosen)]
    assert max(ratios) / min(ratios) < 1.2
    assert log_spaced([], 4) == []


# ---- SlimGC's choice among several codecs: against every choice that there is, and from noisy measurements


# Raw, 8 bits, 2 bits and 1 bit with their codecs' times, at 1 Gb/s.
COSTS = [LinearCost(1e-4, 16e-9), LinearCost(2e-4, 5e-9), LinearCost(2.5e-4, 2.2e-9), LinearCost(2.5e-4, 2e-9)]


def drawn(seed: int) -> tuple[list[BucketSizes], list[LinearCost]]:
    draw = random.Random(seed)
    ready = sorted(draw.uniform(0, 0.05) for _ in range(3))
    buckets = [BucketSizes(at, tuple(int(10 ** draw.uniform(2, 6.5)) for _ in range(2))) for at in ready]
    speed = 10 ** draw.uniform(-1, 1)
    return buckets, [LinearCost(cost.alpha_s, cost.beta_s_per_byte * speed) for cost in COSTS]


def noisy(costs: list[LinearCost], draw: random.Random) -> list[LinearCost]:
    return [LinearCost(*(value * draw.uniform(0.95, 1.05) for value in vars(cost).values())) for cost in costs]


@pytest.mark.parametrize("seed", range(30))
def test_choice_is_within_the_margin_of_the_best_there_is(seed: int) -> None:
    buckets, costs = drawn(seed)
    every = [*itertools.product(range(len(costs)), repeat=2)]
    best = min(exposed_s(buckets, one, costs) for one in itertools.product(every, repeat=3))
    raw = exposed_s(buckets, [(0, 0)] * 3, costs)
    assert exposed_s(buckets, choose(buckets, costs), costs) <= best + 2 * MARGIN * raw


@pytest.mark.parametrize("seed", range(30))
def test_choices_from_noisy_tables_are_equal_or_as_good(seed: int) -> None:
    buckets, costs = drawn(seed)
    draw, raw = random.Random(seed), exposed_s(buckets, [(0, 0)] * 3, costs)
    first = choose(buckets, costs)
    again = [choose(buckets, noisy(costs, draw)) for _ in range(10)]
    gains = [abs(exposed_s(buckets, one, costs) - exposed_s(buckets, first, costs)) for one in again if one != first]
    assert len(gains) <= 1 or max(gains) <= 2 * MARGIN * raw
    kept = [choose(buckets, noisy(costs, draw), first) for _ in range(10)]
    assert sum(one == first for one in kept) >= 9


def test_what_the_backward_pass_hides_travels_raw_and_so_does_all_where_nothing_is_saved() -> None:
    hidden, last = BucketSizes(0.0, (4_000_000,)), BucketSizes(1.0, (4_000_000, 400))
    assert choose([hidden, last], COSTS) == ((0,), (2, 2))  # 400 bytes more are less than another start
    assert choose([last], [LinearCost(1e-4, 1e-9), LinearCost(1e-4, 0.95e-9)]) == ((0, 0),)
    assert choose([], COSTS) == ()
