"""The simulator against the test network, and the sizes that it predicts with."""

from typing import Any

from gradwire.registry import parse_spec
from gradwire_lab.bench.measures import Call, Measured
from gradwire_lab.bench.measures.commands import run_command, train
from gradwire_lab.results.records import write_text
from gradwire_lab.simulator.predictions import predict
from gradwire_lab.simulator.schemes.registry import FORMAT, TABLE, MeasuredTable, to_text

# A reduction of so few bytes takes its hops' latency and nothing else; by a scheme of each kind of lane.
_LATENCY_BYTES = 1024
_LANES = {"plain": "backend", "gcomp": "frames"}


def measure(call: Call) -> Measured:
    """Predicted and measured iteration times: axes ranks, rate, scheme (`ddp` among them, whose computation all share)."""
    tiny = {"scheme": list(_LANES), "n_bytes": _LATENCY_BYTES, "rounds": 7, "budget": 1}
    tiny |= {name: call.get(name) for name in ("ranks", "rate", "delay")}
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
        content = MeasuredTable.load(TABLE).content  # refuses what is none, before it is written over
    name, options = parse_spec(str(call.get("workload")))
    entry = content["workloads"].setdefault(name, {"schemes": {}})
    for _, record in found:
        rows = {row["ranks"]: row for row in entry["schemes"].get(record["scheme"], [])}
        decode_s = record["decode_s"] or 0.0
        row = {"ranks": record["ranks"], "n_values": record["n_bytes"] // 4, "sent_bytes": record["wire_bytes"]}
        row |= {"encode_s": max(0.0, (record["codec_s"] or 0.0) - decode_s), "decode_s": decode_s}
        rows[record["ranks"]] = row | {key: record[key] for key in ("commit", "date")}
        entry["schemes"][record["scheme"]] = [rows[n_ranks] for n_ranks in sorted(rows)]
    first = found[0][1]
    words = "".join(f" ({key}={str(value).rpartition('/')[2]})" for key, value in options.items())
    entry["provenance"] = {
        "command": f"gradwire bench run {call.key}; {name}{words}",
        **{key: first.get(key) for key in ("gradients", "cpu", "n_cores", "torch")},
    }
    write_text(TABLE, to_text(content))
    return found
