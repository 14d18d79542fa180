"""Numbers of GComp's figures 9, 11, 13a, 18 and 20 from finished training runs; every function returns flat records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradwire.bench.exponents import entropy_bits, exponent_histogram
from gradwire.bench.fidelity_runs import FinishedRun
from gradwire.bench.figures.numbers import Records
from gradwire.codecs.gcomp import GComp, HuffmanTable, describe
from gradwire.workloads.gradients import load_gradients

BASELINE = "gcomp:importance=none"
PAPER = "gcomp:importance=paper"
STATIC = "gcomp:importance=paper,refresh_every=0"
TRUNCATE, PERIODIC = "truncate:bits=18", "periodic:every=8"

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


def describe_exponents(runs: Runs) -> Records:
    """Fig. 13a: the exponent part of GComp's messages under the built-in table for ever, and under refreshed ones.

    From message descriptions: the gradients that the baseline saved are encoded again, as the sums that the ring's last
    hops carry. The refreshed table is made from the gradient saved before, so it is as old as one in training ever gets
    if gradients are saved as often as tables are made.
    """
    run = runs.get(BASELINE)
    if run is None or run.folder is None:
        return []
    records: Records = []
    earlier: HuffmanTable | None = None
    for path in sorted((run.folder / "gradients").glob("step-*.npz")):
        gradient = load_gradients(path).gradient * np.float32(run.summary["ranks"])
        histogram = exponent_histogram(gradient)
        static = _exponent_bits(gradient, None)
        if earlier is not None:
            refreshed = _exponent_bits(gradient, earlier)
            record: dict[str, Any] = {"workload": run.workload, "step": int(path.stem.removeprefix("step-"))}
            for name, bits in (("static", static), ("refreshed", refreshed), ("entropy", entropy_bits(histogram))):
                record |= {f"{name}_bits": bits, f"{name}_share": bits / 32}
            records.append(record)
        earlier = HuffmanTable.from_histogram(torch.from_numpy(histogram))
    return records


def _exponent_bits(gradient: npt.NDArray[np.float32], table: HuffmanTable | None) -> float:
    codec = GComp("none", table=table)
    out = torch.empty(codec.max_encoded_bytes(gradient.size, torch.float32), dtype=torch.uint8)
    n_bytes = codec.encode(torch.from_numpy(gradient), out)
    return float(describe(out[:n_bytes])["exponent_bits"])


def describe_times(runs: Runs) -> Records:
    """Figs. 11 and 20: CPU load, iteration time, and seconds to a loss. Mean nothing on a machine that is not quiet.

    The loss to reach is the baseline's (`loss_to_reach`).
    """
    if BASELINE not in runs:
        return []
    target = loss_to_reach(runs[BASELINE].column("loss"))
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


def loss_to_reach(losses: Values) -> float:
    """What `losses` stay at or below in their last fifth: the slowest honest choice that is reached."""
    return float(losses[-max(_WINDOW, losses.size // 5) :].max())


def first_below(losses: Values, target: float) -> int | None:
    """The last of the first ten steps in a row whose losses are at most `target`; None if there are none."""
    row = 0
    for step, loss in enumerate(losses):
        row = row + 1 if loss <= target else 0
        if row == _WINDOW:
            return step
    return None
