"""attach(): two lines in a script, and training goes on as DDP alone would do it."""

from __future__ import annotations

import pytest
import torch

from ranks import on_ranks
from small_training import MakeOptimizer, Training, muon_and_adamw, sgd


@pytest.mark.parametrize("optimizer", [sgd, muon_and_adamw])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@on_ranks()
def test_plain_gives_the_bits_of_ddp_without_a_hook(rank: int, world_size: int, optimizer: MakeOptimizer) -> None:
    alone, plain = Training(rank, optimizer=optimizer), Training(rank, "plain", optimizer)
    alone.take_steps(range(4))
    plain.take_steps(range(4))
    assert plain.close()["scheme"] == "plain"
    assert torch.equal(alone.flat(), plain.flat())
