"""Times that follow from sizes and rates alone, computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from gradwire.exchange.parts import CHUNK_ELEMENTS
from gradwire.schemes.slimgc.threshold import NEVER
from gradwire_lab.simulator.jitter import Uniform
from gradwire_lab.simulator.schemes.aqgb import AqgbModel
from gradwire_lab.simulator.schemes.base import SchemeModel
from gradwire_lab.simulator.schemes.broadcast import FixedBroadcast
from gradwire_lab.simulator.schemes.collective import Collective, Cost, ParameterServer
from gradwire_lab.simulator.schemes.slimgc import SlimGc
from gradwire_lab.simulator.simulation import Simulation
from gradwire_lab.simulator.stage import Setting
from gradwire_lab.simulator.workloads import BlockTimes, WorkloadTimes

# 100 values of 32 bits each: 3,200 bits; forward 1 s and backward 2 s a block.
TWO = WorkloadTimes("two", (BlockTimes("a", 100, 1.0, 2.0), BlockTimes("b", 100, 1.0, 2.0)), "by hand")
ONE = WorkloadTimes("one", (BlockTimes("a", 100, 1.0, 2.0),), "by hand")
STILL = Uniform(0.0)


def ends(make, workload: WorkloadTimes, n_workers: int, rate_bps: float, rounds: int = 2, **setting) -> list[float]:  # type: ignore[no-untyped-def]
    """When each round's gradients are everywhere."""
    simulation = Simulation(Setting(workload, n_workers, rate_bps, jitter=STILL, **setting), make)
    simulation.run(rounds=rounds)
    return simulation.round_ends_s


HALVES = Cost(64.0 * 3 / 4)  # what each of four workers sends: 3 shares of both halves
CASES: dict[str, tuple[Any, WorkloadTimes, int, float, dict[str, Any], list[float]]] = {
    # 3 copies of 3,200 bits on every down-link of 960 bits a second: 10 s after the backward pass; then all over again.
    "broadcast of one block": (lambda s: FixedBroadcast(s, 32), ONE, 4, 960.0, {}, [13.0, 26.0]),
    # 6 hops of 800 bits at 400 bits a second, each 0.5 s late: 15 s.
    "ring of 2 (n - 1) parts": (
        lambda s: Collective(s, Cost(64.0 * 3 / 4, n_hops=6)), ONE, 4, 400.0, {"latency_s": 0.5}, [18.0, 36.0],
    ),
    "direct exchange, which sends as much and waits twice": (
        lambda s: Collective(s, Cost(64.0 * 3 / 4, n_hops=2), "exchange"), ONE, 4, 400.0, {"latency_s": 0.5},
        [16.0, 32.0],
    ),
    # Links of 4,800 bits a second, rack links of 400: 4,800 bits go through each rack's link in the ring: 12 s.
    "ring that crosses a rack once": (
        lambda s: Collective(s, HALVES), ONE, 4, 4800.0, {"racks": 2, "core_bps": 400.0}, [15.0, 30.0],
    ),
    # Each of 2 workers sends 2 of its 3 shares of 4,800 bits out of the rack: 6,400 bits, 16 s.
    "exchange with all that leaves a rack": (
        lambda s: Collective(s, HALVES, "exchange"), ONE, 4, 4800.0, {"racks": 2, "core_bps": 400.0}, [19.0, 38.0],
    ),
    # 4 x 3,200 bits into the server at 1,280 bits a second and out of it again: 20 s; two servers share the load.
    "parameter server, bound by its link": (ParameterServer, ONE, 4, 1280.0, {}, [23.0, 46.0]),
    "two parameter servers": (lambda s: ParameterServer(s, 2), ONE, 4, 1280.0, {}, [13.0, 26.0]),
    # b from 4 to 14 s at 320 bits a second, a, there at 6 s, from 14 to 24 s; nothing of the next round starts before.
    "buckets in turn beside the backward pass": (
        lambda s: Collective(s, Cost(32.0)), TWO, 2, 320.0, {}, [24.0, 24.0 + 24.0],
    ),
    "a worker alone, who waits for nobody": (lambda s: Collective(s, Cost(0.0)), TWO, 1, 100.0, {}, [6.0, 12.0]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "workload", "n_workers", "rate_bps", "setting", "expected_s"), CASES.values(), ids=CASES
)
def test_rounds_end_when_sizes_and_rates_say(
    make: Any, workload: WorkloadTimes, n_workers: int, rate_bps: float, setting: Any, expected_s: list[float]
) -> None:
    assert ends(make, workload, n_workers, rate_bps, **setting) == pytest.approx(expected_s)


