"""Traces are valid Chrome trace JSON at every moment: fields, nesting, order, and one clock after a merge."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from gradwire.errors import CorruptMessage, InvalidArgument
from gradwire.telemetry.chrome_trace import ChromeTraceSink, merge_traces
from gradwire.telemetry.recorder import Recorder


def check(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """All that the format asks of the events that gradwire uses; returns the complete spans."""
    rows: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    counters: dict[tuple[int, str], float] = {}
    async_open: set[tuple[Any, ...]] = set()
    named = {(event["pid"], event["tid"]) for event in trace["traceEvents"] if event["name"] == "thread_name"}
    for event in trace["traceEvents"]:
        assert {"ph", "name", "pid", "tid", "ts"} <= set(event)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in named
            rows[event["pid"], event["tid"]].append(event)
        elif event["ph"] == "C":
            key = (event["pid"], event["name"])
            assert event["ts"] >= counters.get(key, 0)
            assert all(value >= 0 for value in event["args"].values())
            counters[key] = event["ts"]
        elif event["ph"] in "be":
            key = (event["pid"], event["cat"], event["id2"]["local"])
            assert (key in async_open) == (event["ph"] == "e")
            async_open ^= {key}
        else:
            assert event["ph"] == "M"
    assert not async_open
    for row in rows.values():
        assert [event["ts"] for event in row] == sorted(event["ts"] for event in row)
        open_ends: list[float] = []
        for event in row:
            while open_ends and open_ends[-1] <= event["ts"] + 1e-3:  # a nanosecond: floats of microseconds round
                open_ends.pop()
            assert not open_ends or event["ts"] + event["dur"] <= open_ends[-1] + 1e-3
            open_ends.append(event["ts"] + event["dur"])
    return [event for row in rows.values() for event in row]


def train(path: Path, rank: int = 0, n_steps: int = 3, **options: Any) -> Recorder:
    """A pipeline as the ring runs it: the hook computes importance, the lane encodes chunk k+1 while k travels."""
    recorder = Recorder(rank, 2, sinks=[ChromeTraceSink(path, rank, 2, **options)])
    for step in range(n_steps):
        records = []
        for bucket in range(2):
            record = recorder.open_bucket(step, bucket, 4000)
            start = time.perf_counter_ns()
            record.add("importance", start, start + 2000)
            records.append(record)

        def lane(records: list = records) -> None:
            for record in records:
                start = time.perf_counter_ns()
                record.add("encode", start, start + 1000)
                record.add("communicate", start + 1000, start + 3000)
                record.add("encode", start + 1500, start + 2000)  # inside
                record.add("encode", start + 2500, start + 3500)  # sticks out
                record.add("decode", start + 3000, start + 4000)
                record.count_sent(900)
                record.count_received(800)
                recorder.close_bucket(record)

        thread = threading.Thread(target=lane)
        thread.start()
        thread.join()
        recorder.close_step(step, 0)
    return recorder


def row_names(trace: dict[str, Any]) -> set[str]:
    return {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}


def test_trace_is_valid_and_shows_hook_and_lane(tmp_path: Path) -> None:
    train(tmp_path / "trace.json").close()
    trace = json.loads((tmp_path / "trace.json").read_text())
    spans = check(trace)
    assert {"iterations", "backward hook", "lane"} <= row_names(trace)
    by_kind = defaultdict(int)
    for span in spans:
        by_kind[span["name"].split()[0]] += 1
    assert by_kind == {"step": 3, "importance": 6, "encode": 18, "communicate": 6, "decode": 6}
    counters = [event["args"] for event in trace["traceEvents"] if event["ph"] == "C"]
    assert counters[:3] == [
        {"sent": 900, "received": 800},
        {"sent": 1800, "received": 1600},
        {"sent": 0, "received": 0},
    ]


def test_trace_of_a_killed_process_is_whole(tmp_path: Path) -> None:
    program = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_chrome_trace import train
train(Path(sys.argv[1]))
os._exit(9)
"""
    path = tmp_path / "trace.json"
    assert subprocess.run([sys.executable, "-c", program, str(path)], check=False).returncode == 9
    assert any(span["name"] == "step 2" for span in check(json.loads(path.read_text())))


