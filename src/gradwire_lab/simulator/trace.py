"""A simulated run as Chrome trace events: opens in Perfetto (ui.perfetto.dev) and chrome://tracing.

A process is a group of workers, with a row for its computation and one for its link; what of the run's links is busy is a
counter. The format is that of gradwire.telemetry.chrome_trace, whose events are a live rank's.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from gradwire.errors import InvalidArgument
from gradwire_lab.results.records import write_text
from gradwire_lab.simulator.simulation import Simulation

_ROWS = {"compute": 0, "network": 1}


def write_trace(path: Path, simulation: Simulation, n_rounds: int | None = None) -> int:
    """Write the spans of the first rounds (by default all), times in simulated microseconds; returns how many events.

    Raises: InvalidArgument (the simulation kept no spans), GradwireError (cannot be written).
    """
    spans = simulation.metrics.spans
    if spans is None:
        raise InvalidArgument("this simulation kept no spans; make it with keep_spans=True")
    ends_s, last = simulation.round_ends_s, math.inf if n_rounds is None else n_rounds - 1
    end_s = ends_s[int(last)] if last < len(ends_s) else simulation.environment.now
    events: list[dict[str, Any]] = []
    for group in simulation.groups:
        last = group.first_worker + group.count - 1
        whom = f"worker {group.first_worker}" if group.count == 1 else f"workers {group.first_worker} to {last}"
        events.append(_event("M", "process_name", group.index, args={"name": whom}))
        events.append(_event("M", "process_sort_index", group.index, args={"sort_index": group.index}))
        events += [_event("M", "thread_name", group.index, row, args={"name": name}) for name, row in _ROWS.items()]
    chosen = [span for span in spans if span.start_s < end_s]
    for span in sorted(chosen, key=lambda span: (span.group, span.row, span.start_s)):
        times = {"cat": span.row, "dur": (span.end_s - span.start_s) * 1e6}
        events.append(_event("X", span.name, span.group, _ROWS[span.row], span.start_s, args=span.arguments, **times))
    for link in simulation.network.links:
        for began_s, ended_s in link.use.stretches(simulation.environment.now):
            if began_s < end_s:
                both = ((began_s, 1), (ended_s, 0))
                events += [_event("C", f"busy: {link.name}", 0, 0, at_s, args={"busy": value}) for at_s, value in both]
    content = {"displayTimeUnit": "ms", "otherData": {"simulated": True}, "traceEvents": events}
    write_text(path, json.dumps(content, allow_nan=False) + "\n")
    return len(events)


def _event(phase: str, name: str, process: int, row: int = 0, at_s: float = 0.0, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "name": name, "pid": process, "tid": row, "ts": at_s * 1e6, **more}
