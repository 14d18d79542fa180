"""Every example runs as its first lines say; frameworks resume from their own checkpoints with the same bits."""

import re
import sys
from pathlib import Path

import pytest

from gradwire_lab.ranks.launch import start_ranks
from programs import run as run_program
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
    ("name", "n_nodes"),
    [
        ("custom_loop.py", 1), ("fsdp2_between_nodes.py", 2), ("fsdp2_shards.py", 1), ("process_group.py", 1),
        ("two_level.py", 2), ("diloco.py", 1), ("diloco_elastic.py", 1), ("torchft_manager.py", 1),
    ],
)  # fmt: skip
def test_example_runs_and_learns(name: str, n_nodes: int) -> None:
    said = re.search(r"loss ([0-9.]+), [0-9,]+ bytes", run(name, 2 * n_nodes, ranks_per_node=n_nodes))
    assert float(said[1]) < 1.0


def test_ray_train_runs_and_its_workers_agree() -> None:
    said = run_program([sys.executable, ROOT / "examples" / "ray_train.py"])
    ended = re.findall(r"loss ([0-9.]+), [0-9,]+ bytes sent, parameters ([0-9a-f]{8})", said.stdout)
    assert {float(loss) < 1.0 for loss, _ in ended} == {True}, said.stdout + said.stderr
    assert len({parameters for _, parameters in ended}) == 1


def parameters_of(output: str) -> str:
    found = re.search(r"parameters ([0-9a-f]{8})", output)
    assert found is not None, output
    return found[1]


# What a whole run is given, the two halves of one, and what they hand on, in a folder of their own.
RESUMED: dict[str, tuple[str, str, str]] = {
    "accelerate_train.py": ("", "--steps 4 --save {folder}", "--first 4 --load {folder}"),
    "lightning_fit.py": ("", "--epochs 1 --save {folder}/epoch.ckpt", "--load {folder}/epoch.ckpt"),
    "muon_and_adamw.py": ("", "--save {folder}", "--load {folder}"),
    "hf_trainer.py": ("{folder}", "", "{folder} --resume"),  # whose whole run saves on the way
}


@pytest.mark.parametrize("name", RESUMED)
def test_frameworks_resume_with_the_same_bits(name: str, tmp_path: Path) -> None:
    whole, first, second = (arguments.format(folder=tmp_path).split() for arguments in RESUMED[name])
    if name != "muon_and_adamw.py":  # with residuals and factors to save
        for arguments in (whole, first, second):
            arguments += ["--scheme", "acp-sgd:start_step=2"]
    expected = parameters_of(run(name, 2, *whole))
    if RESUMED[name][1]:
        run(name, 2, *first)
    assert parameters_of(run(name, 2, *second)) == expected
    assert name != "hf_trainer.py" or (tmp_path / "checkpoint-4" / "gradwire.pt").exists()
