"""What the TensorBoard sink writes, TensorBoard reads back; without the package the error says what to install."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gradwire.errors import Unsupported
from gradwire.telemetry.recorder import Recorder
from gradwire.telemetry.tensorboard import TensorBoardSink


def test_scalars_read_back_as_recorded(tmp_path: Path) -> None:
    accumulator_module = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="the extra `tensorboard` is not installed"
    )
    recorder = Recorder(0, 2, sinks=[TensorBoardSink(tmp_path, every=2)])
    for step in range(5):
        record = recorder.open_bucket(step, 0, 400)
        record.count_sent(100 + step)
        recorder.close_bucket(record)
        recorder.close_step(step, 2_000_000)
    recorder.close()
    events = accumulator_module.EventAccumulator(str(tmp_path))
    events.Reload()
    sent = [(event.step, event.value) for event in events.Scalars("gradwire/bytes/bytes_sent")]
    assert sent == [(0, 100), (2, 102), (4, 104)]
    assert events.Scalars("gradwire/ratio")[0].value == 0.25
    assert events.Scalars("gradwire/seconds/exposed")[0].value == pytest.approx(2e-3)
    assert events.Scalars("gradwire/count/buckets")[0].value == 1


def test_missing_package_is_named_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # makes the import fail, as without the package
    with pytest.raises(Unsupported, match=r"pip install 'gradwire\[tensorboard\]'"):
        TensorBoardSink(tmp_path)
