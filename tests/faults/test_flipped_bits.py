"""One bit of one message is flipped on its way between two real ranks: it is never taken for what was sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from flipping import flip_what_comes
from ranks import try_ranks

# What travels without a codec's checksum -> where the bit is flipped, in bytes from rank 1 to rank 0.
CASES: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "one-bit raw": ("one-bit", {"pull": "raw", "warmup_steps": 0}, [45, 3_000, 9_000]),
    "qsgd raw": ("qsgd", {"pull": "raw"}, [45, 9_000, 14_001]),
    "one-bit": ("one-bit", {"warmup_steps": 0}, [45, 700]),
    "broadcast": ("broadcast", {"bits": 32}, [3_000, 9_000, 20_002]),
}


def train(rank: int, world_size: int, case: str, place: int) -> list[bytes]:
    name, options, _ = CASES[case]
    if rank == 0:
        flip_what_comes(place)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(60, 50))
    attachment = gradwire.attach(ddp, torch.optim.SGD(ddp.parameters(), 0.1), name, timeout_s=20, **options)
    (optimizer,) = attachment.session.optimizers
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        ddp(torch.randn(8, 60)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    attachment.close()  # a rank that ends without it may take the last message with it
    return [parameter.detach().numpy().tobytes() for parameter in ddp.parameters()]


@pytest.mark.parametrize(("case", "place"), [(case, place) for case in CASES for place in CASES[case][2]])
def test_flipped_bit_ends_in_an_error_and_never_in_other_replicas(case: str, place: int) -> None:
    outcomes = try_ranks(train, 2, case, place)
    assert isinstance(outcomes[0].error, gradwire.CorruptMessage | gradwire.RankMismatch), outcomes
    assert isinstance(outcomes[1].error, gradwire.GradwireError), outcomes


@pytest.mark.parametrize("case", CASES)
def test_without_it_the_replicas_are_equal(case: str) -> None:
    first, second = try_ranks(train, 2, case, 1 << 40)
    assert first.error is None, first
    assert first.result == second.result
