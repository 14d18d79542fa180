"""From what one cell of the test network measured to what the simulator predicts for each of its schemes."""

from collections.abc import Sequence
from typing import Any

from torch._C import _distributed_c10d as c10d

from gradwire.errors import InvalidArgument
from gradwire.registry import parse_spec
from gradwire.schemes.aqgb.pacing import DEFAULT_CONFIDENCE
from gradwire.schemes.auto.costs import CodecCost, SharedCores, bucket_load
from gradwire.stepping.blocks import find_blocks
from gradwire_lab.simulator.schemes.broadcast import AqgbModel, FixedBroadcast
from gradwire_lab.simulator.schemes.collective import Collective
from gradwire_lab.simulator.schemes.registry import shape_of
from gradwire_lab.simulator.simulation import SchemeModel, Simulation
from gradwire_lab.simulator.stage import Setting, Uniform
from gradwire_lab.simulator.workloads import WorkloadTimes, from_moments
from gradwire_lab.workloads.replay import ReplayModel, replay_by_name

Record = dict[str, Any]

# c10d gives Gloo as many threads, each of which runs a collective.
_GLOO_THREADS = 2
_BROADCASTS = ("broadcast", "aqgb")
# A shared exponent for every 256 values (docs/format.md).
_EXPONENT_BITS = 8 / 256
_ROUNDS = 30
_BUCKET_BYTES = 25 << 20  # DDP's own, which `bench train` leaves as they are
_PIECE_BYTES = 1 << 20  # of Gloo's all-reduce, which waits between two of a bucket as it does between two ranks
_N_BLOCKS = 4  # of the live broadcasts


def predict(records: Sequence[Record], latencies_s: dict[str, float], workload: str) -> list[Record]:
    """Predicted and measured iteration times of one cell, one record for each scheme.

    Inputs are the cell's own, of `bench train --compute emulate` with `ddp` among its schemes: what DDP alone computed in a
    step, bytes, codec times and processor times of each scheme, and what the smallest reduction took for each of its hops
    ("backend" and "frames").
    """
    computed_s = next(record["compute_s"] for record in records if record["scheme"] == "ddp")
    return [_predict_one(record, latencies_s, workload, computed_s) for record in records]


def rate_with_cores(record: Record) -> float:
    """Bits a second at which a rank gets through what its link carries: the link's rate, or less for want of cores.

    N ranks on C cores have C/N of a core each, and never more than one, for threads of one rank take turns at Python's
    lock. The work that sending and receiving take is the processor time of a step less the codec's, which is modelled by
    itself; it goes on beside the transfer and bounds its rate. Records without processor times leave the link's rate.
    """
    rate_bps, cpu_s, n_cores = float(record["rate_bps"]), record.get("cpu_s"), record.get("n_cores")
    transport_s, bits = (cpu_s or 0.0) - (record["codec_s"] or 0.0), 8 * _link_bytes(record)
    if n_cores is None or transport_s <= 0 or bits == 0:
        return rate_bps
    return min(rate_bps, min(1.0, n_cores / record["ranks"]) * bits / transport_s)


def _predict_one(record: Record, latencies_s: dict[str, float], workload: str, step_s: float) -> Record:
    scheme, n_ranks = record["scheme"], record["ranks"]
    is_broadcast = scheme in _BROADCASTS
    # Gloo's own all-reduce carries sums; the others travel in gradwire's frames.
    is_sum = not is_broadcast and shape_of(scheme) in ("sum", "agreed-sum")
    latency_s, rate_bps = latencies_s["backend" if is_sum else "frames"], rate_with_cores(record)
    times = (block_workload if is_broadcast else bucket_workload)(*parse_spec(workload), step_s)
    if is_sum:
        largest_bytes = _link_bytes(record) * max(block.n_values for block in times.blocks) / times.n_values
        latency_s *= 1 + largest_bytes // _PIECE_BYTES / (2 * (n_ranks - 1))
    setting = Setting(times, n_ranks, rate_bps, jitter=Uniform(0.0), latency_s=latency_s, at_once=_GLOO_THREADS)
    simulation = Simulation(setting, lambda simulation: _make_scheme(simulation, record))
    simulation.run(rounds=_ROUNDS)
    ends_s = simulation.round_ends_s
    # From the middle on: AQGB has learnt its rounds by then. Between ends, since a live step's wall time is between them.
    middle = len(ends_s) // 2
    predicted_s = (ends_s[-1] - ends_s[middle]) / (len(ends_s) - 1 - middle)
    taken = ("scheme", "options", "ranks", "rate_bps", "codec_s", "cpu_s", "compute", "commit", "date")
    return {
        **{key: record.get(key) for key in taken},
        "workload": workload,
        "predicted_s": predicted_s,
        **{f"measured_s{end}": record[f"iteration_s{end}"] for end in ("", "_low", "_high")},
        "error": predicted_s / record["iteration_s"] - 1,
        "compute_s": step_s,
        "rate_with_cores_bps": rate_bps,
        "wire_bytes": _link_bytes(record),
        "latency_s": latency_s,
    }


