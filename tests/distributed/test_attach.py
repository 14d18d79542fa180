"""attach(): two lines in a script, and training goes on as DDP alone, or as PyTorch's own hook, would do it."""

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ranks import on_ranks
from small_training import MakeOptimizer, Training, muon_and_adamw, sgd


@pytest.mark.parametrize("optimizer", [sgd, muon_and_adamw])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_plain_gives_the_bits_of_ddp_without_a_hook(rank: int, world_size: int, optimizer: MakeOptimizer) -> None:
    alone, plain = (Training(rank, scheme, optimizer).after(range(4)) for scheme in (None, "plain"))
    assert plain.close()["scheme"] == "plain"
    assert torch.equal(alone.flat(), plain.flat())


# ---- The scheme bf16 beside PyTorch's own hook, whose bits it has to give


def pytorchs(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses the hook itself off CUDA
    return default_hooks.bf16_compress_hook(state, bucket)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_it_does_what_pytorchs_hook_does_with_half_the_bytes(rank: int, world_size: int) -> Tensor:
    theirs, ours = Training(rank), Training(rank, "bf16")
    theirs.ddp.register_comm_hook(None, pytorchs)
    for training in (theirs, ours):
        training.take_steps(range(4))
    ratio = ours.close()["ratio"]
    # PyTorch rounds first and divides in bfloat16, once more rounded unless the divisor is a power of two.
    assert float((theirs.flat() - ours.flat()).abs().max()) < (1e-6 if world_size == 2 else 2e-3)
    assert world_size == 1 or 0.5 <= ratio < 0.51
    return ours.flat()
