"""SlimGC's Figs. 12 and 13: what of a step overlaps, beside what overlap could gain at most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradwire.registry import parse_spec
from gradwire_lab.bench.measures import Call, Measured
from gradwire_lab.bench.measures.commands import train
from gradwire_lab.results.store import Record

_QUANTISERS = ("one-bit", "two-bit")


def measure(call: Call) -> Measured:
    """`bench train --overlap`, each record with what follows from its neighbours' (`add_bounds`)."""
    found = train(call)
    bounds = add_bounds({str(cell["scheme"]): record for cell, record in found})
    return [(cell, {**record, **bounds[str(cell["scheme"])]}) for cell, record in found]


def add_bounds(records: Mapping[str, Record]) -> dict[str, Record]:
    """{scheme spec: fields}, from the records of one run by scheme spec.

    computed_s, codec_busy_s, wire_s: C, K and X, a step's computation, codec work and transfer, each by itself; hidden_s:
    what of their sum the step did not take. bound: (C + K + X) / max(C + K, X), with the bare quantiser's own, is by how
    much overlap alone could speed it up; attainable: of that, what the bare quantiser has left; speed_up over it;
    bound_share: of what was attainable. overlap_x, exposed_codec_x: against the codec on the training thread.
    """
    found: dict[str, Record] = {}
    for spec, record in records.items():
        name, options = parse_spec(spec)
        codec = next((one for one in _QUANTISERS if name in (one, f"ddp-{one}") or options.get("codec") == one), "")
        bare, on_thread = records.get(codec), records.get(f"ddp-{codec}")
        codec_s = record["codec_s"] or 0.0
        # A codec that works between the gradients: its own figure for the computation holds some of it.
        alone = records.get("ddp", bare or record)
        compute_s = (alone if record is on_thread else record)["compute_s"]
        wire_s = _wire_s(record, bare)
        fields: dict[str, Any] = {"computed_s": compute_s, "codec_busy_s": codec_s, "wire_s": wire_s}
        fields["hidden_s"] = max(0.0, compute_s + codec_s + wire_s - record["iteration_s"])
        for name in ("overlap", "exposed_codec"):
            mine, theirs = record.get(f"{name}_s"), (on_thread or {}).get(f"{name}_s")
            fields[f"{name}_x"] = mine / theirs if mine is not None and theirs else None
        if bare is not None:
            work_s, bare_wire_s = bare["compute_s"] + (bare["codec_s"] or 0.0), _wire_s(bare, bare)
            longest_s = max(work_s, bare_wire_s)
            fields["speed_up"] = bare["iteration_s"] / record["iteration_s"]
            fields["bound"] = (work_s + bare_wire_s) / longest_s
            fields["attainable"] = bare["iteration_s"] / longest_s
            fields["bound_share"] = fields["speed_up"] / fields["attainable"]
        found[spec] = fields
    return found


def _wire_s(record: Mapping[str, Any], bare: Mapping[str, Any] | None) -> float:
    """The transfer alone: by the link's rate, or on an unshaped one by the bare quantiser's bytes and waiting."""
    if record["rate_bps"]:
        return 8.0 * float(record["wire_bytes"]) / float(record["rate_bps"])
    source = bare or record
    left_s = source["iteration_s"] - source["compute_s"] - (source["codec_s"] or 0.0)
    return max(0.0, float(left_s)) * float(record["wire_bytes"]) / max(1.0, float(source["wire_bytes"]))
