"""Every example runs as its first lines say; frameworks resume from their own checkpoints with the same bits."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from scheme_by_door import markdown

from gradwire_lab.ranks.launch import start_ranks
from ranks import patience

pytestmark = pytest.mark.usefixtures("warm_interpreters")

ROOT = Path(__file__).parents[2]


def run(name: str, n_ranks: int, *arguments: object, ranks_per_node: int = 1) -> str:
    lines: list[str] = []
    command = [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)]
    nodes = {"ranks_per_node": ranks_per_node} if ranks_per_node > 1 else {}
    with start_ranks(command, n_ranks, on_line=lambda rank, line: lines.append(line), **nodes) as launch:
        result = launch.wait(150 * patience())
    assert result.status == 0, "\n".join(lines)
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("name", "n_ranks", "ranks_per_node"),
    [
        ("custom_loop.py", 2, 1),
        ("fsdp2_between_nodes.py", 4, 2),
        ("fsdp2_shards.py", 2, 1),
        ("process_group.py", 2, 1),
        ("two_level.py", 4, 2),
        ("diloco.py", 2, 1),
        ("torchft_manager.py", 2, 1),
    ],
)
def test_example_runs_and_learns(name: str, n_ranks: int, ranks_per_node: int) -> None:
    said = re.search(r"loss ([0-9.]+), [0-9,]+ bytes", run(name, n_ranks, ranks_per_node=ranks_per_node))
    assert said is not None
    assert float(said[1]) < 1.0


def test_ray_train_runs_and_its_workers_agree() -> None:
    command = [sys.executable, str(ROOT / "examples" / "ray_train.py")]
    said = subprocess.run(command, capture_output=True, text=True, timeout=150 * patience())
    ended = re.findall(r"loss ([0-9.]+), [0-9,]+ bytes sent, parameters ([0-9a-f]{8})", said.stdout)
    assert {float(loss) < 1.0 for loss, _ in ended} == {True}, said.stdout + said.stderr
    assert len({parameters for _, parameters in ended}) == 1


def parameters_of(output: str) -> str:
    found = re.search(r"parameters ([0-9a-f]{8})", output)
    assert found is not None, output
    return found[1]


def check_resume(whole: Callable[[], str], halves: Callable[[], str]) -> None:
    assert parameters_of(whole()) == parameters_of(halves())


def test_accelerate_resumes_with_the_same_bits(tmp_path: Path) -> None:
    def halves() -> str:
        run("accelerate_train.py", 2, "--steps", 4, "--save", tmp_path)
        return run("accelerate_train.py", 2, "--first", 4, "--load", tmp_path)

    check_resume(lambda: run("accelerate_train.py", 2), halves)


def test_lightning_resumes_with_the_same_bits(tmp_path: Path) -> None:
    file = tmp_path / "epoch.ckpt"

    def halves() -> str:
        run("lightning_fit.py", 2, "--epochs", 1, "--save", file)
        return run("lightning_fit.py", 2, "--load", file)

    check_resume(lambda: run("lightning_fit.py", 2), halves)


def test_muon_beside_adamw_resumes_with_the_same_bits(tmp_path: Path) -> None:
    def halves() -> str:
        run("muon_and_adamw.py", 2, "--save", tmp_path)
        return run("muon_and_adamw.py", 2, "--load", tmp_path)

    check_resume(lambda: run("muon_and_adamw.py", 2), halves)


def test_the_hf_trainer_resumes_with_the_same_bits(tmp_path: Path) -> None:
    check_resume(lambda: run("hf_trainer.py", 2, tmp_path), lambda: run("hf_trainer.py", 2, tmp_path, "--resume"))
    assert (tmp_path / "checkpoint-4" / "gradwire.pt").exists()


def test_the_docs_show_the_table_of_schemes_and_doors() -> None:
    assert markdown() in (ROOT / "docs" / "doors.md").read_text()