def _link_bytes(record: Record) -> float:
    """What a rank's link carried in a step: by the kernel's counters, with the headers that a shaped link also carries."""
    return float(record["kernel_bytes"] or record["wire_bytes"])


def _make_scheme(simulation: Simulation, record: Record) -> SchemeModel:
    n_ranks, n_values = record["ranks"], record["n_bytes"] / 4
    bits_per_value = 8 * _link_bytes(record) / n_values
    decode_s = record["decode_s"] or 0.0
    encode_s = max(0.0, (record["codec_s"] or 0.0) - decode_s)
    if record["scheme"] == "broadcast":
        copies = max(1, n_ranks - 1)
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


# ---- an emulated workload: when which bytes are ready in a backward pass


def bucket_workload(name: str, options: dict[str, Any], step_s: float) -> WorkloadTimes:
    """DDP's buckets as blocks, the first to be used first. Raises: InvalidArgument (no such workload)."""
    model = replay_by_name(name, **options).make_model()
    # Nothing of the next forward pass begins before all buckets are there: it is all in the one that is used last.
    pieces = [(values, ready_s, 0.0) for values, ready_s, _ in _buckets(model)]
    pieces[0] = (*pieces[0][:2], sum(layer.forward_s for layer in model.layers))
    return _in_order(pieces, f"{name}, DDP's buckets", model, step_s)


def block_workload(name: str, options: dict[str, Any], step_s: float) -> WorkloadTimes:
    """The blocks of the schemes that broadcast; each is ready with the last bucket that holds any of it."""
    model = replay_by_name(name, **options).make_model()
    ready_s = {id(parameter): ready for _, ready, members in _buckets(model) for parameter in members}
    blocks = find_blocks(model, model.parameters(), _N_BLOCKS)
    home = {id(parameter): block.index for block in blocks for parameter in block.parameters}
    forward_s, index = [0.0] * len(blocks), 0
    for layer in model.layers:
        index = home[id(layer.parameters[0])] if layer.parameters else index
        forward_s[index] += layer.forward_s
    pieces = [
        (block.n_elements, max(ready_s[id(parameter)] for parameter in block.parameters), forward_s[block.index])
        for block in blocks
    ]
    return _in_order(pieces, f"{name}, {len(blocks)} blocks", model, step_s)


def _buckets(model: ReplayModel) -> list[tuple[int, float, list[Any]]]:
    """(values, seconds of backward pass until its gradient is there, parameters) of each bucket, the first one first.
    As DDP rebuilds them after the first step, in the order in which gradients arrive."""
    parameters: list[Any] = []
    arrivals_s: list[float] = []
    now_s = 0.0
    for layer in reversed(model.layers):
        now_s += layer.backward_s
        parameters += reversed(layer.parameters)
        arrivals_s += [now_s] * len(layer.parameters)
    limits = [c10d._DEFAULT_FIRST_BUCKET_BYTES, _BUCKET_BYTES]
    indices, _ = c10d._compute_bucket_assignment_by_size(parameters, limits, [False] * len(parameters))
    buckets = []
    for members in indices:
        held = [parameters[index] for index in members]
        buckets.append((sum(one.numel() for one in held), max(arrivals_s[index] for index in members), held))
    return sorted(buckets, key=lambda bucket: bucket[1])


def _in_order(
    pieces: Sequence[tuple[int, float, float]], origin: str, model: ReplayModel, step_s: float
) -> WorkloadTimes:
    """Blocks of (values, seconds of backward pass until ready, seconds of forward pass), by when they are ready."""
    forward_s = sum(layer.forward_s for layer in model.layers)
    compute_s = forward_s + sum(layer.backward_s for layer in model.layers)
    if compute_s <= 0:
        raise InvalidArgument(f"{origin}: a step without computation cannot be scaled; give step_ms=")
    # Of what is ready at one moment the first to be used comes last.
    moments = [(str(i), n, forward_s + ready_s, of_it_s) for i, (n, ready_s, of_it_s) in reversed([*enumerate(pieces)])]
    return from_moments(origin, moments, compute_s, "emulated bench train").scaled(step_s)
