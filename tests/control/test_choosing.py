"""SlimGC's choice among several codecs: against every choice that there is, and from noisy measurements."""

from __future__ import annotations

import itertools
import random

import pytest

from gradwire.schemes.slimgc.choosing import MARGIN, BucketSizes, choose, exposed_s
from gradwire.schemes.slimgc.threshold import LinearCost

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
