"""From what one cell of the test network measured to what the simulator predicts for each of its schemes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradwire.registry import parse_spec
from gradwire.schemes.aqgb.pacing import DEFAULT_CONFIDENCE
from gradwire.schemes.auto.costs import CodecCost, SharedCores, bucket_load
from gradwire_lab.simulator.jitter import Uniform
from gradwire_lab.simulator.replayed import block_workload, bucket_workload
from gradwire_lab.simulator.schemes.aqgb import AqgbModel
from gradwire_lab.simulator.schemes.base import SchemeModel
from gradwire_lab.simulator.schemes.broadcast import FixedBroadcast
from gradwire_lab.simulator.schemes.collective import Collective
from gradwire_lab.simulator.schemes.measured import shape_of
from gradwire_lab.simulator.simulation import Simulation
from gradwire_lab.simulator.stage import Setting

Record = dict[str, Any]

# c10d gives Gloo as many threads, each of which runs a collective.
_GLOO_THREADS = 2
_BROADCASTS = ("broadcast", "aqgb")
# A shared exponent for every 256 values (docs/format.md).
_EXPONENT_BITS = 8 / 256
_ROUNDS = 30


def predict(
    records: Sequence[Record], latencies_s: dict[str, float], workload: str, n_cores: int | None = None
) -> list[Record]:
    """Predicted and measured iteration times of one cell, one record for each scheme.

    Inputs are the cell's own: what DDP alone computed in a step, bytes, codec times and processor times of each scheme, and
    what the smallest reduction took for each of its hops.

    Args:
        records: of `bench train --compute emulate`, `ddp` among them.
        latencies_s: of a hop, for "backend" and "frames".
        workload: as `bench train` was given it.
        n_cores: that all ranks share; None: as many as the records name. See `rate_with_cores`.
    """
    computed_s = next(record["compute_s"] for record in records if record["scheme"] == "ddp")
    return [_predict_one(record, latencies_s, workload, computed_s, n_cores) for record in records]


def rate_with_cores(record: Record, n_cores: int | None = None) -> float:
    """Bits a second at which a rank gets through what its link carries: the link's rate, or less for want of cores.

    N ranks on C cores have C/N of a core each, and never more than one, for threads of one rank take turns at Python's
    lock. The work that sending and receiving take is the processor time of a step less the codec's, which is modelled by
    itself; it goes on beside the transfer and bounds its rate. Records without processor times leave the link's rate.
    """
    rate_bps, cpu_s, n_cores = float(record["rate_bps"]), record.get("cpu_s"), n_cores or record.get("n_cores")
    if cpu_s is None or n_cores is None:
        return rate_bps
    transport_s = cpu_s - (record["codec_s"] or 0.0)
    bits = 8 * _link_bytes(record)
    if transport_s <= 0 or bits == 0:
        return rate_bps
    return min(rate_bps, min(1.0, n_cores / record["ranks"]) * bits / transport_s)


def _predict_one(
    record: Record, latencies_s: dict[str, float], workload: str, step_s: float, n_cores: int | None
) -> Record:
    scheme, n_ranks = record["scheme"], record["ranks"]
    is_broadcast = scheme in _BROADCASTS
    # Gloo's own all-reduce carries sums; the others travel in gradwire's frames.
    is_sum = not is_broadcast and shape_of(scheme) in ("sum", "agreed-sum")
    latency_s, rate_bps = latencies_s["backend" if is_sum else "frames"], rate_with_cores(record, n_cores)
    make_workload = block_workload if is_broadcast else bucket_workload
    name, options = parse_spec(workload)
    setting = Setting(make_workload(name, options, step_s), n_ranks, rate_bps, jitter=Uniform(0.0), latency_s=latency_s,
                      at_once=_GLOO_THREADS)  # fmt: skip
    simulation = Simulation(setting, lambda simulation: _make_scheme(simulation, record))
    simulation.run(rounds=_ROUNDS)
    ends_s = simulation.round_ends_s
    # From the middle on: AQGB has learnt its rounds by then. Between ends, since a live step's wall time is between them.
    middle = len(ends_s) // 2
    predicted_s = (ends_s[-1] - ends_s[middle]) / (len(ends_s) - 1 - middle)
    measured_s = record["iteration_s"]
    return {
        "scheme": scheme,
        "options": record["options"],
        "workload": workload,
        "ranks": n_ranks,
        "rate_bps": record["rate_bps"],
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "measured_s_low": record["iteration_s_low"],
        "measured_s_high": record["iteration_s_high"],
        "error": predicted_s / measured_s - 1,
        "compute_s": step_s,
        "codec_s": record["codec_s"],
        "cpu_s": record.get("cpu_s"),
        "rate_with_cores_bps": rate_bps,
        "wire_bytes": _link_bytes(record),
        "latency_s": latency_s,
        "compute": record["compute"],
        "commit": record["commit"],
        "date": record["date"],
    }


def _link_bytes(record: Record) -> float:
    """What a rank's link carried in a step: by the kernel's counters, with the headers that a shaped link also carries."""
    return float(record["kernel_bytes"] or record["wire_bytes"])


def _make_scheme(simulation: Simulation, record: Record) -> SchemeModel:
    n_ranks, n_values = record["ranks"], record["n_bytes"] / 4
    bits_per_value = 8 * _link_bytes(record) / n_values
    decode_s = record["decode_s"] or 0.0
    encode_s = max(0.0, (record["codec_s"] or 0.0) - decode_s)
    copies = max(1, n_ranks - 1)
    if record["scheme"] == "broadcast":
        codec = CodecCost(encode_s / n_values, decode_s / n_values / copies)
        return FixedBroadcast(simulation, bits_per_value / copies, codec, is_fan_out=True)
    if record["scheme"] == "aqgb":
        # Its bits are not taken from the record: predicting them is the point.
        return AqgbModel(
            simulation, overhead_bits_per_value=_EXPONENT_BITS, is_fan_out=True, confidence=DEFAULT_CONFIDENCE
        )
    shape = shape_of(record["scheme"])
    # The message whose way of this shape puts so many bits on a link.
    share = bucket_load(shape, 8, CodecCost(bits=1.0), simulation.setting.link, SharedCores(n_ranks, 1, 2)).wire_bytes
    return Collective(
        simulation, shape, CodecCost(encode_s / n_values, decode_s / n_values, bits_per_value / (share or 1))
    )
