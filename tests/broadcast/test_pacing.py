"""How many bits a rank sends, from injected times and acknowledgements: no network, no clock."""

import pytest

from gradwire.errors import InvalidArgument
from gradwire.schemes.aqgb.overlap import OverlapFigures
from gradwire.schemes.aqgb.pacing import CoreTimes, Pacing, PacingLimits

N = 100_000  # values of each of two blocks


class Rig:
    """One rank of two: gradients of block 1 and 0 appear 0.1 s apart, then 0.1 s pass until the forward pass, in which
    block 0 takes 0.2 s."""

    def __init__(self, core_times: CoreTimes | None = None, **limits: float) -> None:
        self.now_s, self.acknowledged = 10.0, [0, 0]
        self.pacing = Pacing(0, 2, [N, N], lambda: self.now_s, PacingLimits(confidence=1.0, **limits), core_times)

    def acknowledge(self, rate_bps: float, seconds: float = 1.0) -> None:
        self.acknowledged[0] += int(rate_bps * seconds / 8)
        self.acknowledged[1] += int(seconds * 1e6)
        self.pacing.hear(1, *self.acknowledged, None)

    def run_backward(self) -> list[int]:
        """Both blocks appear and are sent; their bits."""
        self.pacing.begin_step()
        bits = []
        for _ in range(2):
            self.pacing.note_gradient()
            bits.append(self.pacing.first_bits(N))
            self.now_s += 0.1
        return bits

    def run_rounds(self, n_rounds: int) -> "Rig":
        for _ in range(n_rounds):
            self.run_backward()
            self.run_forward()
        return self

    def run_forward(self) -> None:
        self.pacing.begin_forward()
        for block in (0, 1):
            self.pacing.note_forward(block, self.pacing.now(), 0.0)
            self.now_s += 0.2


@pytest.mark.parametrize("n_rounds", [0, 3])
def test_the_first_rounds_and_those_of_which_nothing_is_acknowledged_are_sent_at_the_floor(n_rounds):
    """And have no second stage."""
    rig = Rig()
    for _ in range(n_rounds):
        rig.run_rounds(1).acknowledge(0.0)
    assert rig.run_backward() == [4, 4]
    assert rig.pacing.more_bits(1, 4) == 0


def test_bits_follow_the_rate_that_is_acknowledged():
    rig = Rig().run_rounds(2)
    bits = {}
    for rate_bps in (1e9, 7.9e6, 15.9e6, 1e9, 1e6):
        rig.acknowledge(rate_bps, seconds=10.0)
        bits[rate_bps] = rig.run_backward()[0]
        rig.run_forward()
    # 0.1 s until the next block, N values: 8 Mb/s is 8 bits a value, rounded up.
    assert bits == {1e9: 32, 7.9e6: 8, 15.9e6: 16, 1e6: 4}


def at_10_megabits() -> Rig:
    """After a backward pass."""
    rig = Rig().run_rounds(2)
    rig.acknowledge(10e6, seconds=10.0)
    rig.run_backward()
    return rig


def test_the_second_stage_uses_the_time_until_the_block_is_needed():
    rig = at_10_megabits()  # ends at the time of the forward pass: nothing for block 0, 0.2 s for block 1
    assert rig.pacing.more_bits(0, 4) == 0
    assert rig.pacing.more_bits(1, 4) == 20
    assert rig.pacing.more_bits(1, 32) == 0
    rig.pacing.sent(10_000_000 // 8 // 10)  # 0.1 s of it is taken by what is on its way
    assert rig.pacing.more_bits(1, 4) == 10
    rig.now_s += 0.3
    assert rig.pacing.more_bits(1, 4) == 0


def test_the_latest_rank_sets_the_deadline():
    rig = at_10_megabits()
    rig.pacing.hear(1, *rig.acknowledged, [0.1, 0.25])
    assert rig.pacing.more_bits(0, 4) == 10
    assert rig.pacing.more_bits(1, 4) == 25


def test_what_peers_are_told_counts_from_when_they_hear_it():
    rig = at_10_megabits()
    assert rig.pacing.told_remaining_s() == pytest.approx(rig.pacing.remaining_s())
    rig.pacing.sent(10_000_000 // 8 // 10)  # 0.1 s of what is on its way goes before the head
    now_s = rig.pacing.remaining_s()
    assert rig.pacing.told_remaining_s() == pytest.approx([seconds - 0.1 for seconds in now_s])


def test_floor_and_ceiling_bound_the_bits():
    rig = Rig(floor=0.375, ceiling=0.5)
    rig.acknowledge(1e12)
    rig.run_rounds(2)
    assert rig.run_backward() == [16, 12]  # the last block of a round always goes at the floor
    assert rig.pacing.more_bits(1, 12) == 4


@pytest.mark.parametrize("jump", [-1.0, float("nan"), float("inf")])
def test_a_clock_that_jumps_is_refused(jump):
    rig = Rig()
    rig.run_backward()
    rig.now_s += jump
    with pytest.raises(InvalidArgument, match="clock"):
        rig.pacing.begin_forward()


def test_rounds_that_cores_bound_are_counted_and_the_first_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Threads that wait half of their time hold the bits; with cores to spare nothing is counted."""
    for waiting_s, is_held in ((1.0, True), (0.0, False)):
        times = [0.0, 0.0]

        def core_times(times: list[float] = times, waiting_s: float = waiting_s) -> tuple[float, float]:
            times[0], times[1] = times[0] + 1.0, times[1] + waiting_s
            return times[0], times[1]

        caplog.clear()
        rig = Rig(core_times=core_times)
        rig.acknowledge(1e12)
        held = rig.run_rounds(6).pacing.figures()["rounds_held"]
        assert (held >= 4) == is_held
        assert len([one for one in caplog.messages if "wait for a core" in one]) == is_held


def test_the_group_s_row_is_the_least_overlap_by_the_longest_wait_of_all_ranks() -> None:
    now = iter([0.0, 1.0, 1.5, 3.0, 4.0]).__next__
    figures = OverlapFigures(["a"], [10], now)
    figures.end_backward()  # 0: rounds begin
    figures.begin_forward()  # 1
    figures.note("wait", 500_000_000)  # to 1.5
    figures.note("receive", 1_000_000_000)  # 2 to 3, while it computes
    figures.end_backward()  # 4
    assert figures.hidden_us == [1_000_000, 500_000]
    assert figures.as_dict()["group_row"] == figures.as_dict()["row"] == 2
    figures.hear(1, [3_000_000, 2_000_000])
    figures.hear(2, [700_000, 0])
    assert figures.as_dict()["group_row"] == 0.35
