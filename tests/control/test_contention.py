"""How many bits the processors have time for: from injected times, and agreed between two ranks."""

from __future__ import annotations

import pytest

from gradwire.schemes.aqgb.law import BitCeiling
from gradwire.schemes.aqgb.pacing import Pacing, read_core_times

FREE, CROWDED = (1.0, 0.0), (1.0, 1.0)  # running and waiting seconds of a round


def run(ceiling: BitCeiling, times: tuple[float, float], n_rounds: int) -> list[int]:
    seen = []
    for _ in range(n_rounds):
        ceiling.observe(*times, agreed_bits=ceiling.bits)
        seen.append(ceiling.bits)
    return seen


def test_free_processors_let_the_bits_double_up_to_the_most():
    assert run(BitCeiling(4, 32), FREE, 4) == [8, 16, 32, 32]
    assert run(BitCeiling(4, 20), FREE, 4) == [8, 16, 20, 20]


def test_crowded_processors_halve_the_bits_every_second_round_down_to_the_floor():
    ceiling = BitCeiling(4, 32)
    run(ceiling, FREE, 3)
    # Half of the runnable time is waited from the first round on: 0.25 on average, then 0.375, ...
    assert run(ceiling, CROWDED, 9) == [32, 16, 16, 8, 8, 4, 4, 4, 4]


def test_after_a_decrease_bits_rise_by_addition():
    ceiling = BitCeiling(4, 32)
    run(ceiling, FREE, 3)
    run(ceiling, CROWDED, 2)
    assert ceiling.bits == 16
    ceiling.observe(*FREE, agreed_bits=16)  # settles
    assert run(ceiling, FREE, 3) == [18, 20, 22]


def test_a_rank_with_free_processors_follows_the_one_without():
    ceiling = BitCeiling(4, 32)
    run(ceiling, FREE, 3)
    ceiling.observe(*FREE, agreed_bits=8)
    assert ceiling.bits == 10


def test_a_limit_of_one_never_lowers_the_bits():
    ceiling = BitCeiling(4, 32, max_contention=1.0)
    assert run(ceiling, (0.0, 1.0), 5)[-1] == 32


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
