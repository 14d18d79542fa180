"""`gradwire recommend`: a user's own training by --entry, a saved plan read again, and what is refused before ranks start."""

import json
import subprocess
from pathlib import Path

import pytest

from gradwire_lab.cli import main
from programs import GRADWIRE, run

pytestmark = pytest.mark.usefixtures("warm_interpreters")

TRAIN = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def build():
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(ddp.parameters())
    return ddp, optimizer, lambda: ddp(torch.ones(4, 64)).square().mean().backward()


def nothing():
    return 3


def stumble():
    raise AttributeError("of my own")
"""


def recommend(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run([*GRADWIRE, "recommend", *arguments], cwd=folder)


def test_a_training_of_ones_own_is_measured_and_its_plan_read_for_another_network(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    measured = recommend(tmp_path, "--entry", "train:build", "--ranks", "2", "--seconds", "1", "--json", "plan.json")
    assert measured.returncode == 0, measured.stderr
    assert json.loads((tmp_path / "plan.json").read_text())
    read = recommend(tmp_path, "--profile", "plan.json", "--for-ranks", "8", "--rate", "1mbit")
    assert read.returncode == 0, read.stderr
    assert "8 ranks" in read.stdout


@pytest.mark.parametrize(
    ("entry", "why"),
    [("train", "MODULE:FUNCTION"), ("missing:build", "there is no module 'missing' here"),
     ("missing.train:build", "No module named 'missing'")],
)  # fmt: skip
def test_an_entry_that_is_none_is_refused_before_a_rank_starts(
    entry: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("gradwire_lab.ranks.launch.start_ranks", None)  # would raise another error
    assert main(["recommend", "--entry", entry]) == 1
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "why"),
    [("missing", "module 'train' has no 'missing'"), ("nothing", "has to give (ddp, optimizer, step)"),
     ("stumble", "AttributeError: of my own")],  # the user's own error keeps its traceback
)  # fmt: skip
def test_an_entry_that_gives_no_training_is_named(function: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    ended = recommend(tmp_path, "--entry", f"train:{function}", "--ranks", "2", "--seconds", "1")
    assert ended.returncode != 0
    assert why in ended.stdout + ended.stderr
