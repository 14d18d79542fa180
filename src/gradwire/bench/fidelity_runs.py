"""The training runs behind `gradwire bench fidelity`: planned, run one after another, found again when done before."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console

from gradwire.ranks.netlab.rate import parse_rate
from gradwire.training import TrainConfig, launching


@dataclass(frozen=True)
class FinishedRun:
    """A run folder's content. `name`, `workload`: configuration and workload as written on the command line."""

    name: str
    workload: str
    summary: dict[str, Any]
    steps: list[dict[str, Any]]
    folder: Path | None = None

    def column(self, key: str) -> npt.NDArray[np.float64]:
        """(n_steps,): one figure of every step's record; NaN where a record of an older run lacks it."""
        return np.array([step.get(key, np.nan) for step in self.steps], np.float64)


@dataclass(frozen=True)
class PlannedRun:
    """One training run and its folder, `config.out`."""

    name: str
    workload: str
    config: TrainConfig
    n_ranks: int
    rate: str = "none"

    def find_finished(self) -> FinishedRun | None:
        """The run if its folder holds one that came to its end under this very configuration, else None.

        The code's own version is not compared: each record carries its commit.
        """
        folder = self.config.out
        assert folder is not None
        try:
            summary = json.loads((folder / "summary.json").read_text())
            steps = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
        except (OSError, ValueError):
            return None
        expected = {
            "scheme": self.config.scheme,
            "scheme_options": self.config.scheme_options,
            "workload": self.config.workload,
            "workload_options": self.config.workload_options,
            "ranks": self.n_ranks,
            "rate_bps": parse_rate(self.rate),
            "steps": self.config.steps,
            "start_step": 0,
            "seed": self.config.seed,
            "deterministic": self.config.deterministic,
            "batch_size": self.config.batch_size or _default_batch_size(self.config.workload),
        }
        same = all(key in summary and summary[key] == value for key, value in expected.items())
        every = self.config.dump_gradients_every
        is_dumped = (
            not every or (folder / "gradients" / f"step-{(self.config.steps - 1) // every * every:08}.npz").exists()
        )
        if not same or not is_dumped or [step["step"] for step in steps] != list(range(self.config.steps)):
            return None
        return FinishedRun(self.name, self.workload, summary, steps, folder)


def folder_name(spec: str) -> str:
    """`gcomp:importance=none` as a folder: gcomp-importance-none."""
    return re.sub(r"[^A-Za-z0-9._]+", "-", spec)


def run_planned(planned: Sequence[PlannedRun], console: Console) -> None:
    """Train what is not done yet, one run at a time, and say how long the rest will take.

    Raises: whatever a run raises; those done before it stay done.
    """
    left = [run for run in planned if run.find_finished() is None]
    if len(left) < len(planned):
        console.print(f"{len(planned) - len(left)} of {len(planned)} runs are done already")
    spent: dict[str, list[float]] = {}  # seconds of this session's runs, by workload
    for index, run in enumerate(left):
        began = time.monotonic()
        console.print(f"run {index + 1} of {len(left)}: {run.workload}, {run.name}, {run.n_ranks} ranks")
        launching.run_ranks(run.config, run.n_ranks, run.rate, show_table=False)
        took_s = time.monotonic() - began
        spent.setdefault(run.workload, []).append(took_s)
        every = [one for ones in spent.values() for one in ones]
        typical = {workload: sum(ones) / len(ones) for workload, ones in spent.items()}
        to_come_s = sum(typical.get(one.workload, sum(every) / len(every)) for one in left[index + 1 :])
        end = time.strftime("%H:%M", time.localtime(time.time() + to_come_s))
        console.print(
            f"  took {took_s:.0f} s; {len(left) - index - 1} left, about {to_come_s / 60:.0f} min (until {end})"
        )


@functools.cache
def _default_batch_size(workload: str) -> int:
    from gradwire import workloads

    return workloads.by_name(workload).batch_size
