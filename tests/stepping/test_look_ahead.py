"""Model backup: bit-identical to synchronous training where it must be, one step stale where it may be, never more."""

from __future__ import annotations

import copy
import io
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from look_ahead_cases import PLAIN, batch, build, loss_of
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.schemes.slimgc import SlimGC
from gradwire_lab.training.digest import gather_hashes, hash_parameters
from ranks import on_ranks, run_ranks

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


# ---- one rank, no compression: the same bits as synchronous training


def train(optimizer_name: str, case: str, scheme: SlimGC | None) -> tuple[Tensor, list[float], dict[str, Any]]:
    ddp = build(gradient_as_bucket_view=case == "view")
    optimizer = OPTIMIZERS[optimizer_name](ddp.parameters())
    attachment = None if scheme is None else gradwire.attach(ddp, optimizer, scheme, timeout_s=100)
    has_schedule = case in ("schedule", "everything")
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20) if has_schedule else None
    losses = []
    for step in range(8):
        optimizer.zero_grad(set_to_none=case != "zeros")
        if case in ("accumulation", "everything"):
            with ddp.no_sync():
                loss_of(ddp, batch(0, 100 + step)).backward()
        loss = loss_of(ddp, batch(0, step))
        loss.backward()
        losses.append(float(loss))
        if case in ("clipping", "everything") and attachment is None:
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.05)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if case in ("evaluation", "everything") and step % 3 == 1:
            ddp.eval()
            with torch.no_grad():
                losses.append(float(loss_of(ddp, batch(0, 500))))
            ddp.train()
            losses.append(float(sum(v.double().sum() for v in ddp.state_dict().values())))
    if attachment is not None:
        stats = attachment.stats()
        assert stats["steps_ahead"] == 8, "no step may have waited"
        attachment.close()
    state = copy.deepcopy(optimizer.state_dict())
    return torch.cat([v.detach().double().reshape(-1) for v in ddp.state_dict().values()]), losses, state


@on_ranks(1)
def test_one_rank_without_compression_is_synchronous_training_bit_for_bit(rank: int, world_size: int) -> None:
    cases = [(name, "plain") for name in OPTIMIZERS]
    cases += [("adamw", case) for case in ("schedule", "accumulation", "clipping", "evaluation", "zeros", "view")]
    cases += [(name, "everything") for name in ("sgd", "momentum", "adam", "adamw")]
    for name, case in cases:
        options = {"max_grad_norm": 0.05} if case in ("clipping", "everything") else {}
        expected = train(name, case, None)
        found = train(name, case, SlimGC(**PLAIN, **options, local="peek", sync_steps=0))
        assert torch.equal(found[0], expected[0]), (name, case)
        assert found[1] == expected[1], (name, case)
        for mine, theirs in zip(found[2]["state"].values(), expected[2]["state"].values(), strict=True):
            assert all(torch.equal(torch.as_tensor(mine[k]), torch.as_tensor(theirs[k])) for k in theirs), (name, case)


