"""The demo compares two runs and writes its report; the example runs as it is printed."""

import json
from pathlib import Path

import pytest

from gradwire_lab import cli
from gradwire_lab.cli import demo
from programs import TORCHRUN, run_well

pytestmark = pytest.mark.usefixtures("warm_interpreters")

TINY = "gpt:n_layers=1,width=32,n_heads=2,length=16,batch_size=2"


def test_demo_trains_four_ways_and_says_what_was_decided(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    arguments = ["demo", "--workload", TINY, "--rate", "none", "--seconds", "3", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "demo.json").read_text())
    assert set(result["runs"]) == set(demo.METHODS)
    assert result["n_steps"] >= 16
    assert len(result["runs"]["auto"]["step_s"]) == result["n_steps"]
    assert demo.strays(result["runs"]["auto"], result["runs"]["ddp"]) < 1e-5
    assert "loss strays" in printed
    assert (tmp_path / "demo.svg").read_text().count("<svg") == 1
    for decision in result["runs"]["auto"]["auto"]["decisions"]:
        assert decision["why"]


def test_the_demo_calls_a_loss_a_loss() -> None:
    assert demo.verdict(20.0, 10.0).startswith("2 x faster: 10.0 s to the loss for which DDP takes 20.0 s")
    assert "Nothing was to be won" in demo.verdict(10.0, 10.0)
    assert "slower here, 0.90 x" in demo.verdict(9.0, 10.0)
    assert "faster" not in demo.verdict(9.0, 10.0) + demo.verdict(10.0, 10.0)


def test_seconds_are_counted_to_a_loss_that_all_have_come_down_to() -> None:
    falling = [10.0 - step for step in range(10)]
    runs = {"ddp": {"losses": falling, "step_s": [2.0] * 10}, "auto": {"losses": falling, "step_s": [1.0] * 10},
            "stuck": {"losses": [10.0] * 9 + [9.0], "step_s": [1.0] * 10}}  # fmt: skip
    target, seconds = demo.seconds_to_the_same_loss(runs)
    assert target == pytest.approx(10 - 1 / 8), "the mean of the stuck one's last 8 steps"
    assert seconds == {"ddp": 4.0, "auto": 2.0, "stuck": 10.0}


def test_minimal_example_runs_under_torchrun_and_has_at_most_60_lines() -> None:
    example = Path(__file__).parents[2] / "examples" / "ddp_minimal.py"
    assert len(example.read_text().splitlines()) <= 60
    assert "epoch 3" in run_well([*TORCHRUN, example])
