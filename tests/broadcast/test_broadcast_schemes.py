"""The broadcast schemes: the same bits on every rank, DDP's bits where nothing is left out, and resumable state."""

from __future__ import annotations

import hashlib
import io
import itertools
import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import schemes
from gradwire.schemes import Scheme
from gradwire.schemes.aqgb.scheme import Aqgb, Broadcast
from ranks import on_ranks, run_ranks
from training_runs import CASES, find_differences

THREE_BLOCKS = [["0"], ["2"], ["4"]]


def build(scheme: Scheme | None, seed: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 60), nn.Tanh(), nn.Linear(60, 3)).to(dtype)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    attachment = gradwire.attach(ddp, optimizer, scheme, timeout_s=100) if scheme else None
    return ddp, optimizer, attachment


def take_step(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> float:
    batch = torch.randn(4, 20, generator=torch.Generator().manual_seed(1_000 * rank + step))
    batch = batch.to(next(ddp.parameters()).dtype)
    optimizer.zero_grad()
    loss = (ddp(batch) - batch[:, :3]).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def values(ddp: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in ddp.parameters()])


def hash_of(ddp: nn.Module) -> str:
    return hashlib.sha256(values(ddp).numpy().tobytes()).hexdigest()


# ---- the same on every rank


@on_ranks(2)
def test_every_byte_sent_is_in_the_totals_as_soon_as_the_steps_are_taken(rank: int, world_size: int) -> None:
    ddp, optimizer, attachment = build(Broadcast(bits=8, blocks=THREE_BLOCKS))
    counts = []
    for step in range(8):
        take_step(ddp, optimizer, rank, step)
        if step % 2:
            attachment.flush()
            counts.append(attachment.stats()["bytes_sent"])
    attachment.close()
    steps = {after - before for before, after in itertools.pairwise(counts[1:])}
    assert counts[0] >= max(steps), counts  # the first two steps lack nothing, and begin with a preamble
    assert attachment.stats()["bytes_sent"] == counts[3], counts
    assert len(steps) == 1, counts


@pytest.mark.parametrize(
    ("world_size", "topology"),
    [(2, "fan-out"), (3, "ring"), (4, "fan-out"), (2, "owners"), (3, "owners"), (4, "owners")],
)
@on_ranks()
def test_ranks_hold_the_same_bits_after_300_steps_under_random_delays(
    rank: int, world_size: int, topology: str
) -> list[str]:
    options: dict[str, Any] = {"topology": topology}
    if world_size < 4:  # four ranks keep the ceiling that busy cores give them; fewer fill the network
        options["max_contention"] = 1
    ddp, optimizer, attachment = build(Aqgb(blocks=THREE_BLOCKS, error_feedback=world_size == 4, **options))
    delays, hashes = random.Random(rank), []
    for step in range(300):
        if delays.random() < 0.1:
            time.sleep(0.005 * delays.random())  # a slow forward pass, a late gradient
        take_step(ddp, optimizer, rank, step)
        if delays.random() < 0.1:
            time.sleep(0.005 * delays.random())
        if step % 100 == 99:
            attachment.flush()
            hashes.append(hash_of(ddp))
    bits = [bits for one in attachment.scheme.figures.rounds for bits in one["bits"]]
    attachment.close()
    assert len(set(hashes)) == 3
    assert 4 <= min(bits) <= max(bits) <= 32
    return hashes


# ---- features


# With one rank nothing is exchanged: a case of each kind is enough.
FEW = {name: options for name, options in CASES.items() if name.startswith(("adamw", "unused", "amp", "clip", "load"))}


@pytest.mark.parametrize("world_size", [1, 2])
@on_ranks()
def test_all_32_bits_train_as_ddp_does(rank: int, world_size: int) -> None:
    """Bit for bit, whatever the optimizer and the script around it."""
    cases = CASES if world_size > 1 else FEW
    assert find_differences(rank, cases, lambda blocks, norm: Broadcast(32, blocks, norm)) == []


