"""The scheme gcomp: near-lossless, the same bits on all ranks, tables that follow the gradients, state that resumes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import gradwire
from gradwire import schemes
from ranks import on_ranks, run_ranks
from small_training import Training, adamw, batch_of, sgd


def from_one(module: nn.Module, rank: int, step: int) -> Tensor:
    return (module(batch_of(rank, step)) - 1).square().mean()


OPTIMIZERS = {"adamw": adamw, "sgd": sgd}


def train(rank: int, options: dict, optimizer_name: str, n_steps: int) -> tuple[Tensor, list[float], dict]:
    scheme = schemes.by_name(options.pop("scheme", "gcomp"), **options)
    training = Training(rank, scheme, OPTIMIZERS[optimizer_name], loss=from_one)
    losses = training.take_steps(range(n_steps))
    return training.flat(), losses, training.close()


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


@on_ranks(2)
def test_resumed_run_continues_bit_by_bit(rank: int, world_size: int) -> None:
    def start(**options: int) -> Training:
        return Training(rank, schemes.by_name("gcomp", **options), adamw, loss=from_one)

    training = start(refresh_every=4)
    training.take_steps(range(5))  # step 4 was counted: the refresh is under way
    saved = training.state()
    training.close()
    results = []
    for _ in range(2):  # a run that goes on: wrapped anew at this step, as the resumed one has to be
        resumed = start(refresh_every=4).load(saved)
        assert resumed.attachment.step == 5
        resumed.take_steps(range(5, 12))
        stats = resumed.close()
        results.append((resumed.flat(), stats["table_id_wide"], stats["bytes_sent"]))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]
    other = start()
    with pytest.raises(gradwire.InvalidArgument, match="refresh_every: 4 saved, None now"):
        other.load(saved)
    other.close()


@on_ranks(2)
def test_inf_on_one_rank_reaches_all_ranks_and_spoils_no_table(rank: int, world_size: int) -> None:
    training = Training(rank, schemes.by_name("gcomp", refresh_every=3))
    for step in range(4):
        training.backward(step, math.inf if rank == 1 and step == 0 else 1.0)
        assert bool(training.gradient().isfinite().all()) == (step > 0)
    assert training.close()["table_refreshes"] == 0  # the counts of step 0 held an Inf: all ranks left them out


@on_ranks(2)
def test_grad_scaler_skips_the_step_on_all_ranks_alike(rank: int, world_size: int) -> tuple[list[float], Tensor]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    training, scales = Training(rank, "gcomp", scaler=scaler), []
    for step in range(4):
        training.optimizer.zero_grad()
        loss = training.ddp(batch_of(rank, step)).square().mean()
        scaler.scale(loss * (math.inf if rank == 1 and step == 1 else 1.0)).backward()
        scaler.step(training.optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    training.close()
    assert scales[1] == scales[0] / 2
    return scales, training.flat()


@on_ranks(2)
def test_what_is_missing_is_named(rank: int, world_size: int) -> None:
    with pytest.raises(gradwire.InvalidArgument, match="pass HookState\\(scheme, optimizer=optimizer\\)"):
        gradwire.HookState("gcomp")
    ddp = Training(rank).ddp
    with pytest.raises(gradwire.Unsupported, match='importance="uniform"'):
        gradwire.attach(ddp, torch.optim.Adam(ddp.parameters(), differentiable=True), "gcomp")
    state = gradwire.HookState(schemes.by_name("gcomp", importance="uniform", bits=10))
    ddp.register_comm_hook(state, gradwire.ddp_hook)
    ddp(batch_of(rank, 0)).sum().backward()
    with pytest.raises(gradwire.InvalidArgument, match="HookState\\(scheme, module=model\\)"):
        state.state_dict()
    state.close()
