"""Simulated training as measures: AQGB's and GComp's figures on networks that are not here."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from gradwire_lab.bench.measures import Call, Measured, cell_by_cell
from gradwire_lab.results.records import Record
from gradwire_lab.simulator import workloads
from gradwire_lab.simulator.inputs import make_trace
from gradwire_lab.simulator.search import SimulatedRun
from gradwire_lab.simulator.stage import Setting, Stragglers, jitter_by_name
from gradwire_lab.workloads.calibration import reference_calibration


def measure(call: Call) -> Measured:
    """One simulation a cell; more_rounds: against `broadcast-32` in the same run."""
    found = [(cell, simulate(**{**call.fixed, **cell})[1]) for cell in call.cells]
    for cell, record in found:
        base = next((r for c, r in found if c == {**cell, "scheme": "broadcast-32"}), None)
        if base is not None:
            record["more_rounds"] = record["rounds"] / base["rounds"] - 1
    return found


def simulate(scheme: str, *, workload: str = "resnet50-4blocks", workers: int = 16, gbit_per_s: float = 2.5,
             jitter: str = "common", sigma: float = 1.5, seed: int = 0, codec: bool = True,
             seconds: float | None = None, rounds: int | None = None, trace: Any = None,
             measured_on: Mapping[str, str] = MappingProxyType({}), **options: Any) -> tuple[Any, Record]:  # fmt: skip
    """A simulation, and its record with wait_share (T_wait / computation), and samples_per_s of a calibration's batch size."""
    disturbance = jitter_by_name(jitter, sigma, seed)
    setting = Setting(workloads.by_name(workload), workers, gbit_per_s * 1e9, jitter=disturbance, trace=trace)
    simulation, record = SimulatedRun(scheme, setting, seconds, rounds, options, measured_on.get(workload), codec).do()
    record["wait_share"] = None if record["wait_s"] is None else record["wait_s"] / record["compute_s"]
    calibration = reference_calibration(workload)
    if calibration is not None and record["round_s"]:
        record["samples_per_s"] = record["workers"] * calibration.batch_size / record["round_s"]
    return simulation, record


@cell_by_cell
def measure_rates(_: Call, changes: Mapping[float, float], seconds: float, **arguments: Any) -> list[Record]:
    """AQGB's Fig. 9: a record for each stretch of one rate; `changes` are {second: Gb/s}. The first five seconds of a
    stretch do not count: its first rounds finish under the old estimate."""
    rates_bps = {float(at_s): rate * 1e9 for at_s, rate in changes.items()}
    simulation, record = simulate(**arguments, seconds=seconds, trace=make_trace([*rates_bps.items()]))
    metrics, n_values = simulation.metrics, simulation.setting.workload.n_values
    shares = [(one.ended_s, one.sent_bits / n_values) for one in metrics.rounds if one.sent_bits is not None]
    found = []
    for (at_s, rate_bps), end_s in zip(rates_bps.items(), [*rates_bps, seconds][1:], strict=True):
        ratios = [ratio for moment_s, ratio in metrics.ratios if at_s + 5 <= moment_s < end_s]
        bits = [bits for moment_s, bits in shares if at_s + 5 <= moment_s < end_s]
        stretch = {"from_s": at_s, "rate_bps": rate_bps, "first_stage_ratio": float(np.mean(ratios))}
        found.append({**record, **stretch, "bits_per_value": float(np.mean(bits))})
    return found


@cell_by_cell
def measure_stragglers(_: Call, sigma: float, rounds: int) -> Record:
    """AQGB's Fig. 8: how long a round computes."""
    jitter = Stragglers(sigma)
    computed_s = np.stack([jitter.factors(number, 16) * 1.5 for number in range(rounds)])
    quantiles = zip(("median_s", "p95_s", "p99_s"), np.quantile(computed_s, [0.5, 0.95, 0.99]).tolist(), strict=True)
    slowest_s = float(computed_s.max(axis=1).mean())
    return {"mean_s": float(computed_s.mean()), **dict(quantiles), "slowest_s": slowest_s}
