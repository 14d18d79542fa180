"""Times that follow from sizes and rates alone, computed by hand."""

import math
import random
from typing import Any

import pytest

from gradwire.exchange.parts import CHUNK_ELEMENTS
from gradwire.schemes.auto.costs import SHAPES, CodecCost, SharedCores, StepCost, predict_s
from gradwire.schemes.slimgc.threshold import NEVER
from gradwire_lab.simulator.schemes.broadcast import AqgbModel, FixedBroadcast
from gradwire_lab.simulator.schemes.collective import Collective, FullyShard, LocalSteps, ParameterServer, SlimGc
from gradwire_lab.simulator.simulation import Simulation
from gradwire_lab.simulator.stage import Setting, Uniform
from gradwire_lab.simulator.workloads import BlockTimes, WorkloadTimes

# 100 values of 32 bits each: 3,200 bits; forward 1 s and backward 2 s a block.
TWO = WorkloadTimes("two", (BlockTimes("a", 100, 1.0, 2.0), BlockTimes("b", 100, 1.0, 2.0)), "by hand")
ONE = WorkloadTimes("one", (BlockTimes("a", 100, 1.0, 2.0),), "by hand")
N_MANY = 2 * 10 * CHUNK_ELEMENTS
MANY = WorkloadTimes("many", (BlockTimes("a", N_MANY, 1.0, 2.0),), "by hand")
STILL, CODEC = Uniform(0.0), CodecCost(0.01, 0.01)


def ends(make, workload: WorkloadTimes, n_workers: int, rate_bps: float, rounds: int = 2, **setting) -> list[float]:  # type: ignore[no-untyped-def]
    """When each round's gradients are everywhere."""
    simulation = Simulation(Setting(workload, n_workers, rate_bps, jitter=STILL, **setting), make)
    assert simulation.run(rounds=rounds).utilisation >= 0
    return simulation.round_ends_s