def test_the_newest_block_is_broadcast_first() -> None:
    # b is there at 4 s, a at 6 s. One receiver's copy of 3,200 bits takes 10 s at 320 bits a second: a from 6 to 16 s, b's
    # other 8 s after it. The forward pass of a runs from 16 to 17 s, that of b from 24 to 25 s; b's gradient is there at 27.
    simulation = Simulation(Setting(TWO, 2, 320.0, jitter=STILL), lambda s: FixedBroadcast(s, 32))
    metrics = simulation.run(rounds=2)
    assert simulation.round_ends_s == pytest.approx([24.0, 24.0 + 23.0])
    assert metrics.rounds[0].wait_s == pytest.approx(10.0 + 7.0)
    # Computation of the cyclic round: backward 2 to 6 s, forward 16 to 17 and 24 to 25 s; communication 4 to 24 s.
    assert metrics.rounds[0].overlap_s == pytest.approx(2.0 + 1.0)
    assert metrics.rounds[0].row == pytest.approx(3.0 / 17.0)
    assert metrics.rounds[0].compute_s == pytest.approx(6.0)
    # From the first gradient (4 s) to the last block (24 s) 20 s, of which computation covers 3.
    assert metrics.rounds[0].osf == pytest.approx(6.0 / (6.0 + 20.0 - 3.0))


@pytest.mark.parametrize(
    ("lane", "expected_s"),
    [
        # b: encode 4 to 5, send 5 to 15, decode to 16; a: encode 16 to 17, send to 27, decode to 28.
        ("in turn", 28.0),
        # a is encoded while b is sent, and its sending shares nothing with b's decoding: 15 to 25, decoded at 26. Both are
        # on the link from 7 s on, which they share: the last one still ends when both have been sent, and is decoded.
        ("asynchronous", 26.0),
        # Codec (2 s) and wire (10 s) side by side, of one chunk: nothing overlaps, 12 s each.
        ("pipelined", 28.0),
    ],
)
def test_codec_times_count_where_the_lane_says(lane: str, expected_s: float) -> None:
    cost = Cost(32.0, 0.01, 0.01, lane=lane)  # type: ignore[arg-type]
    assert ends(lambda s: Collective(s, cost), TWO, 2, 320.0, rounds=1) == pytest.approx([expected_s])


def test_a_pipeline_of_many_chunks_hides_the_shorter_of_codec_and_wire() -> None:
    n_values = 2 * 10 * CHUNK_ELEMENTS  # ten chunks in each of two parts
    workload = WorkloadTimes("big", (BlockTimes("a", n_values, 1.0, 2.0),), "by hand")
    cost = Cost(32.0, 1 / n_values, 1 / n_values, lane="pipelined")
    made = ends(lambda s: Collective(s, cost), workload, 2, 32.0 * n_values / 10, rounds=1)
    assert made == pytest.approx([3.0 + 10.0 + 2.0 / 10])


def test_aqgb_without_a_profile_sends_the_floor_and_then_what_time_allows() -> None:
    def make(simulation: Simulation) -> SchemeModel:
        return AqgbModel(simulation, floor=0.125)

    # One round without a profile: 4 bits of 100 values to one receiver at 40 bits a second, 10 s; and in a single block
    # nothing is left to be refined behind the forward pass.
    assert ends(make, ONE, 2, 40.0, rounds=1) == pytest.approx([13.0])
    # On a link with time to spare b goes out whole before a appears, or behind a's forward pass where there was no profile
    # before; a, which everybody waits for, keeps the floor.
    metrics = Simulation(Setting(TWO, 2, 1e6, jitter=STILL), make).run(rounds=4)
    assert [one.sent_bits for one in metrics.rounds] == [32 * 100 + 4 * 100] * 3


def test_slimgc_compresses_from_its_threshold_on() -> None:
    unequal = WorkloadTimes("unequal", (BlockTimes("a", 100, 1.0, 2.0), BlockTimes("b", 10_000, 1.0, 2.0)), "by hand")
    # One bit a value both ways, and a codec of 1 ms a value: worth it where 31 bits take longer than that.
    cost = Cost(1.0, 1e-3, 0.0)
    slow = Simulation(Setting(unequal, 2, 1000.0, jitter=STILL), lambda s: SlimGc(s, cost))
    fast = Simulation(Setting(unequal, 2, 1e6, jitter=STILL), lambda s: SlimGc(s, cost))
    assert (slow.scheme.threshold_bytes, fast.scheme.threshold_bytes) == (1, NEVER)  # type: ignore[attr-defined]
    # Given: only b, 40,000 bytes, is compressed. b is there at 4 s, takes 10 s to encode, and from 14 s on a's 3,200 bits,
    # which have waited for the lane, share the link with b's 10,000: 13,200 bits at 1,000 a second.
    run = Simulation(Setting(unequal, 2, 1000.0, jitter=STILL), lambda s: SlimGc(s, cost, threshold_bytes=1000))
    run.run(rounds=1)
    assert run.round_ends_s == pytest.approx([4.0 + 10.0 + 13.2])
