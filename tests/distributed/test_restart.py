"""torchrun starts ranks again after one has died: the second life goes on from the saved state, with any number of ranks."""

import os
import textwrap
from pathlib import Path

import pytest

from programs import TORCHRUN, run_well

pytestmark = pytest.mark.usefixtures("warm_interpreters")

SCRIPT = textwrap.dedent("""
    import hashlib, os, sys
    import torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    import gradwire

    file, last, dies_at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    rank, life = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(0)
    # Buckets that are never rebuilt: what is sent together does not depend on where a life begins.
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 4)), find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    attachment = gradwire.attach(ddp, optimizer, "one-bit", timeout_s=60)
    step = 0
    if os.path.exists(file):
        saved = torch.load(file, weights_only=True)
        step = saved["step"]
        ddp.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        attachment.load_state_dict(saved["gradwire"])
    began = step
    while step < last:
        if step == dies_at and life == 0 and rank == 1:
            os._exit(3)
        generator = torch.Generator().manual_seed(100 * step + rank)
        optimizer.zero_grad()
        ddp(torch.randn(8, 16, generator=generator)).square().mean().backward()
        optimizer.step()
        step += 1
        state = attachment.state_dict(all_ranks=True)
        if rank == 0 and step % 2 == 0:
            saved = {"step": step, "model": ddp.module.state_dict(), "optimizer": optimizer.state_dict(), "gradwire": state}
            torch.save(saved, file + ".new")
            os.replace(file + ".new", file)
    attachment.close()
    flat = torch.cat([p.detach().flatten() for p in ddp.parameters()])
    hashes = [None] * dist.get_world_size()
    dist.all_gather_object(hashes, hashlib.sha256(flat.numpy().tobytes()).hexdigest())
    assert len(set(hashes)) == 1
    if rank == 0:
        print("ended", life, began, hashes[0])
    dist.destroy_process_group()
""")


def run(script: Path, n_ranks: int, *arguments: object) -> list[str]:
    """By torchrun, which restarts once. What rank 0 says at the end: life, the step it began with, hash of the parameters."""
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(Path(__file__).parents[2] / "src")])
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = [*TORCHRUN[:-1], n_ranks, "--max-restarts=1", script, *arguments]
    said = run_well(command, 300, env={**os.environ, **variables})
    (line,) = [line for line in said.splitlines() if line.startswith("ended")]
    return line.split()[1:]


def test_the_second_life_ends_with_the_bits_of_one_that_nobody_left(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    never = 99
    _, _, expected = run(script, 2, tmp_path / "whole.pt", 6, never)
    life, began, found = run(script, 2, tmp_path / "again.pt", 6, 3)
    assert (life, began, found) == ("1", "2", expected)
    life, began, _ = run(script, 3, tmp_path / "again.pt", 8, never)  # with another number of ranks
    assert (life, began) == ("0", "6")