def train_scaled(make: Callable[[Any], torch.optim.Optimizer], scheme: SlimGC | None) -> Tensor:
    """Under a GradScaler that meets an overflow and grows; powers of two, so that scaling itself rounds nothing."""
    ddp = build()
    optimizer = make(ddp.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    attachment = None if scheme is None else gradwire.attach(ddp, optimizer, scheme, scaler=scaler, timeout_s=100)
    for step in range(8):
        optimizer.zero_grad()
        scaler.scale(loss_of(ddp, batch(0, step)) * (math.inf if step == 3 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
    if attachment is not None:
        attachment.close()
    return torch.cat([value.detach().double().reshape(-1) for value in ddp.state_dict().values()])


@on_ranks(1)
def test_every_optimizer_steps_under_a_scaler_as_it_does_without_backup(rank: int, world_size: int) -> None:
    fused: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
        "fused adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    }
    for name, make in (OPTIMIZERS | fused).items():
        found = train_scaled(make, SlimGC(**PLAIN, local="peek", sync_steps=0))
        assert torch.equal(found, train_scaled(make, None)), name


# ---- two ranks: the very formula, and the staleness


def follow_formula(rank: int, world_size: int, local: str) -> None:
    """w(i+1) = w(i) - rule(mean of g), where rank j's g(i) is taken at w(i-1) moved by its own g(i-1) (formula 8)."""
    rate, n_steps = 0.1, 7
    ddp = build()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=rate, momentum=0.9)
    attachment = gradwire.attach(ddp, optimizer, SlimGC(**PLAIN, local=local, sync_steps=0), timeout_s=100)
    twin = copy.deepcopy(ddp.module)
    weights = [p.detach().clone() for p in twin.parameters()]
    velocity: list[Tensor] | None = None
    waiting: list[Tensor] | None = None  # own gradient of the step before
    for step in range(n_steps):
        # By hand: settle the step before, then move on by the own gradient of that step.
        start = weights
        if waiting is not None:
            moved = (
                waiting
                if local == "sgd" or velocity is None
                else [0.9 * v + g for v, g in zip(velocity, waiting, strict=True)]
            )
            start = [w - rate * m for w, m in zip(weights, moved, strict=True)]
        for p, w in zip(twin.parameters(), start, strict=True):
            p.data.copy_(w)
        own = torch.autograd.grad(loss_of(twin, batch(rank, step)), list(twin.parameters()))
        if waiting is not None:
            mean = [g / world_size for g in waiting]
            for g in mean:
                dist.all_reduce(g)
            velocity = mean if velocity is None else [0.9 * v + g for v, g in zip(velocity, mean, strict=True)]
            weights = [w - rate * v for w, v in zip(weights, velocity, strict=True)]
        waiting = list(own)
        # In training.
        optimizer.zero_grad()
        loss_of(ddp, batch(rank, step)).backward()
        for p, g in zip(ddp.parameters(), own, strict=True):
            assert torch.allclose(p.grad, g, atol=1e-6), (local, step)
        optimizer.step()
        for buffer, twins in zip(ddp.buffers(), twin.buffers(), strict=True):
            twins.copy_(buffer)
    attachment.flush()
    mean = [g / world_size for g in waiting or []]
    for g in mean:
        dist.all_reduce(g)
    assert velocity is not None
    weights = [w - rate * (0.9 * v + g) for w, v, g in zip(weights, velocity, mean, strict=True)]
    for p, w in zip(ddp.parameters(), weights, strict=True):
        assert torch.allclose(p, w, atol=1e-6)
    attachment.close()


def watch_staleness(rank: int, world_size: int) -> None:
    """A network that takes a second: the next step is computed meanwhile, the one after it is not begun."""
    ddp = build(bucket_cap_mb=25)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scheme = SlimGC(**PLAIN, sync_steps=0)
    attachment = gradwire.attach(ddp, optimizer, scheme, timeout_s=100)
    events: list[tuple[str, int]] = []
    lock = threading.Lock()
    inner = scheme._reduce_on_lane

    def slow(bucket: Any) -> Any:
        time.sleep(1.0)
        result = inner(bucket)
        with lock:
            events.append(("aggregated", bucket.step))
        return result

    scheme._reduce_on_lane = slow  # type: ignore[method-assign]
    for step in range(4):
        optimizer.zero_grad()
        with lock:
            events.append(("begun", step))
        loss = loss_of(ddp, batch(rank, step))
        loss.backward()
        with lock:
            events.append(("computed", step))
        optimizer.step()
    attachment.flush()
    place = {event: index for index, event in enumerate(events)}
    for step in range(3):
        assert place["computed", step + 1] < place["aggregated", step], (
            "nothing waits for the aggregation of the step before"
        )
    for step in range(2):
        assert place["aggregated", step] < place["begun", step + 2], "never more than one aggregate is missing"
    assert attachment.stats()["wait_s"] >= 0
    assert attachment.recorder.steps[-1].exposed_ns > 2e8  # what the second step waited for the first is told
    attachment.close()


def check_resumption(rank: int, world_size: int) -> None:
    """Saved in the middle of a pending step, a run goes on elsewhere with the same bits as here."""
    options = {"codec": "one-bit", "threshold_bytes": 400, "backup": True, "sync_steps": 2}
    ddp = build()
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    attachment = gradwire.attach(ddp, optimizer, SlimGC(**options), timeout_s=100)

    def run(steps: range) -> Tensor:
        for step in steps:
            optimizer.zero_grad()
            loss_of(ddp, batch(rank, step)).backward()
            optimizer.step()
        attachment.flush()
        return torch.cat([v.detach().double().reshape(-1) for v in ddp.state_dict().values()])

    run(range(5))
    for step in (5,):
        optimizer.zero_grad()
        loss_of(ddp, batch(rank, step)).backward()
        optimizer.step()
    stored = io.BytesIO()  # with a step pending: saving takes it
    torch.save([ddp.module.state_dict(), optimizer.state_dict(), attachment.state_dict()], stored)
    attachment.close()
    results = []
    for _ in range(2):
        stored.seek(0)
        model_state, optimizer_state, scheme_state = torch.load(stored, weights_only=True)
        ddp = build(seed=9)
        ddp.module.load_state_dict(model_state)
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
        optimizer.load_state_dict(optimizer_state)
        attachment = gradwire.attach(ddp, optimizer, SlimGC(**options), timeout_s=100)
        attachment.load_state_dict(scheme_state)
        results.append(run(range(6, 10)))
        assert attachment.stats()["steps_ahead"] == 4, "the synchronous steps are behind it"
        attachment.close()
    assert torch.equal(results[0], results[1])


@on_ranks(2)
def test_two_ranks_follow_the_formula_one_step_stale_and_never_two(rank: int, world_size: int) -> None:
    for local in ("peek", "sgd"):
        follow_formula(rank, world_size, local)
    watch_staleness(rank, world_size)
    check_resumption(rank, world_size)


# ---- all worlds: identical global weights


def train_long(rank: int, world_size: int) -> str:
    """300 steps with everything on; the global weights' hash, which all ranks share."""
    torch.manual_seed(2)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 3)))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    # Measured times would make the decision, and so the hash, another one in each run.
    attachment = gradwire.attach(ddp, optimizer, SlimGC("one-bit", threshold_bytes=300, backup=True), timeout_s=30)
    for step in range(300):
        optimizer.zero_grad()
        loss_of(ddp, batch(rank, step)[:, :12]).backward()
        optimizer.step()
    attachment.flush()
    hashes = gather_hashes(hash_parameters(ddp.module), torch.device("cpu"))
    assert len(set(hashes)) == 1
    assert attachment.stats()["steps_ahead"] == 298
    attachment.close()
    return hashes[0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_global_weights_are_identical_on_all_ranks_after_300_steps(world_size: int) -> None:
    assert len(set(run_ranks(train_long, world_size))) == 1
