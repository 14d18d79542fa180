"""Workers simulated as one behave as they would one by one, bits are conserved, and a seed fixes everything."""

import math
import sys

import pytest

from gradwire.registry import parse_spec
from gradwire_lab.simulator import workloads
from gradwire_lab.simulator.inputs import make_trace
from gradwire_lab.simulator.schemes import registry
from gradwire_lab.simulator.simulation import Metrics, Simulation
from gradwire_lab.simulator.stage import Setting, Stragglers, Uniform

PAPER = workloads.by_name("resnet50-4blocks")
SCHEMES = ["broadcast-32", "broadcast-4", "aqgb", "plain", "direct-32", "parameter-server"]


def simulate(scheme: str, setting: Setting, rounds: int = 5, keep_spans: bool = False) -> tuple[Simulation, Metrics]:
    simulation = Simulation(setting, registry.by_name(scheme, with_codec_times=False), keep_spans)
    return simulation, simulation.run(rounds=rounds)


@pytest.mark.parametrize("racks", [1, 2])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_groups_give_the_events_of_single_workers(scheme: str, racks: int) -> None:
    """Every computation and transfer of every worker at the same moments, shared or not."""
    setting = Setting(PAPER, 6, 1e9, racks=racks, core_bps=2e9 if racks > 1 else None, latency_s=1e-4)
    shared, shared_metrics = simulate(scheme, setting, keep_spans=True)
    single, single_metrics = simulate(scheme, setting.replace(shares_groups=False), keep_spans=True)
    assert len(shared.groups) == racks
    assert len(single.groups) == 6
    assert shared.round_ends_s == pytest.approx(single.round_ends_s, rel=1e-9)
    for group in shared.groups:
        expected = [span for span in shared_metrics.spans or () if span.group == group.index]
        assert expected
        for worker in range(group.first_worker, group.first_worker + group.count):
            found = [span for span in single_metrics.spans or () if span.group == worker]
            assert [(span.row, span.name) for span in found] == [(span.row, span.name) for span in expected]
            for field in ("start_s", "end_s"):
                moments = [getattr(span, field) for span in expected]
                assert [getattr(span, field) for span in found] == pytest.approx(moments, rel=1e-9)
    for one, other in zip(shared_metrics.rounds, single_metrics.rounds, strict=True):
        assert tuple(one) == pytest.approx(tuple(other), rel=1e-9)


@pytest.mark.parametrize("scheme", ["broadcast-4", "aqgb", "plain"])
def test_cost_does_not_grow_with_workers_that_are_alike(scheme: str) -> None:
    few, _ = simulate(scheme, Setting(PAPER, 16, 2.5e9))
    # As much for each worker on each link: what changes is only the number of workers.
    many, _ = simulate(scheme, Setting(PAPER, 1024, 2.5e9 * (1023 / 15 if scheme != "plain" else 1)))
    assert many.network.n_settlings == few.network.n_settlings


@pytest.mark.parametrize("scheme", ["broadcast-4", "aqgb", "plain", "local-sgd:every=2"])
def test_cost_is_linear_in_workers_that_differ(scheme: str) -> None:
    """By the lines of Python that run, loops and all: at 1,024 workers less than 80 times those at 16."""

    def count(n_workers: int) -> int:
        name, options = parse_spec(scheme)
        setting = Setting(PAPER, n_workers, 2.5e9 * (n_workers - 1) / 15, jitter=Uniform(is_common=False))
        simulation = Simulation(setting, registry.by_name(name, options))
        n_lines = 0

        def trace(frame: object, event: str, argument: object) -> object:
            nonlocal n_lines
            n_lines += event == "line"
            return trace

        sys.settrace(trace)
        try:
            simulation.run(rounds=3)
        finally:
            sys.settrace(None)
        return n_lines

    assert count(128) < 128 / 16 * 80 / 64 * count(16)


