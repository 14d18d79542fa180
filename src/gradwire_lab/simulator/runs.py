"""Simulated runs and sweeps as flat records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from gradwire.telemetry.stopwatch import Stopwatch
from gradwire_lab.simulator.schemes import registry
from gradwire_lab.simulator.simulation import Simulation
from gradwire_lab.simulator.stage import Setting


@dataclass(frozen=True)
class SimulatedRun:
    """One run to do.

    Attributes:
        options: of the scheme.
        measured_on: whose sizes and codec times to take (`registry.by_name`).
    """

    scheme: str
    setting: Setting
    seconds: float | None = None
    rounds: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    measured_on: str | None = None
    with_codec_times: bool = True
    keep_spans: bool = False

    def do(self, on_round: Callable[[int, float], None] | None = None) -> tuple[Simulation, dict[str, Any]]:
        """Simulate; returns the simulation and its record. Raises: InvalidArgument."""
        make = registry.by_name(self.scheme, self.options, self.measured_on, self.with_codec_times)
        watch = Stopwatch()
        simulation = Simulation(self.setting, make, self.keep_spans, on_round)
        metrics = simulation.run(self.seconds, self.rounds)
        setting, summary = self.setting, metrics.summary()
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
