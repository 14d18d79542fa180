"""Numbers of `bench convergence`: means and spreads over seeds; every function returns flat records."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire.bench.fidelity_runs import FinishedRun
from gradwire.bench.figures.numbers import Records

# Of one workload, by configuration: one run a seed.
Seeds = dict[str, list[FinishedRun]]

# name: whether more is better.
METRICS = {"loss_last_10": False, "held_out_loss": False, "accuracy": True}


def describe_convergence(runs: Seeds, yardstick: str) -> Records:
    """Where each configuration's runs ended.

    For every metric: mean, `_sd` (sample standard deviation over the seeds, None for one seed), least and greatest;
    `_worse_by`: by how much the mean is worse than the yardstick's over the seeds that both have finished;
    `_within`: no worse than the yardstick's worst seed.
    """
    records: Records = []
    for name, finished in runs.items():
        first = finished[0].summary
        record: dict[str, Any] = {
            "workload": finished[0].workload,
            "configuration": name,
            "yardstick": yardstick,
            "n_seeds": len(finished),
            "seeds": " ".join(str(run.summary["seed"]) for run in finished),
            "ranks": first["ranks"],
            "steps": len(finished[0].steps),
            "batch_size": first["batch_size"],
            "optimizer": first["optimizer"],
            "learning_rate": first["learning_rate"],
        }
        for metric, more_is_better in METRICS.items():
            values = _by_seed(finished, metric)
            rival = _by_seed(runs.get(yardstick, []), metric)
            record |= _describe(metric, values, rival, more_is_better)
        record |= {
            "ratio_mean": float(np.mean([run.column("ratio").mean() for run in finished])),
            "iteration_s": statistics.median(float(run.summary["iteration_s"]) for run in finished),
            "replicas_equal": all(bool(run.summary["replicas_equal"]) for run in finished),
            **{key: first.get(key) for key in ("cpu", "n_cores", "torch", "gradwire", "commit", "network", "date")},
        }
        records.append(record)
    return records


def _by_seed(runs: Sequence[FinishedRun], metric: str) -> dict[int, float]:
    return {run.summary["seed"]: float(run.summary[metric]) for run in runs if run.summary.get(metric) is not None}


def _describe(metric: str, values: dict[int, float], rival: dict[int, float], more_is_better: bool) -> dict[str, Any]:
    shared = sorted(values.keys() & rival.keys())
    sign = -1.0 if more_is_better else 1.0
    known = list(values.values())
    worst = max((sign * value for value in rival.values()), default=None)
    mean = statistics.fmean(known) if known else None
    worse_by = statistics.fmean(sign * (values[seed] - rival[seed]) for seed in shared) if shared else None
    return {
        metric: mean,
        f"{metric}_sd": statistics.stdev(known) if len(known) > 1 else None,
        f"{metric}_min": min(known, default=None),
        f"{metric}_max": max(known, default=None),
        f"{metric}_worse_by": worse_by,
        f"{metric}_within": None if mean is None or worst is None else sign * mean <= worst,
    }


def describe_steps(runs: Seeds) -> Records:
    """Every step of every configuration: its loss over the seeds; for plots of one's own."""
    records: Records = []
    for name, finished in runs.items():
        losses = stack_losses(finished)
        for step, values in enumerate(losses.T):
            record: dict[str, Any] = {"workload": finished[0].workload, "configuration": name, "step": step}
            record |= {"loss": float(values.mean()), "loss_min": float(values.min()), "loss_max": float(values.max())}
            records.append(record)
    return records


def stack_losses(finished: Sequence[FinishedRun]) -> npt.NDArray[np.float64]:
    """(n_seeds, n_steps): the losses of one configuration."""
    return np.stack([run.column("loss") for run in finished])


def to_markdown(records: Records) -> str:
    """A table for every workload: mean and standard deviation, and how much worse than the yardstick."""
    lines: list[str] = []
    for workload in dict.fromkeys(record["workload"] for record in records):
        group = [record for record in records if record["workload"] == workload]
        first = group[0]
        metrics = [metric for metric in METRICS if any(record[metric] is not None for record in group)]
        title = f"{workload}, {first['optimizer']}, {first['ranks']} ranks, {first['steps']} steps"
        columns = ["configuration", "seeds"]
        for metric in metrics:
            columns += [metric.replace("_", " "), "worse by", "within"]
        columns += ["bytes / float32 ring"]
        lines += [f"### {title}, beside {first['yardstick']}", "", "| " + " | ".join(columns) + " |"]
        lines.append("|" + "---|" * len(columns))
        for record in group:
            cells = [record["configuration"], str(record["n_seeds"])]
            for metric in metrics:
                cells.append(f"{_number(record[metric])} ± {_number(record[f'{metric}_sd'])}")
                cells.append(_number(record[f"{metric}_worse_by"]))
                within = record[f"{metric}_within"]
                cells.append("-" if within is None else "yes" if within else "no")
            cells.append(f"{record['ratio_mean']:.4f}")
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
