"""Traces are valid Chrome trace JSON at every moment: fields, nesting, order, and one clock after a merge."""

import json
import logging
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from gradwire.errors import CorruptMessage, InvalidArgument
from gradwire.telemetry.chrome_trace import ChromeTraceSink, merge_traces
from gradwire.telemetry.recorder import Recorder
from programs import run


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


def train_two(folder: Path) -> list[Path]:
    paths = [folder / f"trace{rank}.json" for rank in range(2)]
    for rank, path in enumerate(paths):
        train(path, rank).close()
    return paths


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


# The beginning of a program that trains.
TRAINS = f"""
import os, resource, sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
from pathlib import Path
from test_chrome_trace import train
"""


def test_trace_is_valid_and_shows_hook_and_lane(tmp_path: Path) -> None:
    train(tmp_path / "trace.json").close()
    trace = load(tmp_path / "trace.json")
    spans = check(trace)
    rows = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert {"iterations", "backward hook", "lane"} <= rows
    by_kind = Counter(span["name"].split()[0] for span in spans)
    assert by_kind == {"step": 3, "importance": 6, "encode": 18, "communicate": 6, "decode": 6}
    counters = [event["args"] for event in trace["traceEvents"] if event["ph"] == "C"]
    assert [(one["sent"], one["received"]) for one in counters[:3]] == [(900, 800), (1800, 1600), (0, 0)]


def test_trace_of_a_killed_process_is_whole(tmp_path: Path) -> None:
    path, program = tmp_path / "trace.json", f"{TRAINS}train(Path(sys.argv[1]))\nos._exit(9)"
    assert run([sys.executable, "-c", program, path]).returncode == 9
    assert any(span["name"] == "step 2" for span in check(load(path)))


def test_full_disk_leaves_the_whole_steps(tmp_path: Path) -> None:
    program = f"""{TRAINS}
resource.setrlimit(resource.RLIMIT_FSIZE, (12000, 12000))
print(train(Path(sys.argv[1]), n_steps=20).totals()["n_steps"])
"""
    path = tmp_path / "trace.json"
    done = run([sys.executable, "-c", program, path], check=True)
    assert done.stdout.split() == ["20"]
    assert done.stderr.count("failed at step") == 1
    assert 0 < sum(span["cat"] == "step" for span in check(load(path))) < 20


def test_trace_stops_at_max_bytes_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="gradwire.telemetry"):
        train(tmp_path / "trace.json", n_steps=20, max_bytes=12000).close()
    assert (tmp_path / "trace.json").stat().st_size <= 12000
    assert [record.getMessage().count("max_bytes=12000") for record in caplog.records] == [1]
    check(load(tmp_path / "trace.json"))


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
    assert {"encode", "table"} <= {span["name"] for span in check(load(tmp_path / "trace.json"))}


def test_ranks_of_one_machine_merge_on_their_common_clock(tmp_path: Path) -> None:
    paths = train_two(tmp_path)
    merged = load(merge_traces(paths, tmp_path / "merged.json"))
    check(merged)
    assert {event["pid"] for event in merged["traceEvents"]} == {0, 1}
    assert merged["traceEvents"] == load(paths[0])["traceEvents"] + load(paths[1])["traceEvents"]


def test_ranks_of_two_machines_merge_by_their_wall_clocks(tmp_path: Path) -> None:
    paths = train_two(tmp_path)
    base, other = map(load, paths)
    ahead_ns = base["otherData"]["wall_minus_clock_ns"] + 7_000_000
    other["otherData"] |= {"clock_id": "another boot", "wall_minus_clock_ns": ahead_ns}
    paths[1].write_text(json.dumps(other))
    merged = load(merge_traces(paths, tmp_path / "merged.json"))

    def first(trace: dict[str, Any]) -> float:
        return next(event["ts"] for event in trace["traceEvents"] if event["pid"] == 1 and event["ph"] == "X")

    assert first(merged) - first(other) == pytest.approx(7000)


def test_merge_refuses_what_it_cannot_merge(tmp_path: Path) -> None:
    train(tmp_path / "a.json").close()
    (tmp_path / "cut.json").write_bytes((tmp_path / "a.json").read_bytes()[:-20])
    (tmp_path / "foreign.json").write_text('{"traceEvents": []}')
    for names, error, match in (
        (["a", "a"], InvalidArgument, r"both of rank 0"),
        (["none"], InvalidArgument, r"none\.json"),
        ([], InvalidArgument, r"no trace to merge"),
        (["cut"], CorruptMessage, r"cut\.json"),
        (["foreign"], CorruptMessage, r"foreign\.json"),
    ):
        with pytest.raises(error, match=match):
            merge_traces([tmp_path / f"{name}.json" for name in names], tmp_path / "out.json")
    assert not (tmp_path / "out.json").exists()
