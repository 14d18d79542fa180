"""What scripts do around a training: set torch's defaults, forget the scaler, never close."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from ranks import on_ranks

# One of each kind of message; the others make their tensors in the same places, which the architecture's tests look at.
SCHEMES = ["acp-sgd", "dgc", "gcomp", "homomorphic", "one-bit", "power-sgd", "slimgc", "terngrad"]


def train(rank: int, scheme: Any, n_steps: int = 5, scaler: Any = None, told: Any = None) -> tuple[torch.Tensor, Any]:
    """Without a name of a dtype or device but those of the model. A scaled loss overflows in step 2."""
    kinds: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 40, **kinds), nn.ReLU(), nn.Linear(40, 8, **kinds))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05)
    attachment = gradwire.attach(ddp, optimizer, scheme, told, timeout_s=100)
    g = torch.Generator(device="cpu").manual_seed(rank)
    for step in range(n_steps):
        loss = ddp(torch.randn(8, 16, generator=g, **kinds)).square().mean()
        optimizer.zero_grad()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss * torch.inf if step == 2 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
    state = attachment.state_dict()["state"]
    attachment.close()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), state


@on_ranks(2)
def test_defaults_of_dtype_and_device_change_no_bit(rank: int, world_size: int) -> None:
    for scheme in SCHEMES:
        expected, _ = train(rank, scheme)
        for dtype, device in ((torch.float64, None), (torch.bfloat16, None), (torch.float32, "meta")):
            torch.set_default_dtype(dtype)
            torch.set_default_device(device)
            try:
                values, _ = train(rank, scheme)
            finally:
                torch.set_default_dtype(torch.float32)
                torch.set_default_device(None)
            assert torch.equal(values, expected), (scheme, dtype, device)


@on_ranks(2)
def test_a_scaler_that_attach_was_not_given_counts_as_if_it_had_been(rank: int, world_size: int) -> None:
    for scheme in ("one-bit", "dgc", "acp-sgd", "top-k"):
        ends = []
        for is_told in (True, False):
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
            ends.append(train(rank, scheme, 6, scaler, scaler if is_told else None))
        (told, told_state), (untold, state) = ends
        assert torch.equal(told, untold), scheme
        for name, residual in told_state.get("residuals", {}).items():
            assert torch.equal(residual, state["residuals"][name]), (scheme, name)


@pytest.mark.parametrize(
    ("scheme", "door"), [("auto", "ddp"), ("gcomp", "ddp"), ("one-bit", "ddp"), ("gcomp", "module")]
)
@on_ranks(2)
def test_an_attachment_that_nobody_closes_goes_with_its_model(
    rank: int, world_size: int, scheme: str, door: str
) -> None:
    """Threads and descriptors that three more folds have left, and models that are still there."""

    def fold() -> weakref.ref[nn.Module]:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(16, 40), nn.Linear(40, 8))
        if door == "ddp":
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        gradwire.attach(model, optimizer, scheme, timeout_s=100)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 16)).square().mean().backward()
            optimizer.step()
        return weakref.ref(model)

    def held() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/task")) + len(os.listdir("/proc/self/fd"))

    fold()
    before = held()
    left = [fold() for _ in range(3)]
    dist.barrier()
    assert held() - before <= 2
    assert all(one() is None for one in left)
