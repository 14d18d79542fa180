"""How many bits the processors have time for: from injected times, and agreed between two ranks."""

from __future__ import annotations

import pytest

from gradwire.control.contention import BitCeiling
from gradwire.errors import InvalidArgument
from gradwire.schemes.aqgb.core_times import read_core_times
from gradwire.schemes.aqgb.pacing import Pacing

FREE, CROWDED = (1.0, 0.0), (1.0, 1.0)  # running and waiting seconds of a round


@pytest.mark.parametrize(
    ("limits", "rounds", "seen"),
    [
        ((4, 32), [FREE] * 4, [8, 16, 32, 32]),  # free processors let the bits double up to the most
        ((4, 20), [FREE] * 4, [8, 16, 20, 20]),
        # Crowded ones halve them every second round down to the floor. Half of the runnable time is waited from the first
        # round on: 0.25 on average, then 0.375, ...
        ((4, 32), [FREE] * 3 + [CROWDED] * 9, [8, 16, 32] + [32, 16, 16, 8, 8, 4, 4, 4, 4]),
        # After a decrease they settle for a round and rise by addition.
        ((4, 32), [FREE] * 3 + [CROWDED] * 2 + [FREE] * 4, [8, 16, 32] + [32, 16] + [16, 18, 20, 22]),
        ((4, 32, 1.0), [(0.0, 1.0)] * 5, [8, 16, 32, 32, 32]),  # a limit of one never lowers them
    ],
)
def test_bits_follow_the_processors(limits, rounds, seen):
    ceiling, found = BitCeiling(*limits), []
    for times in rounds:
        ceiling.observe(*times, agreed_bits=ceiling.bits)
        found.append(ceiling.bits)
    assert found == seen


def test_a_rank_with_free_processors_follows_the_one_without():
    ceiling = BitCeiling(4, 32)
    for agreed in (4, 8, 16):
        ceiling.observe(*FREE, agreed_bits=agreed)
    ceiling.observe(*FREE, agreed_bits=8)
    assert ceiling.bits == 10


@pytest.mark.parametrize("times", [(-1.0, 0.0), (0.0, float("nan")), (float("inf"), 0.0)])
def test_times_that_cannot_be_are_refused(times):
    with pytest.raises(InvalidArgument):
        BitCeiling(4).observe(*times, agreed_bits=4)


@pytest.mark.parametrize("arguments", [(0, 32), (33, 32), (4, 33), (4, 32, 0.0), (4, 32, 1.5)])
def test_bounds_out_of_range_are_refused(arguments):
    with pytest.raises(InvalidArgument):
        BitCeiling(*arguments)


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
    before, after = read_core_times(), read_core_times()
    if before is None or after is None:
        pytest.skip("this system does not count how long threads wait for a core")
    assert after[0] >= before[0] > 0
    assert after[1] >= before[1] >= 0
