"""Numbers of `bench convergence`: means and spreads over seeds; every function returns flat records."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire.bench.fidelity_runs import FinishedRun
from gradwire.bench.figures.fidelity_numbers import first_below, loss_to_reach
from gradwire.bench.figures.numbers import Records

# Of one workload, by configuration: one run a seed.
Seeds = dict[str, list[FinishedRun]]

_UNSTEADY_STEPS = 2  # DDP rebuilds its buckets in step 1

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


def describe_times(runs: Seeds, yardstick: str) -> Records:
    """How long a step takes, and how long training takes to a loss; means nothing on a machine that is not quiet.

    The loss to reach is what the yardstick's run of the same seed stays below in its last fifth. `seconds_to_loss` and
    `steps_to_loss` are means over the seeds that reach it, `n_reached` of them; `speed_up`: how many times sooner than
    the yardstick, over the seeds that both have reached it with.
    """
    targets = {run.summary["seed"]: loss_to_reach(run.column("loss")) for run in runs.get(yardstick, [])}
    reached = {name: _reach(finished, targets) for name, finished in runs.items()}
    base = reached.get(yardstick, {})
    records: Records = []
    for name, finished in runs.items():
        mine = reached[name]
        warm = [run.column("iteration_s")[_UNSTEADY_STEPS:] for run in finished]
        shared = sorted(mine.keys() & base.keys())
        records.append(
            {
                "workload": finished[0].workload,
                "configuration": name,
                "yardstick": yardstick,
                "iteration_s": float(np.median(np.concatenate(warm))),
                "n_reached": len(mine),
                "target_loss": statistics.fmean(targets.values()) if targets else None,
                "steps_to_loss": statistics.fmean(steps for steps, _ in mine.values()) if mine else None,
                "seconds_to_loss": statistics.fmean(seconds for _, seconds in mine.values()) if mine else None,
                "speed_up": sum(base[seed][1] for seed in shared) / sum(mine[seed][1] for seed in shared)
                if shared
                else None,
            }
        )
    return records


def _reach(finished: Sequence[FinishedRun], targets: dict[int, float]) -> dict[int, tuple[int, float]]:
    """{seed: (steps, seconds)} to the seed's target, of the runs that reach it."""
    found: dict[int, tuple[int, float]] = {}
    for run in finished:
        seed = run.summary["seed"]
        step = first_below(run.column("loss"), targets[seed]) if seed in targets else None
        if step is not None:
            found[seed] = (step + 1, float(run.column("elapsed_s")[step]))
    return found


def times_to_markdown(records: Records) -> str:
    """A table for every workload and rate."""
    columns = ("iteration_s", "target_loss", "n_reached", "steps_to_loss", "seconds_to_loss", "speed_up")
    lines: list[str] = []
    for workload in dict.fromkeys(record["workload"] for record in records):
        group = [record for record in records if record["workload"] == workload]
        lines += [f"### time to a loss, {workload}, beside {group[0]['yardstick']}", ""]
        lines += ["| configuration | " + " | ".join(column.replace("_", " ") for column in columns) + " |"]
        lines.append("|" + "---|" * (1 + len(columns)))
        for record in group:
            cells = [record["configuration"], *("-" if record[c] is None else f"{record[c]:.4g}" for c in columns)]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


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
