"""Simulated training as measures: figures on networks that are not here; the simulator against the test network."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from gradwire.registry import parse_spec
from gradwire_lab.bench.measures import Call, Measured
from gradwire_lab.bench.measures.commands import run_command, train
from gradwire_lab.results.experiment import Cell
from gradwire_lab.results.records import Record, write_text
from gradwire_lab.simulator import workloads
from gradwire_lab.simulator.inputs import make_trace
from gradwire_lab.simulator.predictions import predict
from gradwire_lab.simulator.schemes.registry import FORMAT, TABLE, MeasuredTable, to_text
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


# ---- the simulator against the test network, and the sizes that it predicts with


# A reduction of so few bytes takes its hops' latency and nothing else; by a scheme of each kind of lane.
_LATENCY_BYTES = 1024
_LANES = {"plain": "backend", "gcomp": "frames"}


def measure_reality(call: Call) -> Measured:
    """Predicted and measured iteration times: axes ranks, rate, scheme (`ddp` among them, whose computation all share)."""
    tiny = {"scheme": list(_LANES), "n_bytes": _LATENCY_BYTES, "rounds": 7, "budget": 1}
    tiny |= {"ranks": call.get("ranks"), "rate": call.get("rate")}
    hops = 2 * (int(call.get("ranks")) - 1)
    latencies_s = {_LANES[one["scheme"]]: one["time_s"] / hops for one in run_command("allreduce", tiny, call)}
    found = train(call)
    predicted = predict([record for _, record in found], latencies_s, str(call.get("workload")))
    return [
        (cell, {**record, "error_size": abs(record["error"]), **{key: measured[key] for key in ("network", "compute")}})
        for (cell, measured), record in zip(found, predicted, strict=True)
    ]


def measure_sizes(call: Call) -> Measured:
    """Bytes and codec times on emulated ranks, which also go into the simulator's table: axes workload, ranks, scheme."""
    found = train(call)
    content: dict[str, Any] = {"format": FORMAT, "workloads": {}}
    if TABLE.is_file():
        MeasuredTable.load(TABLE)  # refuses what is none, before it is written over
        content = json.loads(TABLE.read_text(encoding="utf-8"))
    name, options = parse_spec(str(call.get("workload")))
    entry = content["workloads"].setdefault(name, {"schemes": {}})
    for _, record in found:
        rows = {row["ranks"]: row for row in entry["schemes"].get(record["scheme"], [])}
        rows[record["ranks"]] = table_row(record)
        entry["schemes"][record["scheme"]] = [rows[n_ranks] for n_ranks in sorted(rows)]
    first = found[0][1]
    words = "".join(f" ({key}={str(value).rpartition('/')[2]})" for key, value in options.items())
    entry["provenance"] = {
        "command": f"gradwire bench run {call.key}; {name}{words}",
        **{key: first.get(key) for key in ("gradients", "cpu", "n_cores", "torch")},
    }
    write_text(TABLE, to_text(content))
    return found


def table_row(record: Record) -> Record:
    """What the simulator's table holds of a record of `bench train`."""
    decode_s = record["decode_s"] or 0.0
    row = {"ranks": record["ranks"], "n_values": record["n_bytes"] // 4, "sent_bytes": record["wire_bytes"]}
    row |= {"encode_s": max(0.0, (record["codec_s"] or 0.0) - decode_s), "decode_s": decode_s}
    return row | {key: record[key] for key in ("commit", "date")}
