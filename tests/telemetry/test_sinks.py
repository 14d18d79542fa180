"""Sinks: a JSONL log holds whole lines only, a full disk costs the log, not the training; TensorBoard reads its own back."""

import json
import logging
import sys
from pathlib import Path

import pytest

from gradwire.errors import Unsupported
from gradwire.telemetry.jsonl import JsonLines, JsonlSink
from gradwire.telemetry.recorder import Recorder
from gradwire.telemetry.tensorboard import TensorBoardSink
from programs import run as run_program


def run(recorder: Recorder, n_steps: int, n_buckets: int = 2, exposed_ns: int = 1_000_000) -> None:
    for step in range(n_steps):
        for bucket in range(n_buckets):
            record = recorder.open_bucket(step, bucket, 400)
            record.count_sent(100 + step)
            recorder.close_bucket(record)
        recorder.close_step(step, exposed_ns)
    recorder.close()


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_line_a_step_with_the_agreed_fields(tmp_path: Path) -> None:
    run(Recorder(0, 2, sinks=[JsonlSink(tmp_path / "new" / "steps.jsonl")]), 3)
    records = lines(tmp_path / "new" / "steps.jsonl")
    assert [record["step"] for record in records] == [0, 1, 2]
    agreed = {"step", "iteration_s", "bytes_sent", "bytes_received", "ratio", "encode_s", "decode_s", "communicate_s"}
    assert agreed | {"exposed_s"} <= set(records[0])
    assert records[0]["exposed_s"] == 1e-3
    assert records[0]["ratio"] == 0.25


def test_buckets_come_before_their_step_and_appending_keeps_what_a_resumed_run_wrote_before(tmp_path: Path) -> None:
    for append in (False, True):
        run(Recorder(0, 2, sinks=[JsonlSink(tmp_path / "log", buckets=True, append=append)]), 2)
    records = [(record["step"], record.get("bucket")) for record in lines(tmp_path / "log")]
    assert records == 2 * [(step, bucket) for step in range(2) for bucket in (0, 1, None)]


def test_infinite_loss_becomes_null(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "log")
    log.append({"loss": float("inf"), "step": 1})
    log.append({"loss": float("nan"), "step": 2})
    log.close()
    assert lines(tmp_path / "log") == [{"loss": None, "step": 1}, {"loss": None, "step": 2}]


def test_log_on_a_full_disk_keeps_whole_lines_and_says_so_once(tmp_path: Path) -> None:
    # A file-size limit stops a write half-way just as a full disk does, and needs no disk of its own.
    program = """
import json, logging, resource, sys
from gradwire.telemetry.jsonl import JsonlSink
from gradwire.telemetry.recorder import Recorder
logging.basicConfig(format="%(message)s")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
sink = JsonlSink(sys.argv[1])
recorder = Recorder(0, 2, sinks=[sink])
for step in range(20):
    recorder.close_step(step, 0)
assert sink.error is not None
recorder.close()
print(recorder.totals()["n_steps"])
"""
    path = tmp_path / "log"
    done = run_program([sys.executable, "-c", program, path], check=True)
    assert done.stdout.split() == ["20"]  # the run went on to its end
    assert done.stderr.count("cannot write") == 1
    assert str(path) in done.stderr
    steps = [record["step"] for record in lines(path)]
    assert steps == list(range(len(steps)))
    assert steps
    assert path.read_bytes().endswith(b"\n")


def test_device_without_space_is_an_error_on_the_first_line_only(caplog: pytest.LogCaptureFixture) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    log = JsonLines("/dev/full")
    with caplog.at_level(logging.ERROR, logger="gradwire.telemetry"):
        for step in range(5):
            log.append({"step": step})
    log.close()
    assert log.error is not None
    assert len(caplog.records) == 1


def test_scalars_read_back_as_recorded(tmp_path: Path) -> None:
    accumulator_module = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="the extra `tensorboard` is not installed"
    )
    run(Recorder(0, 2, sinks=[TensorBoardSink(tmp_path, every=2)]), 5, n_buckets=1, exposed_ns=2_000_000)
    events = accumulator_module.EventAccumulator(str(tmp_path))
    events.Reload()
    sent = [(event.step, event.value) for event in events.Scalars("gradwire/bytes/bytes_sent")]
    assert sent == [(0, 100), (2, 102), (4, 104)]
    assert events.Scalars("gradwire/ratio")[0].value == 0.25
    assert events.Scalars("gradwire/seconds/exposed")[0].value == pytest.approx(2e-3)
    assert events.Scalars("gradwire/count/buckets")[0].value == 1


def test_missing_tensorboard_is_named_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # makes the import fail, as without the package
    with pytest.raises(Unsupported, match=r"pip install '\.\[tensorboard\]'"):
        TensorBoardSink(tmp_path)
