"""Every block on a page is run: Python in two ranks, commands in a folder of their own, shortened; or says here why not."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from page_text import DOCS, PAGES, ROOT, name_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from float_messages import encode
from gradwire import codecs
from ranks import patience, run_ranks

pytestmark = pytest.mark.usefixtures("warm_interpreters")

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)

# First words of a Python block -> what runs it instead, or why nothing does.
PYTHON_ELSEWHERE = {
    "import torch": "tests/docs/test_blocks.py",  # the whole script of the quick start: at the end of this file
    "from gradwire_lab.ranks.netlab import Netlab": "tests/netlab/test_netlab_links.py",  # needs the right to shape links
    "from gradwire_lab.simulator.search": "tests/simulator/test_inputs.py",  # needs the files of the page
    'attachment = gradwire.attach(ddp, optimizer, gradwire.schemes.by_name("homomorphic", mode="exact",': (
        "tests/distributed/test_switch_aggregator.py"  # needs a switch that runs
    ),
}

# What a line begins with -> the file that runs such a command, or why nothing does.
COMMANDS_ELSEWHERE = {
    **dict.fromkeys(("make demo", "make test", "make lint", "make campaign"), ".ci/run"),
    "make fuzz": "minutes under sanitizers, for people who change a decoder",
    "make format": "changes the sources",
    ".ci/run": "runs these tests",
    ".venv/bin/pre-commit": "changes the clone's hooks",
    "git clone": "the clone is here already",
    "source": "of the environment that make has set up",
    "pip install .": "tests/packaging/test_wheel.py",
    "torchrun ... ": "on a cluster; the command in it is one of these, or in tests/bench/test_rank_benches.py",
    **dict.fromkeys(("GRADWIRE_SWITCH=", "gradwire switch"), "tests/netlab/test_netlab_switch.py"),
    "gradwire netlab check": "tests/netlab/test_netlab_rates.py",
    "gradwire netlab clean": "tests/netlab/test_netlab_cleaning.py",
    "gradwire bench codec": "tests/bench/test_codec_bench.py",
    **dict.fromkeys(("gradwire bench allreduce", "gradwire bench train"), "tests/bench/test_rank_benches.py"),
    "gradwire simulate --model": "tests/simulator/test_inputs.py",
    "gradwire bench run": "tests/bench/test_runner.py",
    "gradwire bench render": "tests/bench/test_pages.py",
    "gradwire report train.json": "tests/telemetry/test_report.py",
}
SHORTER = [
    (r"--steps \d+", "--steps 4"), (r"--ranks 4", "--ranks 2"), (r"--straggler 2=", "--straggler 1="),
    (r"--at 10:rate:2=", "--at 0.1:rate:1="), (r"--at 20:", "--at 0.2:"), (r"--at 22:", "--at 0.3:"),
    (r"--seconds 200", "--seconds 2"), (r"--workers 16", "--workers 4"), (r"--workers 4 16 64", "--workers 2 4"),
    (r"examples/(\w+\.py)", rf"{ROOT / 'examples'}/\1"),
    (r"bench list", f"bench list --root {ROOT}"),
    (r"recommend --workload gpt", "recommend --workload gpt --seconds 2"),
    (r"simulate --scheme aqgb( --details| --workers)", r"simulate --scheme aqgb --rounds 3\1"),
    # Its own 100 steps of the full-sized GPT on 4 ranks are a minute of two cores; 65 have an exchange after the 64th.
    (r"train --local-sgd", "train --ranks 2 --steps 65 --workload-option n_layers=1 --workload-option width=48 --local-sgd"),
]  # fmt: skip


def python_blocks(page: Path) -> list[str]:
    """The fenced blocks, and each indented line that attaches: on the pages of systems they stand for one another."""
    text = page.read_text()
    alone = re.findall(r"^    (attachment = gradwire\.attach\(ddp.*)$", FENCE.sub("", text), re.MULTILINE)
    return [code for kind, code in FENCE.findall(text) if kind == "python"] + alone


def commands(page: Path) -> list[str]:
    """The command lines of indented and fenced blocks, without their comments; of a transcript, what was typed."""
    text = page.read_text()
    lines = [line[4:] for line in FENCE.sub("", text).splitlines() if line.startswith("    ")]
    typed = r"(?:\$ )?((?:gradwire|make|torchrun|pip|git|source|sed|\.venv/\S+|[A-Z_]+=\S+) .*|\.ci/run\b.*)"
    found = [match[1] for line in lines if (match := re.fullmatch(typed, line))]
    return [re.split(r"\s{2,}#", line)[0].strip() for line in found]


def elsewhere(text: str, table: dict[str, str]) -> str | None:
    return next((where for start, where in table.items() if text.startswith(start)), None)


# ---- Python


def run_block(rank: int, world_size: int, code: str, folder: str) -> torch.Tensor:
    """The block, with what its page has made before it: a DDP model, its optimizer, an attachment.

    Returns: the parameters after one more step, on a batch of the rank's own.
    """
    os.chdir(folder)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    names: dict[str, Any] = {"gradwire": gradwire, "torch": torch, "dist": dist, "rank": rank, "scaler": None}
    if "fsdp2_module" in code:
        names["mesh"] = mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("replicate", "shard"))
        names["fsdp2_module"] = sharded = nn.Linear(8, 4)
        fully_shard(sharded, mesh=mesh["shard"])
        names["optimizer"] = torch.optim.SGD([*sharded.parameters(), *model.parameters()], lr=0.1)
    names["model"] = model
    names["ddp"] = ddp = DistributedDataParallel(model)
    optimizer = names.setdefault("optimizer", torch.optim.SGD(ddp.parameters(), lr=0.1))
    if "attachment" in code and not re.search(r"^attachment = ", code, re.MULTILINE):
        names["attachment"] = gradwire.attach(ddp, optimizer)
    ddp(torch.ones(2, 8)).sum().backward()
    exec(code, names)
    ddp(torch.full((2, 8), 1.0 + rank)).sum().backward()
    optimizer.step()
    dist.barrier()
    return torch.cat([parameter.detach().reshape(-1) for parameter in ddp.parameters()])


@pytest.mark.parametrize(
    ("page", "number"),
    [(page, number) for page in PAGES for number in range(len(python_blocks(page)))],
    ids=lambda value: name_of(value) if isinstance(value, Path) else str(value),
)
def test_python_on_the_page_runs(page: Path, number: int, tmp_path: Path) -> None:
    code = python_blocks(page)[number]
    if where := elsewhere(code, PYTHON_ELSEWHERE):
        assert (ROOT / where).is_file(), where
        return
    if "TensorBoard" in code:
        pytest.importorskip("tensorboard")
    first, second = run_ranks(run_block, 2, code, str(tmp_path))
    assert torch.equal(first, second), "the ranks' parameters differ after the block"


# ---- commands


def run(command: list[str], folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, **options)


def run_here(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    for pattern, shorter in SHORTER:
        line = re.sub(pattern, shorter, line)
    words = [sys.executable if word == "python" else word for word in shlex.split(line)]
    return run([sys.executable, "-m", *words], folder, timeout=200 * patience())


PAGES_WITH_COMMANDS = [page for page in PAGES if commands(page)]


@pytest.mark.parametrize("page", PAGES_WITH_COMMANDS, ids=name_of)
def test_commands_on_the_page_run(page: Path, tmp_path: Path) -> None:
    lines = [line for line in commands(page) if not elsewhere(line, COMMANDS_ELSEWHERE)]
    for package in ("simpy", "matplotlib", "jinja2") if lines else ():
        pytest.importorskip(package)
    (tmp_path / "train.py").write_text("import torch.distributed as dist\ndist.init_process_group('gloo')\n")
    message = encode(codecs.by_name("zlib"), torch.ones(100))
    (tmp_path / "message.bin").write_bytes(bytes(message.tolist()))
    for line in lines:
        ended = run_here(line, tmp_path)
        assert ended.returncode == 0, f"{line}\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"


def test_every_exception_is_needed_and_says_where_or_why() -> None:
    lines = [line for page in PAGES for line in commands(page)]
    blocks = [block for page in PAGES for block in python_blocks(page)]
    assert [start for start in COMMANDS_ELSEWHERE if not any(line.startswith(start) for line in lines)] == []
    assert [start for start in PYTHON_ELSEWHERE if not any(block.startswith(start) for block in blocks)] == []
    files = [where for where in COMMANDS_ELSEWHERE.values() if "/" in where and " " not in where]
    assert [where for where in files if not (ROOT / where).is_file()] == []


def test_commands_are_told_from_output() -> None:
    found = [line for page in PAGES for line in commands(page)]
    assert len(found) > 45
    assert not any(line.startswith("gradwire") and line.endswith(":") for line in found)


def test_the_script_and_the_commands_of_the_quick_start_run(tmp_path: Path) -> None:
    page = (DOCS / "quickstart.md").read_text()
    script = re.search(r'```python title="train.py"\n(.*?)```', page, re.DOTALL)
    commands = "\n".join(re.findall(r"```bash\n(.*?)```", page, re.DOTALL))
    (tmp_path / "train.py").write_text(script[1])
    commands = commands.replace("torchrun ", f"{sys.executable} -m torch.distributed.run --standalone ")
    done = run(["bash", "-e"], tmp_path, input=commands, timeout=300 * patience())
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.findall(r"loss ([0-9.]+), ratio ([0-9.]+)", done.stdout)
    assert len(said) == 2, done.stdout
    assert 0.2 < float(said[0][1]) <= 1.0  # auto: plain, or already trying something
    assert 0.2 < float(said[1][1]) < 0.3  # eight bits a value
