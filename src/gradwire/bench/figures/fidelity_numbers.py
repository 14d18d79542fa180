"""Numbers of GComp's figures 9, 11, 13a, 18 and 20 from finished training runs; every function returns flat records."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire.bench.fidelity_runs import FinishedRun
from gradwire.bench.figures.numbers import Records

BASELINE = "gcomp:importance=none"
PAPER = "gcomp:importance=paper"
STATIC = "gcomp:importance=paper,refresh_every=0"
TRUNCATE, PERIODIC = "truncate:bits=18", "periodic:every=8"
_UNIFORM_BITS = 10
UNIFORM = f"gcomp:importance=uniform,bits={_UNIFORM_BITS}"

# Of one workload, by configuration.
Runs = Mapping[str, FinishedRun]
Values = npt.NDArray[np.float64]

_WINDOW = 10  # steps below a loss before it counts as reached, as in the paper (section 7.6)


def loss_deviation(run: FinishedRun, baseline: FinishedRun) -> Values:
    """(n_steps,): |loss - baseline's loss|, the loss being the mean over the ranks."""
    return np.abs(run.column("loss") - baseline.column("loss"))


def describe_fidelity(runs: Runs) -> Records:
    """Fig. 18 and the frontier: every run's deviation from the baseline beside what it sent; [] without a baseline.

    `below_truncate`, `below_periodic`: by what share the mean deviation is smaller than theirs.
    """
    if BASELINE not in runs:
        return []
    means = {name: float(loss_deviation(run, runs[BASELINE]).mean()) for name, run in runs.items()}
    records: Records = []
    for name, run in runs.items():
        deviation, ratio = loss_deviation(run, runs[BASELINE]), run.column("ratio")
        summary = run.summary
        record: dict[str, Any] = {
            "workload": run.workload,
            "optimizer": summary["optimizer"],
            "configuration": name,
            "steps": len(run.steps),
            "ranks": summary["ranks"],
            "deviation_mean": means[name],
            **{f"deviation_p{q}": float(np.percentile(deviation, q)) for q in (25, 50, 75)},
            "deviation_max": float(deviation.max()),
        }
        for rival, key in ((TRUNCATE, "below_truncate"), (PERIODIC, "below_periodic")):
            known = rival in means and means[rival] > 0 and name not in (rival, BASELINE)
            record[key] = 1 - means[name] / means[rival] if known else None
        record |= {
            "ratio_mean": float(ratio.mean()),
            "ratio_first_10": float(ratio[:10].mean()),
            "ratio_last_10": float(ratio[-10:].mean()),
            "loss_last_10": summary["loss_last_10"],
            "held_out_loss": summary.get("held_out_loss"),
            "accuracy": summary.get("accuracy"),
            "replicas_equal": summary["replicas_equal"],
            "parameters_sha256": summary["parameters_sha256"],
            **{key: summary.get(key) for key in ("cpu", "n_cores", "torch", "gradwire", "commit", "network", "date")},
        }
        records.append(record)
    return records


def exponent_shares(runs: Runs) -> dict[str, Values]:
    """Fig. 13a: {"refreshed", "static"}: (n_steps,) bytes of the exponent part, headers and frames included, as a share
    of a float32 ring's; {} unless the four runs it takes are there.

    From differences of otherwise equal runs. A value that is not 0 takes 24 bits of sign and mantissa at importance
    none and 1 + k at uniform k bits, the rest of the message being the same, so 24 / (23 - k) of what the two differ by
    is the mantissa part. The table changes no value: the runs with and without its refresh differ in this part alone.
    """
    if not {BASELINE, UNIFORM, PAPER, STATIC} <= runs.keys() or not _same_parameters(runs[PAPER], runs[STATIC]):
        return {}
    sent = {name: runs[name].column("ratio") for name in (BASELINE, UNIFORM, PAPER, STATIC)}
    refreshed = sent[BASELINE] - 24 / (23 - _UNIFORM_BITS) * (sent[BASELINE] - sent[UNIFORM])
    return {"refreshed": refreshed, "static": refreshed + sent[STATIC] - sent[PAPER]}


def describe_exponents(runs: Runs) -> Records:
    """Fig. 13a as means over a quarter of the steps each, and over all."""
    shares = exponent_shares(runs)
    if not shares:
        return []
    n_steps = shares["static"].size
    edges = [round(n_steps * quarter / 4) for quarter in range(5)]
    records: Records = []
    for first, end in [*itertools.pairwise(edges), (0, n_steps)]:
        means = {name: float(values[first:end].mean()) for name, values in shares.items()}
        records.append(
            {
                "workload": runs[PAPER].workload,
                "first_step": first,
                "last_step": end - 1,
                "static_share": means["static"],
                "refreshed_share": means["refreshed"],
                "static_bits": 32 * means["static"],
                "refreshed_bits": 32 * means["refreshed"],
            }
        )
    return records


def describe_times(runs: Runs) -> Records:
    """Figs. 11 and 20: CPU load, iteration time, and seconds to a loss. Mean nothing on a machine that is not quiet.

    The loss to reach is what the baseline stays below in its last fifth: the slowest honest choice that it reaches.
    """
    if BASELINE not in runs:
        return []
    losses = runs[BASELINE].column("loss")
    target = float(losses[-max(_WINDOW, losses.size // 5) :].max())
    records: Records = []
    for name, run in runs.items():
        warm = slice(2, None) if len(run.steps) > 2 else slice(None)  # DDP rebuilds its buckets in step 1
        iteration_s, cpu_s = run.column("iteration_s")[warm], run.column("cpu_s")[warm]
        cores = float(cpu_s.sum() / iteration_s.sum()) if np.isfinite(cpu_s).all() else None
        reached = first_below(run.column("loss"), target)
        records.append(
            {
                "workload": run.workload,
                "configuration": name,
                "network": run.summary.get("network"),
                "iteration_s": float(np.median(iteration_s)),
                "cores_per_rank": cores,
                "machine_load": None if cores is None else cores * run.summary["ranks"] / run.summary["n_cores"],
                "target_loss": target,
                "steps_to_loss": None if reached is None else reached + 1,
                "seconds_to_loss": None if reached is None else float(run.column("elapsed_s")[reached]),
            }
        )
    return records


def first_below(losses: Values, target: float) -> int | None:
    """The last of the first ten steps in a row whose losses are at most `target`; None if there are none."""
    row = 0
    for step, loss in enumerate(losses):
        row = row + 1 if loss <= target else 0
        if row == _WINDOW:
            return step
    return None


def _same_parameters(one: FinishedRun, other: FinishedRun) -> bool:
    return bool(one.summary["parameters_sha256"] == other.summary["parameters_sha256"])
