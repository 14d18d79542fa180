"""Simulated training as measures: AQGB's and GComp's figures on networks that are not here."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradwire_lab.bench.measures import Call, Measured
from gradwire_lab.results.experiment import Cell
from gradwire_lab.results.records import Record
from gradwire_lab.simulator import workloads
from gradwire_lab.simulator.inputs import make_trace
from gradwire_lab.simulator.search import SimulatedRun
from gradwire_lab.simulator.stage import Setting, Stragglers, jitter_by_name
from gradwire_lab.workloads.calibration import reference_calibration


def measure(call: Call) -> Measured:
    """One simulation a cell: scheme, workload, workers, gbit_per_s, jitter, sigma, seconds or rounds, seed, codec.

    Fields beside the simulation's: wait_share (T_wait / computation); more_rounds: against `broadcast-32` in the same run;
    samples_per_s where a calibration has a batch size.
    """
    found = [(cell, simulate(call, cell)[1]) for cell in call.cells]
    for cell, record in found:
        base = next((r for c, r in found if c == {**cell, "scheme": "broadcast-32"}), None)
        if base is not None:
            record["more_rounds"] = record["rounds"] / base["rounds"] - 1
    return found


def simulate(call: Call, cell: Cell, **changes: Any) -> tuple[Any, Record]:
    """The simulation of a cell, and its record."""
    given = {"workload": "resnet50-4blocks", "workers": 16, "gbit_per_s": 2.5, "jitter": "common", "sigma": 1.5, "seed": 0,
             "codec": True, **call.fixed, **cell}  # fmt: skip
    workload = workloads.by_name(str(given["workload"]))
    jitter = jitter_by_name(str(given["jitter"]), float(given["sigma"]), int(given["seed"]))
    setting = Setting(workload, int(given["workers"]), float(given["gbit_per_s"]) * 1e9, jitter=jitter)
    run = SimulatedRun(
        str(given["scheme"]),
        setting.replace(**changes),
        given.get("seconds"),
        given.get("rounds"),
        options={"floor": given["floor"]} if "floor" in given else {},
        measured_on=given.get("measured_on", {}).get(given["workload"]) if "measured_on" in given else None,
        with_codec_times=bool(given["codec"]),
    )
    simulation, record = run.do()
    record["wait_share"] = None if record["wait_s"] is None else record["wait_s"] / record["compute_s"]
    calibration = reference_calibration(str(given["workload"]))
    if calibration is not None and record["round_s"]:
        record["samples_per_s"] = record["workers"] * calibration.batch_size / record["round_s"]
    return simulation, record


def measure_rates(call: Call) -> Measured:
    """AQGB's Fig. 9: a record for each stretch of one rate; `changes` are {second: Gb/s}.

    The first five seconds of a stretch do not count: its first rounds finish under the old estimate.
    """
    (cell,) = call.cells
    changes = [(float(at_s), float(rate) * 1e9) for at_s, rate in call.get("changes").items()]
    simulation, record = simulate(call, cell, trace=make_trace(changes))
    metrics, n_values = simulation.metrics, simulation.setting.workload.n_values
    shares = [(one.ended_s, one.sent_bits / n_values) for one in metrics.rounds if one.sent_bits is not None]
    ends_s = [*(at_s for at_s, _ in changes[1:]), float(call.get("seconds"))]
    found: Measured = []
    for (at_s, rate_bps), end_s in zip(changes, ends_s, strict=True):
        ratios = [ratio for moment_s, ratio in metrics.ratios if at_s + 5 <= moment_s < end_s]
        bits = [bits for moment_s, bits in shares if at_s + 5 <= moment_s < end_s]
        stretch = {"from_s": at_s, "rate_bps": rate_bps, "first_stage_ratio": float(np.mean(ratios))}
        found.append((cell, {**record, **stretch, "bits_per_value": float(np.mean(bits))}))
    return found


def measure_stragglers(call: Call) -> Measured:
    """AQGB's Fig. 8: how long a round computes, over the axis `sigma`."""
    found: Measured = []
    for cell in call.cells:
        jitter = Stragglers(float(cell["sigma"]))
        rounds = np.stack([jitter.factors(number, 16) * 1.5 for number in range(int(call.get("rounds")))])
        quantiles = zip(("median_s", "p95_s", "p99_s"), np.quantile(rounds, [0.5, 0.95, 0.99]).tolist(), strict=True)
        slowest = float(rounds.max(axis=1).mean())
        found.append((cell, {"mean_s": float(rounds.mean()), **dict(quantiles), "slowest_s": slowest}))
    return found