CASES: dict[str, tuple[Any, WorkloadTimes, int, float, dict[str, Any], list[float]]] = {
    # 3 copies of 3,200 bits on every down-link of 960 bits a second: 10 s after the backward pass; then all over again.
    "broadcast of one block": (lambda s: FixedBroadcast(s, 32), ONE, 4, 960.0, {}, [13.0, 26.0]),
    # 6 hops of 800 bits at 400 bits a second, each 0.5 s late: 15 s.
    "ring of 2 (n - 1) parts": (Collective, ONE, 4, 400.0, {"latency_s": 0.5}, [18.0, 36.0]),
    "direct exchange, which sends as much and waits twice": (
        lambda s: Collective(s, collective="direct"), ONE, 4, 400.0, {"latency_s": 0.5}, [16.0, 32.0],
    ),
    # Links of 4,800 bits a second, rack links of 400: 4,800 bits go through each rack's link in the ring: 12 s.
    "ring that crosses a rack once": (
        Collective, ONE, 4, 4800.0, {"racks": 2, "core_bps": 400.0}, [15.0, 30.0],
    ),
    # Each of 2 workers sends 2 of its 3 shares of 4,800 bits out of the rack: 6,400 bits, 16 s.
    "exchange with all that leaves a rack": (
        lambda s: Collective(s, collective="direct"), ONE, 4, 4800.0, {"racks": 2, "core_bps": 400.0}, [19.0, 38.0],
    ),
    # 4 x 3,200 bits into the server at 1,280 bits a second and out of it again: 20 s.
    "parameter server, bound by its link": (ParameterServer, ONE, 4, 1280.0, {}, [23.0, 46.0]),
    # b from 4 to 14 s at 320 bits a second, a, there at 6 s, from 14 to 24 s; nothing of the next round starts before.
    "buckets in turn beside the backward pass": (Collective, TWO, 2, 320.0, {}, [24.0, 24.0 + 24.0]),
    # Hops of 1 s: b from 4 to 16 s, a from 16 to 28; two at once share the link for the bytes, and wait together: b from 4 to
    # 6 s alone, both to 22 s and 24 s, and 2 hops.
    "latencies of collectives in turn": (Collective, TWO, 2, 320.0, {"latency_s": 1.0}, [28.0, 56.0]),
    "latencies of two at once": (Collective, TWO, 2, 320.0, {"latency_s": 1.0, "at_once": 2}, [26.0, 52.0]),
    "a worker alone, who waits for nobody": (Collective, TWO, 1, 100.0, {}, [6.0, 12.0]),
    # The slow one computes 6 s; 3,200 bits at 320 bits a second.
    "a worker of half the speed": (Collective, ONE, 2, 320.0, {"speeds": (1.0, 0.5)}, [16.0, 32.0]),
    # Every third round sends both blocks, b beside the last backward pass: 4 to 24 s of that round.
    "in bursts": (lambda s: Collective(s, every=3), TWO, 2, 320.0, {}, [4.0, 10.0, 36.0, 40.0]),
    # After every second round all of 6,400 bits, at 320 bits a second: 20 s for which everybody waits.
    "local SGD": (lambda s: LocalSteps(s, every=2), TWO, 2, 320.0, {}, [6.0, 32.0, 38.0, 64.0]),
    # Of two fragments one after each round, 10 s each.
    "local SGD with fragments": (lambda s: LocalSteps(s, every=2, fragments=2), TWO, 2, 320.0, {}, [16.0, 32.0]),
    # 1,600 bits a stage: 5 s. Weights of a from 2 to 7 s, b's gradient to 12, a's, there at 9, to 17; weights of a to 22 s,
    # of b, for which a's forward pass asks, to 27.
    "FSDP2": (FullyShard, TWO, 2, 320.0, {}, [27.0, 53.0]),
    # b's gradient from 4 to 9 s, a's to 14; weights of a to 19, of b to 24.
    "FSDP2 that keeps its weights": (lambda s: FullyShard(s, reshard=False), TWO, 2, 320.0, {}, [24.0, 47.0]),
    # Begun at 6 s, needed at 12, there at 26: the next is begun at the end of round 2 (32 s), needed at 38.
    "local SGD beside a step": (lambda s: LocalSteps(s, every=2, delay=1), TWO, 2, 320.0, {}, [6.0, 26.0, 32.0, 52.0]),
    # b: encode 4 to 5, send 5 to 15, decode to 16; a: encode 16 to 17, send to 27, decode to 28.
    "codec times of sums that agree first": (lambda s: Collective(s, "agreed-sum", CODEC), TWO, 2, 320.0, {}, [28.0]),
    # a is encoded while b is sent, and sent when b has been: 15 to 25, while b is decoded; decoded at 26.
    "codec times of sums": (lambda s: Collective(s, "sum", CODEC), TWO, 2, 320.0, {}, [26.0]),
    # Codec (2 s) and wire (10 s) side by side, of one chunk: nothing overlaps, 12 s each.
    "codec times in a ring": (lambda s: Collective(s, "ring", CODEC), TWO, 2, 320.0, {}, [28.0]),
    # Of ten chunks in each of two parts: the codec's 2 s are hidden but for a tenth.
    "a pipeline of many chunks": (
        lambda s: Collective(s, "ring", CodecCost(1 / N_MANY, 1 / N_MANY)), MANY, 2, 3.2 * N_MANY, {}, [3.0 + 10.0 + 0.2],
    ),
    # One round without a profile: 4 bits of 100 values to one receiver at 40 bits a second, 10 s; and in a single block
    # nothing is left to be refined behind the forward pass.
    "AQGB without a profile": (lambda s: AqgbModel(s, floor=0.125), ONE, 2, 40.0, {}, [13.0]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("make", "workload", "n_workers", "rate_bps", "setting", "expected_s"), CASES.values(), ids=CASES
)
def test_rounds_end_when_sizes_and_rates_say(
    make: Any, workload: WorkloadTimes, n_workers: int, rate_bps: float, setting: Any, expected_s: list[float]
) -> None:
    made = ends(make, workload, n_workers, rate_bps, rounds=len(expected_s), **setting)
    assert made == pytest.approx(expected_s, rel=1e-9)


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


@pytest.mark.parametrize("seed", range(12))
def test_the_simulator_and_the_librarys_cost_model_are_one(seed: int) -> None:
    """What `auto` and `recommend` predict of a step and the simulator of its rounds, of any buckets, shape and latency."""
    chance = random.Random(seed)
    shape, n_workers = SHAPES[seed % len(SHAPES)], chance.randint(2, 20)
    blocks = tuple(
        BlockTimes(str(i), chance.randint(1, 40_000_000), chance.uniform(0, 0.1), chance.uniform(0, 0.2))
        for i in range(chance.randint(1, 24))
    )
    codec = CodecCost(chance.uniform(0, 4e-9), chance.uniform(0, 4e-9), chance.uniform(0.5, 32))
    setting = Setting(WorkloadTimes("any", blocks, ""), n_workers, 10 ** chance.uniform(8, 11), jitter=STILL,
                      latency_s=chance.choice([0.0, 1e-4, 0.03]), at_once=chance.choice([1, 1, 2, 5]))  # fmt: skip
    compute_s, buckets = sum(block.forward_s for block in blocks), []
    for block in reversed(blocks):
        compute_s += block.backward_s
        buckets.append((block.n_values, compute_s))
    step, machine = StepCost(compute_s, tuple(buckets)), SharedCores(n_workers, 1, 2)
    predicted_s = predict_s(shape, codec, step, setting.link, machine)
    made = ends(lambda s: Collective(s, shape, codec), setting.workload, n_workers, setting.rate_bps, rounds=3,
                latency_s=setting.latency_s, at_once=setting.at_once)  # fmt: skip
    assert [made[0], made[1] - made[0], made[2] - made[1]] == pytest.approx([predicted_s] * 3, rel=1e-9, abs=1e-7)


@pytest.mark.parametrize(("n_buckets", "expected_s"), [(4, 4.35), (16, 15.11), (64, 58.3)])
def test_latencies_of_buckets_add_up_on_their_lane(n_buckets: int, expected_s: float) -> None:
    block = BlockTimes("a", 100_000_000 // n_buckets, 0.1 / n_buckets, 0.2 / n_buckets)
    made = ends(Collective, WorkloadTimes("many", (block,) * n_buckets, ""), 16, 10e9, latency_s=0.03)
    assert made[1] - made[0] == pytest.approx(expected_s, rel=2e-3)


@pytest.mark.parametrize("seed", range(8))
def test_collectives_of_one_block_take_what_their_formulas_say(seed: int) -> None:
    """f + b + bytes over rate + hops, of workers in equal racks, over connections that lose packets."""
    chance = random.Random(seed)
    inside, racks = chance.randint(1, 6), chance.randint(2, 5)
    n, bits, rate = inside * racks, 32 * chance.randint(10_000, 10_000_000), 10 ** chance.uniform(9, 11)
    latency_s, core_s = 1e-4, chance.choice([0.02, 0.1])
    loss, streams = chance.choice([0.0, 1e-3]), chance.randint(1, 4)
    far_s = latency_s + core_s
    per_trip = min(3 * 2**20, 1448 * math.sqrt(1.5 / loss)) if loss else 3 * 2**20
    path = min(rate, 8 * streams * per_trip / (2 * core_s))
    times_s = {
        "ring": 2 * (n - 1) / n * bits / path + 2 * (n - 1) * far_s,
        "direct": 2 * (n - 1) / n * bits / min(rate, path * (n - 1)) + 2 * far_s,
        "tree": (2 if n > 2 else 1) * bits / path + 2 * math.ceil(math.log2(n)) * far_s,
        "two-level": 2 * (inside - 1) / inside * bits / rate + 2 * (racks - 1) / racks / inside * bits / path
        + 2 * (inside - 1) * latency_s + 2 * (racks - 1) * far_s,
    }  # fmt: skip
    workload = WorkloadTimes("one", (BlockTimes("a", bits // 32, 0.25, 0.5),), "")
    more = {"racks": racks, "core_bps": 1e13, "latency_s": latency_s, "core_latency_s": core_s, "loss": loss}
    for collective, expected_s in times_s.items():
        made = ends(lambda s, c=collective: Collective(s, collective=c), workload, n, rate, streams=streams, **more)
        assert made[1] - made[0] == pytest.approx(0.75 + expected_s, rel=1e-9), collective


def test_aqgb_on_a_link_with_time_to_spare_sends_whole_what_nobody_waits_for() -> None:
    # b goes out whole before a appears, or behind a's forward pass where there was no profile before; a, which everybody
    # waits for, keeps the floor.
    simulation = Simulation(Setting(TWO, 2, 1e6, jitter=STILL), lambda s: AqgbModel(s, floor=0.125))
    assert [one.sent_bits for one in simulation.run(rounds=4).rounds] == [32 * 100 + 4 * 100] * 3


def test_slimgc_compresses_from_its_threshold_on() -> None:
    unequal = WorkloadTimes("unequal", (BlockTimes("a", 100, 1.0, 2.0), BlockTimes("b", 10_000, 1.0, 2.0)), "by hand")
    # One bit a value both ways, and a codec of 1 ms a value: worth it where 31 bits take longer than that.
    cost = CodecCost(1e-3, 0.0, 1.0)
    for rate_bps, threshold_bytes in ((1000.0, 1), (1e6, NEVER)):
        simulation = Simulation(Setting(unequal, 2, rate_bps, jitter=STILL), lambda s: SlimGc(s, cost))
        assert simulation.scheme.threshold_bytes == threshold_bytes  # type: ignore[attr-defined]
    # Given: only b, 40,000 bytes, is compressed. b is there at 4 s, takes 5 s to encode, 10 s to the owners and back, and 5 s
    # more for what they answer; then a's 3,200 bits, which have waited for the lane.
    made = ends(lambda s: SlimGc(s, cost, threshold_bytes=1000), unequal, 2, 1000.0, rounds=1)
    assert made == pytest.approx([4.0 + 5.0 + 10.0 + 5.0 + 3.2])
