"""The scheme gcomp: near-lossless, the same bits on all ranks, tables that follow the gradients, state that resumes."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire import schemes
from ranks import run_ranks


def build(optimizer_name: str = "adamw") -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 3))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.2)
    if optimizer_name == "sgd":
        return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    return ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-3)


def batch_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(1_000 * rank + step))


def run_steps(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = (ddp(batch_of(rank, step)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def flat(ddp: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in ddp.parameters()]).clone()


def train(rank: int, options: dict, optimizer_name: str, n_steps: int) -> tuple[torch.Tensor, list[float], dict]:
    ddp, optimizer = build(optimizer_name)
    attachment = gradwire.attach(ddp, optimizer, schemes.by_name(options.pop("scheme", "gcomp"), **options))
    losses = run_steps(ddp, optimizer, rank, range(n_steps))
    stats = attachment.stats()
    attachment.close()
    return flat(ddp), losses, stats


def train_all(rank: int, world_size: int, topology: str, optimizer_name: str) -> dict:
    return {
        name: train(rank, {"topology": topology, "importance": name, "refresh_every": 4}, optimizer_name, 12)
        for name in ("paper", "none")
    } | {"truncate": train(rank, {"scheme": "truncate", "topology": topology}, optimizer_name, 12)}


@pytest.mark.parametrize(
    ("world_size", "topology", "optimizer_name"), [(1, "ring", "adamw"), (2, "ring", "adamw"), (3, "direct", "sgd")]
)
def test_ranks_agree_and_the_loss_stays_near_that_of_the_lossless_ring(
    world_size: int, topology: str, optimizer_name: str
) -> None:
    results = run_ranks(train_all, world_size, topology, optimizer_name)
    for result in results[1:]:
        for name, (parameters, _, _) in result.items():
            assert torch.equal(parameters, results[0][name][0]), name
    lossless, near_lossless, truncated = (results[0][name] for name in ("none", "paper", "truncate"))
    if world_size == 1:
        assert torch.equal(lossless[0], near_lossless[0])
        assert lossless[2]["bytes_sent"] == 0
        return
    deviation = (lossless[0] - near_lossless[0]).abs().mean()
    assert deviation < 0.1 * (lossless[0] - truncated[0]).abs().mean()
    assert near_lossless[2]["bytes_sent"] < lossless[2]["bytes_sent"]
    assert near_lossless[2]["table_refreshes"] == 3  # counted in steps 0, 4, 8, in use from 2, 6, 10


def resume(rank: int, world_size: int) -> None:
    options = {"refresh_every": 4}
    ddp, optimizer = build()
    attachment = gradwire.attach(ddp, optimizer, schemes.by_name("gcomp", **options))
    run_steps(ddp, optimizer, rank, range(5))  # step 4 was counted: the refresh is under way
    model_state = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    optimizer_state = copy.deepcopy(optimizer.state_dict())
    saved = io.BytesIO()
    torch.save(attachment.state_dict(), saved)
    attachment.close()
    results = []
    for _ in range(2):  # a run that goes on: wrapped anew at this step, as the resumed one has to be
        ddp, optimizer = build()
        ddp.module.load_state_dict(model_state)
        optimizer.load_state_dict(copy.deepcopy(optimizer_state))
        attachment = gradwire.attach(ddp, optimizer, schemes.by_name("gcomp", **options))
        saved.seek(0)
        attachment.load_state_dict(torch.load(saved, weights_only=True))
        assert attachment.step == 5
        run_steps(ddp, optimizer, rank, range(5, 12))
        stats = attachment.stats()
        results.append((flat(ddp), stats["table_id_wide"], stats["bytes_sent"]))
        attachment.close()
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]
    ddp, optimizer = build()
    other = gradwire.attach(ddp, optimizer, "gcomp")
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    with pytest.raises(gradwire.InvalidArgument, match="refresh_every: 4 saved, None now"):
        other.load_state_dict(state)
    other.close()


def test_resumed_run_continues_bit_by_bit() -> None:
    run_ranks(resume, 2)


def overflow(rank: int, world_size: int) -> None:
    ddp, optimizer = build("sgd")
    attachment = gradwire.attach(ddp, optimizer, schemes.by_name("gcomp", refresh_every=3))
    before = flat(ddp)
    for step in range(4):
        optimizer.zero_grad()
        loss = ddp(batch_of(rank, step)).square().mean()
        (loss * (float("inf") if rank == 1 and step == 0 else 1.0)).backward()
        gradients = torch.cat([parameter.grad.reshape(-1) for parameter in ddp.parameters()])
        assert bool(gradients.isfinite().all()) == (step > 0)
    assert torch.equal(before, flat(ddp))
    assert attachment.stats()["table_refreshes"] == 0  # the counts of step 0 held an Inf: all ranks left them out
    attachment.close()


def test_inf_on_one_rank_reaches_all_ranks_and_spoils_no_table() -> None:
    run_ranks(overflow, 2)


def amp(rank: int, world_size: int) -> list[float]:
    ddp, optimizer = build("sgd")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    attachment = gradwire.attach(ddp, optimizer, "gcomp", scaler=scaler)
    scales = []
    for step in range(4):
        optimizer.zero_grad()
        loss = ddp(batch_of(rank, step)).square().mean()
        scaler.scale(loss * (float("inf") if rank == 1 and step == 1 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    attachment.close()
    return [*scales, float(flat(ddp).double().sum())]


def test_grad_scaler_skips_the_step_on_all_ranks_alike() -> None:
    first, second = run_ranks(amp, 2)
    assert first == second
    assert first[1] == first[0] / 2


def without_optimizer(rank: int, world_size: int) -> None:
    with pytest.raises(gradwire.InvalidArgument, match="pass HookState\\(scheme, optimizer=optimizer\\)"):
        gradwire.HookState("gcomp")
    ddp, _ = build()
    with pytest.raises(gradwire.Unsupported, match='importance="uniform"'):
        gradwire.attach(ddp, torch.optim.Adamax(ddp.parameters()), "gcomp")
    state = gradwire.HookState(schemes.by_name("gcomp", importance="uniform", bits=10))
    ddp.register_comm_hook(state, gradwire.ddp_hook)
    ddp(batch_of(rank, 0)).sum().backward()
    with pytest.raises(gradwire.InvalidArgument, match="HookState\\(scheme, module=model\\)"):
        state.state_dict()
    state.close()


def test_what_is_missing_is_named() -> None:
    run_ranks(without_optimizer, 2)
