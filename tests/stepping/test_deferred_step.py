"""Deferred stepping with a plain sum trains bit for bit as DDP does, whatever the optimizer and the script around it."""

from __future__ import annotations

import pytest
from deferred_sum import DeferredSum

from ranks import run_ranks
from training_runs import CASES, find_differences

# With one rank nothing is exchanged: a case of each kind is enough.
FEW = {name: options for name, options in CASES.items() if name.startswith(("adamw", "unused", "amp", "clip", "load"))}


def run_cases(rank: int, world_size: int) -> list[str]:
    return find_differences(rank, CASES if world_size > 1 else FEW, DeferredSum)


@pytest.mark.parametrize("world_size", [1, 2])
def test_deferred_steps_give_the_bits_of_ddp(world_size):
    for wrong in run_ranks(run_cases, world_size):
        assert wrong == []
