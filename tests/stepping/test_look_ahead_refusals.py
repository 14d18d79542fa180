"""Model backup: what it refuses, and what a lost peer leaves."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from look_ahead_cases import PLAIN, build, loss_of

import gradwire
from gradwire.codecs.general import RawCodec
from gradwire.errors import PeerLost, Unsupported
from gradwire.schemes import by_name
from gradwire_lab.training.digest import hash_parameters
from ranks import on_ranks, try_ranks


class Odd(torch.optim.SGD):
    """With state of its own that no look-ahead could know of."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.n_calls = getattr(self, "n_calls", 0) + 1
        super().step(closure)


@on_ranks(2)
def test_what_cannot_be_peeked_or_would_be_lost_is_refused(rank: int, world_size: int) -> None:
    for kind in (Odd, torch.optim.LBFGS):
        ddp = build()
        with pytest.raises(Unsupported, match="cannot be peeked"):
            gradwire.attach(ddp, kind(ddp.parameters(), lr=0.1), by_name("slimgc", **PLAIN), timeout_s=100)
    ddp = build()
    # Its step is not tried where the local one is plain SGD.
    optimizer: torch.optim.Optimizer = Odd(ddp.parameters(), lr=0.1)
    attachment = gradwire.attach(ddp, optimizer, by_name("slimgc", **PLAIN, local="sgd"), timeout_s=100)
    attachment.close()
    # Clipping would be of the local gradient, and too late for the mean.
    ddp = build()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    attachment = gradwire.attach(ddp, optimizer, by_name("slimgc", **PLAIN), timeout_s=100)
    loss_of(ddp, rank, 0).backward()
    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
    with pytest.raises(Unsupported, match="max_grad_norm"):
        optimizer.step()
    attachment.close()
    ddp = build()
    # What the user does to parameters between steps would be lost: it is said, and after a flush it holds.
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    attachment = gradwire.attach(ddp, optimizer, by_name("slimgc", **PLAIN, sync_steps=0), timeout_s=100)
    loss_of(ddp, rank, 0).backward()
    optimizer.step()
    with torch.no_grad():
        next(ddp.parameters()).zero_()
    with pytest.raises(Unsupported, match="flush"):
        loss_of(ddp, rank, 1)
    attachment.flush()
    with torch.no_grad():
        next(ddp.parameters()).zero_()
    optimizer.zero_grad()
    loss_of(ddp, rank, 1).backward()
    optimizer.step()
    attachment.flush()
    moved = next(ddp.parameters())
    assert float(moved.abs().max()) < 0.2
    # A NaN travels as in synchronous training: all ranks have it, after the next step.
    optimizer.zero_grad()
    (loss_of(ddp, rank, 2) * (math.nan if rank == 0 else 1.0)).backward()
    optimizer.step()
    attachment.flush()
    assert bool(next(ddp.parameters()).isnan().any())
    attachment.close()


def die_between_push_and_pull(rank: int, world_size: int) -> None:
    ddp = build()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scheme = by_name("slimgc", codec="one-bit", threshold_bytes=0, pull="raw", backup=True, sync_steps=0)
    attachment = gradwire.attach(ddp, optimizer, scheme, timeout_s=1_000)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(ddp, rank, step).backward()
        optimizer.step()
        if step == 2:
            attachment.flush()
            complete = hash_parameters(ddp.module)
            if rank == 1:
                # What owners answer with is called back, being no codec of the core's.
                RawCodec.encode = lambda *_: os._exit(9)  # type: ignore[method-assign]
        try:
            if step > 2:
                attachment.flush()
        except PeerLost:
            assert hash_parameters(ddp.module) == complete, "the last complete global weights are left"
            raise


def test_death_between_push_and_pull_is_a_lost_peer_and_leaves_complete_weights() -> None:
    outcomes = try_ranks(die_between_push_and_pull, 3)
    for outcome in (outcomes[0], outcomes[2]):
        assert type(outcome.error) is PeerLost, outcome
