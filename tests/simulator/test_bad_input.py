"""What cannot be simulated is refused by name, before anything runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradwire import schemes as live
from gradwire.errors import CorruptMessage, IncompatibleVersion, InvalidArgument
from gradwire_lab.simulator import workloads
from gradwire_lab.simulator.inputs import make_trace, parse_trace
from gradwire_lab.simulator.schemes import registry
from gradwire_lab.simulator.schemes.registry import MeasuredTable, Measurement, fit
from gradwire_lab.simulator.simulation import Simulation, write_trace
from gradwire_lab.simulator.stage import Setting, Stragglers, Uniform

PAPER = workloads.by_name("resnet50-4blocks")


def simulation(scheme: str = "plain", options: dict[str, object] | None = None, **changes: object) -> Simulation:
    return Simulation(Setting(PAPER, 3, 1e9).replace(**changes), registry.by_name(scheme, options or {}))


NAN, INFINITY = float("nan"), float("inf")
SETTINGS: list[dict[str, object]] = [
    {"n_workers": 0}, {"rate_bps": 0.0}, {"rate_bps": -1.0}, {"rate_bps": NAN}, {"rates_bps": (1e9, 1e9)},
    {"rates_bps": (1e9, 0.0, 1e9)}, {"latency_s": -1.0}, {"traced_workers": (3,)}, {"racks": 4}, {"racks": 0},
    {"core_bps": 1e9}, {"racks": 2, "core_bps": -1.0}, {"racks": (1, 1)}, {"racks": (3, 0)}, {"speeds": (1.0, 1.0)},
    {"speeds": (1.0, 0.0, 1.0)}, {"at_once": 0}, {"loss": 0.1}, {"racks": (1, 2), "core_latency_s": 0.01, "loss": 1.0},
    {"racks": (1, 2), "core_latency_s": -1.0}, {"racks": (1, 2), "core_latency_s": 0.01, "streams": 0},
]  # fmt: skip
TRACES: list[list[tuple[float, float]]] = [
    [], [(-1.0, 1e9)], [(0.0, 1e9), (0.0, 2e9)], [(5.0, 1e9), (2.0, 1e9)], [(0.0, 0.0)], [(NAN, 1e9)],
]  # fmt: skip
TEXTS = ["-1=1gbit", "0=none", "0=0gbit", "zero=1gbit", "0=1gbit=2", "no/such/file"]
SCHEMES: list[tuple[str, dict[str, object]]] = [
    ("broadcast-0", {}), ("broadcast-33", {}), ("nothing", {}), ("aqgb", {"floor": 0.0}), ("aqgb", {"floor": 1.5}),
    ("aqgb", {"speed": 3}), ("parameter-server", {"n_servers": 2}),
    ("plain", {"bits": 4}), ("plain", {"collective": "rign"}), ("plain", {"collective": "parameter-server"}),
    ("plain", {"collective": "reduce-scatter"}), ("top-k", {"collective": "ring"}), ("gcomp", {"bits": 3}),
    ("periodic", {"every": 0}),
    ("auto", {"fidelity": "exat"}), ("auto", {"optimizer": "adma"}), ("fully-shard", {"weights": -1}),
    ("local-sgd", {"every": 4, "fragments": 5}), ("local-sgd", {"every": 4, "fragments": 2, "delay": 2}),
]  # fmt: skip
LIMITS: list[dict[str, Any]] = [{}, {"seconds": 0.0}, {"seconds": -1.0}, {"rounds": 0}, {"seconds": INFINITY}]
CALLS: list[tuple[str, Callable[[], object]]] = [
    *((str(changes), lambda changes=changes: simulation(**changes)) for changes in SETTINGS),
    *((f"trace {steps}", lambda steps=steps: make_trace(steps)) for steps in TRACES),
    *((f"trace {text}", lambda text=text: parse_trace(text)) for text in TEXTS),
    *((f"scheme {scheme}", lambda scheme=scheme: simulation(*scheme)) for scheme in SCHEMES),
    ("two levels of unequal racks", lambda: simulation("plain", {"collective": "two-level"}, racks=(1, 2))),
    *((f"run of {limits}", lambda limits=limits: simulation().run(**limits)) for limits in LIMITS),
    *((f"jitter {share}", lambda share=share: Uniform(share)) for share in (1.0, -0.1)),
    ("jitter of a negative seed", lambda: Uniform(seed=-1)),
    ("stragglers without spread", lambda: Stragglers(0.0)),
    *((name, lambda name=name: workloads.by_name(name)) for name in ("resnet50-2blocks", "resnet50-blocks", "alexnet")),
    ("workload scaled to nothing", lambda: PAPER.scaled(0.0)),
    ("measured with one rank", lambda: fit([Measurement(1, 1000, 0.0, 0.0, 0.0)])),
]


@pytest.mark.parametrize("call", [call for _, call in CALLS], ids=[what for what, _ in CALLS])
def test_what_cannot_be_simulated_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(InvalidArgument):
        call()


def test_a_trace_file_with_negative_times_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("# seconds, rate\n0,2.5gbit\n-3, 1gbit\n", encoding="utf-8")
    with pytest.raises(InvalidArgument, match=r"-3\.0 s"):
        parse_trace(str(path))
    path.write_text("# seconds, rate\n0,2.5gbit\n3, 1gbit  # slower\n", encoding="utf-8")
    assert parse_trace(str(path)) == ((0.0, 2.5e9), (3.0, 1e9))


@pytest.mark.parametrize(
    ("content", "error", "match"),
    [
        (None, InvalidArgument, "cannot read"),
        ("{", CorruptMessage, None),
        ('{"format": 99, "workloads": {}}', IncompatibleVersion, None),
        ('{"format": 1, "workloads": {}}', InvalidArgument, "was not measured"),
    ],
)
def test_a_measured_table_that_is_none_is_refused(content: Any, error: type, match: Any, tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(error, match=match):
        MeasuredTable.load(path).fit("gcomp", "resnet50")


def test_a_scheme_measured_at_several_worlds_keeps_its_shape() -> None:
    ring = fit([Measurement(n, 1000, 0.5 * 4000 * 2 * (n - 1) / n, 1e-3, 2e-3 * (n - 1)) for n in (2, 3, 4)])
    assert ring.shape == "ring"
    assert ring.sent_bits_per_value == pytest.approx(16.0)
    assert ring.codec(8).bits == pytest.approx(16.0)
    gather = fit([Measurement(n, 1000, 125 * (n - 1), 1e-3, 1e-3 * (n - 1)) for n in (2, 3, 4)])
    assert gather.shape == "gather"
    assert gather.codec(9).bits == pytest.approx(1.0)
    assert gather.codec(9).decode_s == pytest.approx(8e-6)


@pytest.mark.parametrize("name", live.names())
def test_every_registered_scheme_is_simulated_or_says_how_it_will_be(name: str) -> None:
    if name not in registry.names():
        with pytest.raises(InvalidArgument, match="gradwire bench run simulator-sizes"):
            registry.by_name(name)
        return
    metrics = Simulation(Setting(PAPER, 4, 1e9), registry.by_name(name)).run(rounds=8)
    assert metrics.utilisation > 0


def test_a_trace_needs_spans(tmp_path: Path) -> None:
    finished = simulation()
    finished.run(rounds=1)
    with pytest.raises(InvalidArgument, match="spans"):
        write_trace(tmp_path / "trace.json", finished)
