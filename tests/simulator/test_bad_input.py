"""What cannot be simulated is refused by name, before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradwire import schemes as live
from gradwire.errors import CorruptMessage, IncompatibleVersion, InvalidArgument
from gradwire_lab.simulator import workloads
from gradwire_lab.simulator.bandwidth import make_trace, parse_trace
from gradwire_lab.simulator.jitter import Stragglers, Uniform
from gradwire_lab.simulator.schemes import registry
from gradwire_lab.simulator.schemes.measured import MeasuredTable, Measurement, fit
from gradwire_lab.simulator.simulation import Simulation
from gradwire_lab.simulator.stage import Setting
from gradwire_lab.simulator.trace import write_trace

PAPER = workloads.by_name("resnet50-4blocks")


@pytest.mark.parametrize(
    "changes",
    [
        {"n_workers": 0},
        {"rate_bps": 0.0},
        {"rate_bps": -1.0},
        {"rate_bps": float("nan")},
        {"rates_bps": (1e9, 1e9)},
        {"rates_bps": (1e9, 0.0, 1e9)},
        {"latency_s": -1.0},
        {"traced_workers": (3,)},
        {"racks": 4},
        {"racks": 0},
        {"core_bps": 1e9},
        {"racks": 2, "core_bps": -1.0},
    ],
)
def test_a_setting_out_of_range_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        Simulation(Setting(PAPER, 3, 1e9).replace(**changes), registry.by_name("plain"))


@pytest.mark.parametrize(
    "steps",
    [[], [(-1.0, 1e9)], [(0.0, 1e9), (0.0, 2e9)], [(5.0, 1e9), (2.0, 1e9)], [(0.0, 0.0)], [(float("nan"), 1e9)]],
)
def test_a_trace_that_cannot_be_is_refused(steps: list[tuple[float, float]]) -> None:
    with pytest.raises(InvalidArgument):
        make_trace(steps)


@pytest.mark.parametrize("text", ["-1=1gbit", "0=none", "0=0gbit", "zero=1gbit", "0=1gbit=2", "no/such/file"])
def test_a_trace_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_trace(text)


def test_a_trace_file_with_negative_times_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("# seconds, rate\n0,2.5gbit\n-3, 1gbit\n", encoding="utf-8")
    with pytest.raises(InvalidArgument, match=r"-3\.0 s"):
        parse_trace(str(path))
    path.write_text("# seconds, rate\n0,2.5gbit\n3, 1gbit  # slower\n", encoding="utf-8")
    assert parse_trace(str(path)) == ((0.0, 2.5e9), (3.0, 1e9))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("broadcast-0", {}),
        ("broadcast-33", {}),
        ("nothing", {}),
        ("aqgb", {"floor": 0.0}),
        ("aqgb", {"floor": 1.5}),
        ("aqgb", {"messages_per_block": 0}),
        ("aqgb", {"speed": 3}),
        ("parameter-server", {"n_servers": 0}),
        ("plain", {"bits": 4}),
    ],
)
def test_a_scheme_or_option_that_is_not_there_is_refused(name: str, options: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument):
        Simulation(Setting(PAPER, 3, 1e9), registry.by_name(name, options))


@pytest.mark.parametrize("limits", [{}, {"seconds": 0.0}, {"seconds": -1.0}, {"rounds": 0}, {"seconds": float("inf")}])
def test_a_run_without_an_end_is_refused(limits: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument):
        Simulation(Setting(PAPER, 3, 1e9), registry.by_name("plain")).run(**limits)  # type: ignore[arg-type]


def test_jitters_and_workloads_out_of_range_are_refused() -> None:
    for make in (lambda: Uniform(1.0), lambda: Uniform(-0.1), lambda: Stragglers(0.0), lambda: Uniform(seed=-1)):
        with pytest.raises(InvalidArgument):
            make()
    for name in ("resnet50-2blocks", "resnet50-blocks", "alexnet"):
        with pytest.raises(InvalidArgument):
            workloads.by_name(name)
    with pytest.raises(InvalidArgument):
        PAPER.scaled(0.0)


def test_a_measured_table_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    with pytest.raises(InvalidArgument):
        MeasuredTable.load(path)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(CorruptMessage):
        MeasuredTable.load(path)
    path.write_text(json.dumps({"format": 99, "workloads": {}}), encoding="utf-8")
    with pytest.raises(IncompatibleVersion):
        MeasuredTable.load(path)
    path.write_text(json.dumps({"format": 1, "workloads": {}}), encoding="utf-8")
    with pytest.raises(InvalidArgument, match="was not measured"):
        MeasuredTable.load(path).fit("gcomp", "resnet50")


def test_a_scheme_measured_at_several_worlds_keeps_its_shape() -> None:
    ring = fit([Measurement(n, 1000, 0.5 * 4000 * 2 * (n - 1) / n, 1e-3, 2e-3 * (n - 1)) for n in (2, 3, 4)])
    assert ring.shape == "ring"
    assert ring.sent_bits_per_value == pytest.approx(16.0)
    assert ring.cost(8, "in turn").sent_bits_per_value == pytest.approx(16.0 * 2 * 7 / 8)
    gather = fit([Measurement(n, 1000, 125 * (n - 1), 1e-3, 1e-3 * (n - 1)) for n in (2, 3, 4)])
    assert gather.shape == "gather"
    assert gather.cost(9, "in turn").sent_bits_per_value == pytest.approx(8.0)
    assert gather.cost(9, "in turn").decode_s_per_value == pytest.approx(8e-6)
    with pytest.raises(InvalidArgument):
        fit([Measurement(1, 1000, 0.0, 0.0, 0.0)])


@pytest.mark.parametrize("name", live.names())
def test_every_registered_scheme_is_simulated_or_says_how_it_will_be(name: str) -> None:
    if name not in registry.names():
        with pytest.raises(InvalidArgument, match="gradwire bench run simulator-sizes"):
            registry.by_name(name)
        return
    metrics = Simulation(Setting(PAPER, 4, 1e9), registry.by_name(name)).run(rounds=2)
    assert metrics.utilisation > 0


def test_a_trace_needs_spans(tmp_path: Path) -> None:
    simulation = Simulation(Setting(PAPER, 3, 1e9), registry.by_name("plain"))
    simulation.run(rounds=1)
    with pytest.raises(InvalidArgument, match="spans"):
        write_trace(tmp_path / "trace.json", simulation)
