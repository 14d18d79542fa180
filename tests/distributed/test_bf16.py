"""The scheme bf16 beside PyTorch's own hook, whose bits it has to give."""

from __future__ import annotations

import torch
from test_attach import build_model
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import gradwire
from ranks import run_ranks


def pytorchs(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses the hook itself off CUDA
    return default_hooks.bf16_compress_hook(state, bucket)


def beside_the_hook(rank: int, world_size: int) -> tuple[float, bool, float]:
    results, ratio = [], 0.0
    for ours in (False, True):
        ddp = DistributedDataParallel(build_model(), bucket_cap_mb=0.2)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        attachment = gradwire.attach(ddp, optimizer, "bf16") if ours else None
        if not ours:
            ddp.register_comm_hook(None, pytorchs)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(4):
            optimizer.zero_grad()
            ddp(torch.randn(8, 20, generator=generator)).square().mean().backward()
            optimizer.step()
        if attachment:
            ratio = attachment.stats()["ratio"]
            attachment.close()
        results.append(torch.cat([p.detach().reshape(-1) for p in ddp.parameters()]))
    theirs, mine = results
    sums = [torch.empty_like(mine) for _ in range(world_size)]
    torch.distributed.all_gather(sums, mine)
    return float((theirs - mine).abs().max()), all(torch.equal(mine, other) for other in sums), ratio


def test_it_does_what_pytorchs_hook_does_with_half_the_bytes() -> None:
    for world_size in (1, 2, 3):
        for difference, equal, ratio in run_ranks(beside_the_hook, world_size):
            # PyTorch rounds first and divides in bfloat16, once more rounded unless the divisor is a power of two.
            assert difference < (1e-6 if world_size == 2 else 2e-3)
            assert equal
            assert world_size == 1 or 0.5 <= ratio < 0.51