def train_features(rank: int, world_size: int) -> dict[str, Any]:
    """Several runs in one group: what they must have in common is checked by the test."""
    seen: dict[str, Any] = {}
    for name, make in {
        "plain": lambda: None,
        "exact": lambda: Aqgb(floor=1.0, blocks=THREE_BLOCKS),
        "coarse": lambda: Broadcast(3, THREE_BLOCKS),
        "fed back": lambda: Broadcast(3, THREE_BLOCKS, error_feedback=True),
        "ring": lambda: Broadcast(3, THREE_BLOCKS, topology="ring"),
        "owners": lambda: Aqgb(floor=1.0, blocks=THREE_BLOCKS, topology="owners"),
        "bits of the codec": lambda: Broadcast(31, THREE_BLOCKS),
    }.items():
        ddp, optimizer, attachment = build(make())
        losses = [take_step(ddp, optimizer, rank, step) for step in range(40)]
        if attachment is not None:
            seen[name + " stats"] = attachment.stats()
            attachment.close()
        seen[name] = values(ddp)
        seen[name + " loss"] = sum(losses[-10:])
    ddp, optimizer, attachment = build(Broadcast(16, THREE_BLOCKS), dtype=torch.bfloat16)
    for step in range(3):
        take_step(ddp, optimizer, rank, step)
    attachment.close()
    seen["bfloat16"] = values(ddp)
    # A step that is not taken, and then the next one.
    ddp, optimizer, attachment = build(Broadcast(8, THREE_BLOCKS, error_feedback=True, topology="owners"))
    take_step(ddp, optimizer, rank, 0)
    optimizer.zero_grad()
    ddp(torch.ones(2, 20)).sum().backward()
    take_step(ddp, optimizer, rank, 2)
    # A gradient that is not finite, on one rank.
    optimizer.zero_grad()
    (ddp(torch.ones(2, 20)).sum() * (torch.inf if rank == 1 else 1.0)).backward()
    optimizer.step()
    attachment.flush()
    seen["not finite"] = values(ddp).isfinite()
    residuals = attachment.state_dict()["state"]["residuals"]
    seen["residuals"] = all(bool(residual.isfinite().all()) for residual in residuals.values())
    # Another scheme in its place.
    ddp.load_state_dict({key: torch.ones_like(value) / 10 for key, value in ddp.state_dict().items()})
    optimizer.state.clear()
    attachment.switch(schemes.by_name("plain"))
    take_step(ddp, optimizer, rank, 3)
    attachment.switch(Aqgb(blocks=2))
    take_step(ddp, optimizer, rank, 4)
    attachment.close()
    seen["switched"] = values(ddp)
    return seen


def test_fewer_bits_stay_near_and_all_ranks_agree():
    results = run_ranks(train_features, 3)
    first = results[0]
    for name in (
        "plain",
        "exact",
        "coarse",
        "fed back",
        "ring",
        "owners",
        "bits of the codec",
        "not finite",
        "switched",
        "bfloat16",
    ):
        assert all(torch.equal(result[name], first[name]) for result in results), name
    assert torch.equal(first["ring"], first["coarse"])  # the way there changes nothing
    for exact in ("exact", "owners"):
        torch.testing.assert_close(first[exact], first["plain"], rtol=0, atol=1e-6)  # but for the order of the sum
    torch.testing.assert_close(first["bits of the codec"], first["plain"], rtol=0, atol=1e-5)
    distance = {name: float((first[name] - first["plain"]).norm()) for name in ("coarse", "fed back")}
    assert 0 < distance["fed back"] < distance["coarse"]
    assert not first["not finite"].all()
    assert first["residuals"]
    stats = first["coarse stats"]
    assert set(stats["bits_per_value"].values()) == {3.0}
    assert 0 < stats["osf"] <= 1
    assert 0 <= stats["utilisation"] <= 1
    assert stats["row"] >= 0
    assert all(result["coarse stats"]["group_row"] >= 0 for result in results)
    assert stats["rate_bps"] > 0
    assert 0 < stats["bytes_sent"] < first["exact stats"]["bytes_sent"]
    assert stats["encode_s"] > 0 < stats["decode_s"]


# ---- resuming


@on_ranks(2)
def test_a_resumed_run_goes_on_with_the_same_bits(rank: int, world_size: int) -> None:
    def begin(saved: dict[str, Any] | None = None) -> tuple[Any, Any, Any]:
        ddp, optimizer, attachment = build(
            Broadcast(4, THREE_BLOCKS, error_feedback=True), seed=1 if saved is None else 2
        )
        if saved is not None:
            ddp.module.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            attachment.load_state_dict(saved["gradwire"])
        return ddp, optimizer, attachment

    ddp, optimizer, attachment = begin()
    for step in range(4):
        take_step(ddp, optimizer, rank, step)
    file = io.BytesIO()
    torch.save(
        {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict(), "gradwire": attachment.state_dict()},
        file,
    )
    for step in range(4, 8):
        take_step(ddp, optimizer, rank, step)
    attachment.close()
    uninterrupted = values(ddp)
    file.seek(0)
    ddp, optimizer, attachment = begin(torch.load(file, weights_only=True))
    assert attachment.step == 4
    for step in range(4, 8):
        take_step(ddp, optimizer, rank, step)
    attachment.close()
    assert torch.equal(uninterrupted, values(ddp))
