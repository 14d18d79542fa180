"""The one runner: measures what the store lacks of some experiments, run by run, and says how long the rest will take."""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.errors import GradwireError, PeerLost, Unsupported
from gradwire.telemetry.environment import describe_environment
from gradwire_lab.bench.measures import WRITES, Call, by_name, code_of
from gradwire_lab.results.captions import duration
from gradwire_lab.results.experiment import Cell, Experiment
from gradwire_lab.results.records import Store, machines, name_of, states_of


def describe_run() -> dict[str, Any]:
    """Where and with what a run is measured, which each of its records carries."""
    environment = describe_environment()
    return {key: environment[key] for key in ("commit", "date", "cpu", "n_cores", "os", "python", "torch", "network")}


@contextlib.contextmanager
def watched_load() -> Iterator[dict[str, float | None]]:
    """What else the machine did: the load average before, and when it ends the cores that others kept busy during it."""
    found: dict[str, float | None] = {"load_before": round(os.getloadavg()[0], 2), "load_during": None}
    began_s, before_s = time.monotonic(), _others_s()
    yield found
    took_s, after_s = time.monotonic() - began_s, _others_s()
    if before_s is not None and after_s is not None and took_s > 0:
        others = max(0.0, after_s - before_s) / took_s
        found["load_during"] = round(min(others, float(os.cpu_count() or 1)), 2)  # the kernel counts in ticks


def _others_s() -> float | None:
    """Seconds that all cores of the machine have worked, but for this process and its ended children."""
    try:
        words = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq = map(int, words[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


@functools.cache
def check_network(n_ranks: int, rate: str) -> float | None:
    """What a plain all-reduce gets through links set to `rate`, as a share of it; None on links that are not shaped."""
    from gradwire_lab.ranks.netlab.check import measure_rate

    if rate == "none" or "," in rate or n_ranks < 2:
        return None
    try:
        return 1 + measure_rate(n_ranks, rate, seconds=0.3, repeats=3).deviation
    except Unsupported:  # no right to shape: the records say `loopback` themselves
        return None


class ExperimentRun(NamedTuple):
    """The cells of an experiment that are measured together."""

    experiment: Experiment
    cells: list[Cell]

    @property
    def name(self) -> str:
        apart = self.experiment.apart(self.cells[0])
        words = [f"{axis}={self.experiment.label(axis, value)}" for axis, value in apart.items()]
        return " ".join([self.experiment.key, *words])


@dataclass(frozen=True)
class Runner:
    """Measures into a store; logs, gradients and trainings go to `folder`."""

    store: Store
    say: Callable[[str], None]
    folder: Path

    def plan(
        self, experiments: Sequence[Experiment], *, fresh: bool = False, missing: bool = False, anywhere: bool = False
    ) -> list[ExperimentRun]:
        """Runs that are not current, cheap ones first; `missing`: only what no code measured; `fresh`: all; `anywhere`: none
        that is current on another machine."""
        names = machines(self.store.folder) if anywhere and not fresh else [self.store.machine]
        runs, stores = [], [Store(self.store.folder, name) for name in names]
        for experiment in experiments:
            states = states_of(experiment, stores, code_of(experiment))
            for cells, state in zip(experiment.groups(), states, strict=True):
                if fresh or state == "never" or (state == "stale" and not missing):
                    runs.append(ExperimentRun(experiment, cells))
        return sorted(runs, key=lambda run: (run.experiment.measure not in WRITES, run.experiment.seconds))

    def estimate_s(self, runs: Sequence[ExperimentRun]) -> float:
        """About how long these take: what the same took before, else what the catalogue says of such runs."""
        total_s = 0.0
        for experiment, cells in runs:
            wanted = {name_of(experiment, cell) for cell in cells}
            records = [one for one in self.store.read(experiment.key) if name_of(experiment, one) in wanted]
            took_s = [float(one["run_s"]) for one in records if one.get("run_s")]
            total_s += max(took_s, default=experiment.seconds)
        return total_s

    def run(self, runs: Sequence[ExperimentRun], n_finished: int = 0) -> int:
        """Measure; status 1 if a run failed, which keeps what the store had. Raises: GradwireError (the store)."""
        if n_finished:
            self.say(f"{n_finished} runs are finished in {self.store.folder} and are not repeated")
        if runs:
            self.say(
                f"{len(runs)} runs, about {duration(self.estimate_s(runs))} with nothing else running; what is finished is "
                "kept when this is stopped, and the same command goes on from there"
            )
        expected_s = spent_s = 0.0
        failed = []
        for number, run in enumerate(runs, start=1):
            pace = spent_s / expected_s if expected_s else 1.0
            mine_s, left_s = self.estimate_s([run]), pace * self.estimate_s(runs[number - 1 :])
            takes = f"about {duration(pace * mine_s)}; {duration(left_s)} left in all"
            self.say(f"[{number}/{len(runs)}] {run.name}: {takes}")
            took_s = self._measure(*run)
            if took_s is None:
                failed.append(run.name)
            else:
                expected_s, spent_s = expected_s + mine_s, spent_s + took_s
                self.say(f"    took {duration(took_s)}")
        for name in failed:
            self.say(f"failed: {name}; the same command measures only what is missing")
        return 1 if failed else 0

    def _measure(self, experiment: Experiment, cells: list[Cell]) -> float | None:
        """Seconds that it took; None where it failed, and then nothing is written."""
        call = Call(experiment.key, cells, experiment.apart(cells[0]), dict(experiment.fixed), self.folder)
        started = time.monotonic()
        try:
            checked = check_network(int(call.get("ranks", 4)), str(call.get("rate", "none")))
            with watched_load() as load:
                measured = by_name(experiment.measure)(call)
        except GradwireError as error:
            self.say(f"    failed: {'' if isinstance(error, PeerLost) else f'{type(error).__name__}: '}{error}")
            return None
        elapsed_s, settings = time.monotonic() - started, experiment.settings(cells)
        shared = {
            **describe_run(),
            "code": code_of(experiment),
            "settings": settings,
            "run": f"{settings}-{time.time():.0f}",
            "run_s": round(elapsed_s, 1),
            **load,
            "network_check": None if checked is None else round(checked, 4),
        }
        # The measure's own environment, and its network, are those of the ranks; the date is the run's.
        records = [
            {**cell, **record, **cell, **shared, "network": record.get("network", shared["network"])}
            for cell, record in measured
        ]
        found = {name_of(experiment, record) for record in records}
        absent = {"absent": "the measure leaves it out on this machine", **shared}
        records += [{**cell, **absent} for cell in cells if name_of(experiment, cell) not in found]
        self.store.replace(experiment, cells, records)
        return elapsed_s