@pytest.mark.parametrize(
    "jitter", [Uniform(), Uniform(is_common=False), Stragglers()], ids=["common", "single", "stragglers"]
)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_links_carry_what_was_sent_to_the_bit(scheme: str, jitter: Uniform | Stragglers) -> None:
    setting = Setting(PAPER, 5, 1e9, racks=2, core_bps=1e9, jitter=jitter, trace=make_trace([(2.0, 5e8), (6.0, 2e9)]))
    simulation, metrics = simulate(scheme, setting, keep_spans=True)
    spans = [span for span in metrics.spans or () if span.row == "network"]
    sent = sum(span.arguments["bits"] * simulation.groups[span.group].count for span in spans)
    # What is on its way at the end has been carried in part and not been noted yet.
    pending = max(span.arguments["bits"] for span in spans) * setting.n_workers * 8
    up = sum(site.up.carried_bits for site in simulation.topology.sites)
    down = sum(site.down.carried_bits for site in simulation.topology.sites)
    copies = setting.n_workers - 1 if scheme.startswith("broadcast") or scheme == "aqgb" else 1
    if scheme == "parameter-server":
        up, down = up + down, up + down  # half of what is noted was pushed, half pulled
    assert sent <= up * (1 + 1e-9) <= sent + pending
    assert down == pytest.approx(up * copies, rel=1e-9)
    for link in metrics.links():
        assert 0 <= link.utilisation <= 1 + 1e-9
        assert link.utilisation <= link.busy + 1e-9 or link.busy == pytest.approx(1.0)


@pytest.mark.parametrize("scheme", ["broadcast-32", "aqgb", "plain"])
def test_time_is_computed_or_waited_and_nothing_else(scheme: str) -> None:
    simulation, metrics = simulate(scheme, Setting(PAPER, 4, 1e9, jitter=Uniform(is_common=False)))
    for worker in metrics.workers():
        assert 0 <= worker.overlap_s <= worker.compute_s
    for one in metrics.rounds:
        assert one.ended_s - one.started_s >= max(one.compute_s, one.longest_wait_s)
        assert 0 < one.osf <= 1
        assert one.row >= 0 or math.isinf(one.row)
    assert simulation.n_rounds >= 5


def test_the_same_seed_gives_the_same_run_and_another_does_not() -> None:
    settings = (Setting(PAPER, 4, 1e9, jitter=Stragglers(seed=seed)) for seed in (3, 3, 4))
    one, again, other = (simulate("aqgb", setting)[1].summary() for setting in settings)
    assert one == again != other


def test_all_schemes_meet_the_same_rounds() -> None:
    setting = Setting(PAPER, 4, 1e9, jitter=Uniform(seed=7))
    plain, *others = (
        [one.compute_s for one in simulate(scheme, setting)[1].rounds[:3]]
        for scheme in ("plain", "broadcast-32", "aqgb")
    )
    assert others == [pytest.approx(plain)] * 2


def test_stragglers_stay_in_the_papers_range_with_its_mean() -> None:
    for sigma in (0.3, 1.5, 2.5):
        times_s = Stragglers(sigma, seed=1).factors(0, 200_000) * 1.5
        assert times_s.min() >= 1.33
        assert times_s.max() <= 2.67
        assert times_s.mean() == pytest.approx(1.5, abs=0.003)


def test_aqgbs_ratio_follows_the_rate() -> None:
    trace = make_trace([(0.0, 4e9), (30.0, 1e9), (60.0, 4e9)])
    _, metrics = simulate("aqgb", Setting(PAPER, 8, 4e9, trace=trace, jitter=Uniform(0.0)), rounds=50)
    bits = [(one.ended_s, one.sent_bits or 0.0) for one in metrics.rounds]

    def mean(start_s: float, end_s: float) -> float:
        chosen = [sent for at_s, sent in bits if start_s <= at_s < end_s]
        return sum(chosen) / len(chosen)

    assert mean(36, 60) < 0.5 * mean(10, 30)
    assert mean(66, 80) == pytest.approx(mean(10, 30), rel=0.05)


@pytest.mark.parametrize(
    ("scheme", "rounds", "utilisation"), [("broadcast-32", 39, 90), ("broadcast-4", 130, 39), ("aqgb", 127, 77)]
)
def test_the_papers_setting_gives_its_rounds_and_utilisation(scheme: str, rounds: int, utilisation: int) -> None:
    """Its codecs take no time; ours take some, which only ever costs rounds."""
    n_rounds = []
    for with_codec_times in (False, True):
        simulation = Simulation(Setting(PAPER, 16, 2.5e9), registry.by_name(scheme, with_codec_times=with_codec_times))
        metrics = simulation.run(seconds=200)
        n_rounds.append(simulation.n_rounds)
        if not with_codec_times:
            assert simulation.n_rounds == pytest.approx(rounds, rel=0.05)
            assert 100 * metrics.utilisation == pytest.approx(utilisation, abs=5)
    assert n_rounds[1] == n_rounds[0] if scheme == "broadcast-32" else 0.75 * n_rounds[0] < n_rounds[1] < n_rounds[0]
