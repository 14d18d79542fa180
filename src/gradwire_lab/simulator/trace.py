"""A simulated run as Chrome trace events: opens in Perfetto (ui.perfetto.dev) and chrome://tracing.

A process is a group of workers, with a row for its computation and one for its link; what of the run's links is busy is a
counter. The format is that of gradwire.telemetry.chrome_trace, whose events are a live rank's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gradwire.errors import InvalidArgument
from gradwire_lab.results.records import write_text
from gradwire_lab.simulator.simulation import Simulation

_ROWS = {"compute": 0, "network": 1}


def write_trace(path: Path, simulation: Simulation, first_round: int = 0, n_rounds: int | None = None) -> int:
    """Write the spans of some rounds (by default all), times in simulated microseconds; returns how many events.

    Raises: InvalidArgument (the simulation kept no spans), GradwireError (cannot be written).
    """
    spans = simulation.metrics.spans
    if spans is None:
        raise InvalidArgument("this simulation kept no spans; make it with keep_spans=True")
    ends_s = simulation.round_ends_s
    start_s = ends_s[first_round - 1] if 0 < first_round <= len(ends_s) else 0.0
    last = first_round + n_rounds - 1 if n_rounds is not None else len(ends_s)
    end_s = ends_s[last] if last < len(ends_s) else simulation.environment.now
    events: list[dict[str, Any]] = []
    for group in simulation.groups:
        whom = f"worker {group.first_worker}"
        if group.count > 1:
            whom = f"workers {group.first_worker} to {group.first_worker + group.count - 1}"
        events.append(_metadata("process_name", group.index, 0, {"name": whom}))
        events.append(_metadata("process_sort_index", group.index, 0, {"sort_index": group.index}))
        events += [_metadata("thread_name", group.index, row, {"name": name}) for name, row in _ROWS.items()]
    chosen = [span for span in spans if span.end_s > start_s and span.start_s < end_s]
    for span in sorted(chosen, key=lambda span: (span.group, span.row, span.start_s)):
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.row,
                "pid": span.group,
                "tid": _ROWS[span.row],
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "args": span.arguments,
            }
        )
    for link in simulation.network.links:
        for began_s, ended_s in link.use.stretches(simulation.environment.now):
            if ended_s > start_s and began_s < end_s:
                events += [_busy(link.name, began_s, 1), _busy(link.name, ended_s, 0)]
    content = {"displayTimeUnit": "ms", "otherData": {"simulated": True}, "traceEvents": events}
    write_text(path, json.dumps(content, allow_nan=False) + "\n")
    return len(events)


def _busy(link: str, at_s: float, value: int) -> dict[str, Any]:
    return {"ph": "C", "name": f"busy: {link}", "pid": 0, "tid": 0, "ts": at_s * 1e6, "args": {"busy": value}}


def _metadata(name: str, group: int, row: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": group, "tid": row, "ts": 0, "args": arguments}
