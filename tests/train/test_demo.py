"""The demo compares two runs and writes its report; the example runs as it is printed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gradwire import cli

TINY_GPT = {"n_layers": 1, "width": 32, "n_heads": 2, "length": 16, "batch_size": 2}


def test_demo_prints_a_table_and_writes_one_report(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("COLUMNS", "160")
    options = [f"--workload-option={key}={value}" for key, value in TINY_GPT.items()]
    assert cli.main(["demo", "--ranks", "2", "--steps", "5", "--out", str(tmp_path), *options]) == 0
    printed = capsys.readouterr().out
    assert "deviation of the loss, largest" in printed
    summaries = {name: json.loads((tmp_path / name / "summary.json").read_text()) for name in ("ddp", "gcomp")}
    assert 0 < summaries["gcomp"]["wire_bytes"] < summaries["ddp"]["wire_bytes"]
    assert summaries["gcomp"]["replicas_equal"]
    page = (tmp_path / "report.html").read_text()
    assert "<svg" in page
    assert "gcomp" in page


def test_demo_of_ddp_with_itself_is_refused(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    assert cli.main(["demo", "--scheme", "ddp", "--out", str(tmp_path)]) == 1
    assert "compares a scheme with plain DDP" in capsys.readouterr().err


def test_minimal_example_runs_under_torchrun_and_has_at_most_60_lines() -> None:
    example = Path(__file__).parents[2] / "examples" / "ddp_minimal.py"
    assert len(example.read_text().splitlines()) <= 60
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(example)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "epoch 3" in result.stdout
