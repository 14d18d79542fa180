"""Simulated runs as flat records, and which scheme on how many workers does a training within a budget."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradwire import checks
from gradwire.errors import InvalidArgument
from gradwire.registry import parse_spec, spec_of
from gradwire.schemes.auto.fidelity import row_of
from gradwire.telemetry.stopwatch import Stopwatch
from gradwire_lab.simulator import workloads
from gradwire_lab.simulator.inputs import load_cluster, load_model
from gradwire_lab.simulator.schemes import registry
from gradwire_lab.simulator.simulation import Simulation
from gradwire_lab.simulator.stage import Setting
from gradwire_lab.simulator.workloads import WorkloadTimes

Record = dict[str, Any]

ROUNDS = 20


@dataclass(frozen=True)
class SimulatedRun:
    """One run to do; `options`, `measured_on` and `with_codec_times` as in `registry.by_name`."""

    scheme: str
    setting: Setting
    seconds: float | None = None
    rounds: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    measured_on: str | None = None
    with_codec_times: bool = True
    keep_spans: bool = False

    def do(self, on_round: Callable[[int, float], None] | None = None) -> tuple[Simulation, dict[str, Any]]:
        make = registry.by_name(self.scheme, self.options, self.measured_on, self.with_codec_times)
        watch, setting = Stopwatch(), self.setting
        simulation = Simulation(setting, make, self.keep_spans, on_round)
        summary = simulation.run(self.seconds, self.rounds).summary()
        lost = setting.failures.lost_share(setting.n_workers) if setting.failures else 0.0
        round_s = summary["round_s"]
        return simulation, {
            "scheme": self.scheme,
            "options": ",".join(f"{key}={value}" for key, value in self.options.items()),
            "workers": setting.n_workers,
            "rate_bps": setting.rate_bps,
            "workload": setting.workload.name,
            "jitter": type(setting.jitter).__name__.lower()
            + (" common" if setting.jitter.is_common else " per worker"),
            "seed": setting.jitter.seed,
            "racks": setting.racks if isinstance(setting.racks, int) else len(setting.racks),
            "latency_s": setting.latency_s,
            "codec_times": self.with_codec_times,
            **summary,
            "lost_share": lost,
            "effective_round_s": None if round_s is None or lost == 1 else round_s / (1 - lost),
            "elapsed_s": watch.elapsed_s,
        }


@dataclass(frozen=True)
class SampleGoal:
    """A training to be done."""

    samples: float  # in all
    batch: float  # of each worker and step
    budget_hours: float | None = None  # of workers together; None: as many as it takes

    def __post_init__(self) -> None:
        for name in ("samples", "batch", "budget_hours"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InvalidArgument(f"{name}={value}: expected more than 0")

    def rank(self, records: Sequence[Record]) -> list[Record]:
        """With what the training takes at each pace: what is within the budget first, the soonest done first. Samples
        count alike under every scheme; what a scheme loses in accuracy for a sample is its level's (docs/auto.md), and
        is not in the hours."""
        ranked: list[tuple[tuple[bool, float, int], Record]] = []
        for record in records:
            n_workers, step_s = record["workers"], record["effective_round_s"]
            hours, samples = math.inf, n_workers * self.batch
            found: Record = {"samples_per_s": None, "hours": None, "worker_hours": None, "in_budget": False}
            if step_s is not None:
                hours = math.ceil(self.samples / samples) * step_s / 3600
                is_within = self.budget_hours is None or hours * n_workers <= self.budget_hours
                found = dict(zip(found, (samples / step_s, hours, hours * n_workers, is_within), strict=True))
            place = (not found["in_budget"], hours, n_workers)
            ranked.append((place, {**record, **found, "level": level_of(spec_of(record))}))
        return [record for _, record in sorted(ranked, key=lambda both: both[0])]


def level_of(spec: str) -> str:
    """How close to plain steps a scheme is (`exact`, `close`, `any`), or `?`: its own page says."""
    name, options = parse_spec(spec)
    if name == "auto":
        return str(options.get("fidelity", "exact"))
    if name in ("plain", "direct-32", "parameter-server", "broadcast-32") or spec == "fully-shard":
        return "exact"
    try:
        return row_of(spec).level
    except InvalidArgument:
        return "?"


def simulate(
    model: WorkloadTimes | str | Path, cluster: Setting | str | Path, scheme: str = "plain", *, n_workers: int | None = None,
    rounds: int = ROUNDS, **more: Any,
) -> Record:  # fmt: skip
    """What a scheme does: a flat record, `round_s`, `wait_s`, `bits_per_value`, `effective_round_s` (with failures) and more.

    Args:
        model: blocks; a built-in workload's name, or a file as `inputs.load_model` reads them.
        cluster: its file; or a setting, whose workload does not matter.
        scheme: "NAME:option=value", as `gradwire simulate --scheme`.
        n_workers: the first of the cluster's; None: all.
        rounds: to simulate; of a scheme that sends in some rounds only as many more as make four of its periods.
        more: of the setting: jitter, trace.
    Raises: InvalidArgument.
    """
    if not isinstance(model, WorkloadTimes):
        path = Path(model)
        model = load_model(path) if path.suffix or path.exists() else workloads.by_name(str(model))
    setting = cluster if isinstance(cluster, Setting) else load_cluster(Path(cluster), model)
    setting = setting.of_workers(n_workers or setting.n_workers).replace(workload=model, **more)
    name, options = parse_spec(scheme)
    return SimulatedRun(name, setting, None, rounds_of(scheme, rounds), options).do()[1]


def search(
    model: WorkloadTimes | str | Path, cluster: Setting | str | Path, schemes: Sequence[str], workers: Sequence[int],
    goal: SampleGoal, *, rounds: int = ROUNDS,
) -> list[Record]:  # fmt: skip
    """Every scheme on every number of workers, what is within the budget first and the soonest done first
    (`SampleGoal.rank`). Raises: InvalidArgument."""
    return goal.rank([simulate(model, cluster, one, n_workers=n, rounds=rounds) for n in workers for one in schemes])


def rounds_of(scheme: str, rounds: int) -> int:
    """`rounds`, or as many more as make four periods of a scheme that sends in some of them only. Raises: InvalidArgument."""
    name, options = parse_spec(scheme)
    every = checks.count("every", options.get("every", {"local-sgd": 500, "periodic": 8}.get(name, 1)))
    return max(checks.count("rounds", rounds), 1 + 4 * every if every > 1 else 1)