def test_full_disk_leaves_the_whole_steps(tmp_path: Path) -> None:
    program = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_chrome_trace import train
resource.setrlimit(resource.RLIMIT_FSIZE, (12000, 12000))
print(train(Path(sys.argv[1]), n_steps=20).totals()["n_steps"])
"""
    path = tmp_path / "trace.json"
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["20"]
    assert done.stderr.count("failed at step") == 1
    spans = check(json.loads(path.read_text()))
    assert 0 < sum(span["cat"] == "step" for span in spans) < 20


def test_trace_stops_at_max_bytes_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="gradwire.telemetry"):
        train(tmp_path / "trace.json", n_steps=20, max_bytes=12000).close()
    assert (tmp_path / "trace.json").stat().st_size <= 12000
    assert [record.getMessage().count("max_bytes=12000") for record in caplog.records] == [1]
    check(json.loads((tmp_path / "trace.json").read_text()))


def test_late_bucket_does_not_break_the_order(tmp_path: Path) -> None:
    recorder = Recorder(0, 2, sinks=[ChromeTraceSink(tmp_path / "trace.json", 0, 2)])
    late = recorder.open_bucket(0, -1, 0)
    start = time.perf_counter_ns()
    record = recorder.open_bucket(0, 0, 400)
    record.add("encode", start + 1000, start + 5000)
    recorder.close_bucket(record)
    recorder.close_step(0, 0)
    late.add("table", start, start + 2000)
    recorder.close_bucket(late)
    recorder.close_step(1, 0)
    recorder.close()
    assert {"encode", "table"} <= {span["name"] for span in check(json.loads((tmp_path / "trace.json").read_text()))}


def test_ranks_of_one_machine_merge_on_their_common_clock(tmp_path: Path) -> None:
    paths = [tmp_path / f"trace{rank}.json" for rank in range(2)]
    for rank, path in enumerate(paths):
        train(path, rank).close()
    merged = json.loads(merge_traces(paths, tmp_path / "merged.json").read_text())
    check(merged)
    assert {event["pid"] for event in merged["traceEvents"]} == {0, 1}
    events = [json.loads(path.read_text())["traceEvents"] for path in paths]
    assert merged["traceEvents"] == events[0] + events[1]


def test_ranks_of_two_machines_merge_by_their_wall_clocks(tmp_path: Path) -> None:
    paths = [tmp_path / f"trace{rank}.json" for rank in range(2)]
    for rank, path in enumerate(paths):
        train(path, rank).close()
    other = json.loads(paths[1].read_text())
    other["otherData"]["clock_id"] = "another boot"
    base = json.loads(paths[0].read_text())["otherData"]["wall_minus_clock_ns"]
    other["otherData"]["wall_minus_clock_ns"] = base + 7_000_000
    paths[1].write_text(json.dumps(other))
    merged = json.loads(merge_traces(paths, tmp_path / "merged.json").read_text())

    def first(trace: dict[str, Any]) -> float:
        return next(event["ts"] for event in trace["traceEvents"] if event["pid"] == 1 and event["ph"] == "X")

    assert first(merged) - first(other) == pytest.approx(7000)


def test_merge_refuses_what_it_cannot_merge(tmp_path: Path) -> None:
    train(tmp_path / "a.json").close()
    with pytest.raises(InvalidArgument, match=r"both of rank 0"):
        merge_traces([tmp_path / "a.json", tmp_path / "a.json"], tmp_path / "out.json")
    with pytest.raises(InvalidArgument, match=r"none\.json"):
        merge_traces([tmp_path / "none.json"], tmp_path / "out.json")
    with pytest.raises(InvalidArgument, match=r"no trace to merge"):
        merge_traces([], tmp_path / "out.json")
    (tmp_path / "cut.json").write_bytes((tmp_path / "a.json").read_bytes()[:-20])
    (tmp_path / "foreign.json").write_text('{"traceEvents": []}')
    for name in ("cut", "foreign"):
        with pytest.raises(CorruptMessage, match=rf"{name}\.json"):
            merge_traces([tmp_path / f"{name}.json"], tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()
