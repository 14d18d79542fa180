"""Chrome trace events: opens in Perfetto (ui.perfetto.dev) and chrome://tracing. One file a rank, merged on demand.

Format: "Trace Event Format" of the Chromium project, JSON object form. One process a rank; its threads are the
iterations, DDP's hook ("backward hook") and the communication lane ("lane"); buckets are asynchronous spans from the
hook's call to the result; the bytes are counter tracks. Timestamps are `time.perf_counter_ns` in microseconds.
"""

import itertools
import json
import logging
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gradwire.errors import CorruptMessage, InvalidArgument
from gradwire.telemetry.environment import machine_id
from gradwire.telemetry.recorder import BucketRecord, Span, StepRecord

__all__ = ["ChromeTraceSink", "merge_traces"]

_log = logging.getLogger("gradwire.telemetry")

_TAIL = b"\n]}\n"
_ITERATIONS, _HOOK, _LANE = 0, 1, 100  # thread ids; a row's overflow rows follow it, hence the gap


def event(phase: str, name: str, process: int, row: int = 0, at_us: float = 0.0, **more: Any) -> dict[str, Any]:
    """One event of the format."""
    return {"ph": phase, "name": name, "pid": process, "tid": row, "ts": at_us, **more}


class ChromeTraceSink:
    """Writes one rank's trace, step by step; after every step the file is whole, valid JSON.

    `max_bytes` bounds the file (a span takes about 120 bytes): what comes after is left out, which is logged once.
    Cost: 2 to 3 us a span at the end of the step, on the training thread.
    """

    wants_spans = True

    def __init__(self, path: str | os.PathLike[str], rank: int, world_size: int, max_bytes: int = 256 << 20) -> None:
        """Raises: OSError, if the file cannot be created."""
        self.path = Path(path)
        self._rank = rank
        self._max_bytes = max_bytes
        self._full = False
        self._rows = {_HOOK: _Rows(_HOOK, "backward hook"), _LANE: _Rows(_LANE, "lane")}
        self._last_counter_ns = 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("wb", buffering=0)
        clock = {
            "rank": rank,
            "world_size": world_size,
            "clock_id": machine_id(),  # the monotonic clock counts from boot
            "wall_minus_clock_ns": time.time_ns() - time.perf_counter_ns(),
        }
        head = json.dumps({"displayTimeUnit": "ms", "otherData": clock})
        first = [
            event("M", "process_name", rank, args={"name": f"rank {rank}"}),
            event("M", "process_sort_index", rank, args={"sort_index": rank}),
            *self._name_row(_ITERATIONS, "iterations"),
        ]
        start = head[:-1] + ', "traceEvents": [\n' + ",\n".join(json.dumps(event) for event in first)
        self._file.write(start.encode() + _TAIL)
        self._end = len(start.encode())  # where the next event goes, over the tail

    def write_step(self, step_record: StepRecord, bucket_records: Sequence[BucketRecord]) -> None:
        """Append one step's events. Raises: OSError (full disk), after putting the file back to its last whole step."""
        if self._full:
            return
        step, took_ns = f"step {step_record.step}", step_record.iteration_ns
        events = [
            self._span(step, "step", _ITERATIONS, step_record.closed_ns - took_ns, took_ns, step_record.as_dict()),
            *self._spans(bucket_records),
            *self._buckets(bucket_records),
            *self._counters(step_record, bucket_records),
        ]
        text = "".join(",\n" + json.dumps(event, separators=(",", ":")) for event in events).encode()
        if self._end + len(text) > self._max_bytes:
            self._full = True
            _log.warning("%s has reached max_bytes=%d; the trace ends here", self.path, self._max_bytes)
            return
        try:
            self._write_at_end(text + _TAIL)
        except OSError:
            self._file.truncate(self._end)
            self._write_at_end(_TAIL)  # fits: these bytes were the file's already
            raise
        self._end += len(text)

    def close(self) -> None:
        self._file.close()

    def _write_at_end(self, data: bytes) -> None:
        self._file.seek(self._end)
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) or 0 :]

    def _spans(self, buckets: Sequence[BucketRecord]) -> list[dict[str, Any]]:
        spans = [
            (span, record, _HOOK if span.thread == record.thread else _LANE)
            for record in buckets
            for span in record.spans or ()
        ]
        # Longest first among equal starts: an outer span goes before the ones inside it.
        spans.sort(key=lambda item: (item[0].start_ns, -item[0].end_ns))
        events: list[dict[str, Any]] = []
        for span, record, thread in spans:
            row, new_name = self._rows[thread].place(span)
            events += self._name_row(row, new_name) if new_name else ()
            where = {"bucket": record.bucket, "step": record.step}
            took_ns = span.end_ns - span.start_ns
            events.append(self._span(span.kind, "gradwire", row, span.start_ns, took_ns, where))
        return events

    def _buckets(self, buckets: Sequence[BucketRecord]) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        for record in buckets:
            name = f"bucket {record.bucket}" if record.bucket >= 0 else "outside buckets"
            # Ids local to the process: ranks may use the same ones in a merged file.
            common = {"cat": "bucket", "id2": {"local": f"{record.step}.{record.bucket}.{record.started_ns}"}}
            events.append(self._event("b", name, _HOOK, record.started_ns, **common, args=record.as_dict()))
            events.append(self._event("e", name, _HOOK, record.ended_ns, **common))
        return events

    def _counters(self, step: StepRecord, buckets: Sequence[BucketRecord]) -> list[dict[str, Any]]:
        in_order = sorted(buckets, key=lambda record: record.ended_ns)
        sent = itertools.accumulate(record.bytes_sent for record in in_order)
        received = itertools.accumulate(record.bytes_received for record in in_order)
        so_far = [*zip((record.ended_ns for record in in_order), sent, received, strict=True), (step.closed_ns, 0, 0)]
        return [self._bytes_so_far(*point) for point in so_far]

    def _bytes_so_far(self, time_ns: int, sent: int, received: int) -> dict[str, Any]:
        # A bucket that closed late counts to the step that took it in, so it may not go back before the last one's end.
        self._last_counter_ns = max(self._last_counter_ns, time_ns)
        args = {"sent": sent, "received": received}
        return self._event("C", "bytes in this step", 0, self._last_counter_ns, args=args)

    def _span(
        self, name: str, kind: str, row: int, start_ns: int, took_ns: int, args: dict[str, Any]
    ) -> dict[str, Any]:
        return self._event("X", name, row, start_ns, cat=kind, dur=took_ns / 1e3, args=args)

    def _event(self, phase: str, name: str, row: int, time_ns: int, **fields: Any) -> dict[str, Any]:
        return event(phase, name, self._rank, row, time_ns / 1e3, **fields)

    def _name_row(self, row: int, name: str) -> list[dict[str, Any]]:
        return [
            self._event("M", "thread_name", row, 0, args={"name": name}),
            self._event("M", "thread_sort_index", row, 0, args={"sort_index": row}),
        ]


