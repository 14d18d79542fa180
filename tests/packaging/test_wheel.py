"""The wheel that `make wheel` has built: installed where nothing of the sources is, it trains."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ranks import patience

WHEELS = sorted((Path(__file__).parents[2] / "build" / "wheels").glob("*.whl"))

TRAIN = """
import sys
sys.path[:0] = [sys.argv[1]]
sys.path += [sys.argv[2]]
import torch
import torch.distributed as dist
import gradwire
assert gradwire.__file__.startswith(sys.argv[1]), gradwire.__file__
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(20, 4))
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
attachment = gradwire.attach(ddp, optimizer, "gcomp")
losses = []
for _ in range(20):
    optimizer.zero_grad()
    loss = (ddp(torch.ones(4, 20)) - 1).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(float(loss))
attachment.close()
assert losses[-1] < 0.5 * losses[0], losses
from importlib.metadata import entry_points
(commands,) = entry_points(group="gradwire.commands")
assert commands.load().__module__ == "gradwire_lab.cli"
from gradwire.gpu.compiler import source_files
assert b"gw_quantised_pack" in source_files()["quantised.hpp"], "the kernels are missing"
"""


@pytest.mark.skipif(not WHEELS, reason="no wheel in build/wheels: `make wheel` builds it, in some minutes")
def test_the_wheel_trains_without_the_sources(tmp_path: Path) -> None:
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*command, str(WHEELS[-1])], check=True, timeout=120 * patience())
    # Without `site`, so that no editable install of this checkout comes in between; torch from where it is.
    packages = str(Path(torch.__file__).parents[1])
    command = [sys.executable, "-I", "-S", "-c", TRAIN, str(target), packages]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150 * patience())
    assert ended.returncode == 0, ended.stderr