class _Rows:
    """Places spans on rows so that within a row they nest and their starts never go back, as the format asks.

    A pipeline overlaps its stages (chunk k+1 is encoded while k travels), so one row is not always enough.
    """

    def __init__(self, first_row: int, name: str) -> None:
        self._first_row = first_row
        self._name = name
        self._open_ends: list[list[int]] = []  # of each row, outermost span first
        self._floors: list[int] = []  # no earlier span may go on that row any more

    def place(self, span: Span) -> tuple[int, str]:
        """The row's number, and its name if it is new."""
        row = next((row for row in range(len(self._floors)) if self._fits(row, span)), len(self._floors))
        new_name = ""
        if row == len(self._floors):
            self._open_ends.append([])
            self._floors.append(span.start_ns)
            new_name = f"{self._name} (overlap {row})" if row else self._name
        self._open_ends[row].append(span.end_ns)
        return self._first_row + row, new_name

    def _fits(self, row: int, span: Span) -> bool:
        if span.start_ns < self._floors[row]:
            return False
        self._floors[row] = span.start_ns
        open_ends = self._open_ends[row]
        while open_ends and open_ends[-1] <= span.start_ns:
            open_ends.pop()
        return not open_ends or span.end_ns <= open_ends[-1]


def merge_traces(paths: Iterable[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Path:
    """Write the traces of several ranks as one, on one clock. Ranks of one machine share its clock exactly; those of
    others are aligned by their wall clocks, i.e. as well as NTP. Raises: InvalidArgument (no file, one that cannot be
    read, one rank twice), CorruptMessage (not a gradwire trace)."""
    traces = [(Path(path), _load(Path(path))) for path in paths]
    if not traces:
        raise InvalidArgument("there is no trace to merge; a rank writes one through ChromeTraceSink")
    base = traces[0][1]["otherData"]
    seen: dict[int, Path] = {}
    events: list[dict[str, Any]] = []
    for path, trace in traces:
        clock = trace["otherData"]
        rank = clock["rank"]
        if rank in seen:
            raise InvalidArgument(f"{path} and {seen[rank]} are both of rank {rank}; merge the ranks of one run")
        seen[rank] = path
        ahead_us = (clock["wall_minus_clock_ns"] - base["wall_minus_clock_ns"]) / 1e3
        for one in trace["traceEvents"]:
            if one["ph"] != "M" and clock["clock_id"] != base["clock_id"]:
                one["ts"] += ahead_us
            events.append(one)
    merged = {"displayTimeUnit": "ms", "otherData": {"ranks": sorted(seen)}, "traceEvents": events}
    out = Path(out)
    out.write_text(json.dumps(merged), encoding="utf-8")
    return out


def _load(path: Path) -> dict[str, Any]:
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
        clock = trace["otherData"]
        if not all(type(clock[key]) is int for key in ("rank", "wall_minus_clock_ns")) or "clock_id" not in clock:
            raise ValueError("its otherData names no rank and clock")
        if not all("ph" in event and "ts" in event for event in trace["traceEvents"]):
            raise ValueError("an event has no ph or ts")
    except OSError as error:
        raise InvalidArgument(f"cannot read the trace {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptMessage(f"{path} is not a trace that gradwire wrote: {error}") from error
    return trace
