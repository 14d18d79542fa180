"""Silent mistakes that importance="paper" notices, what it must not take for one, and tables refreshed by need."""

from __future__ import annotations

import torch

import gradwire
from gradwire import schemes
from ranks import on_ranks
from small_training import Training, adamw, batch_of


@on_ranks(2, raises=gradwire.Unsupported, match="makes the steps, attach that one")
def test_steps_of_another_optimizer_are_noticed(rank: int, world_size: int) -> None:
    training = Training(rank, "gcomp", adamw)
    training.take_steps(range(2))
    training.optimizers = [torch.optim.AdamW(training.ddp.parameters(), lr=1e-4)]
    training.take_steps(range(2, 6))


@on_ranks(2, raises=gradwire.Unsupported, match="8 times as large")
def test_gradients_that_were_scaled_are_noticed(rank: int, world_size: int) -> None:
    training = Training(rank, "gcomp")
    training.take_steps(range(2))
    training.backward(2)
    for parameter in training.ddp.parameters():
        parameter.grad.mul_(8.0)
    training.optimizer.step()


@on_ranks(2)
def test_honest_training_is_not_taken_for_a_mistake(rank: int, world_size: int) -> None:
    """Clipping, accumulation, a checkpoint loaded, a GradScaler, skipped steps, weight decay by hand."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    training = Training(rank, "gcomp", adamw, scaler=scaler)
    ddp, optimizer = training.ddp, training.optimizer
    saved = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    for step in range(12):
        optimizer.zero_grad()
        for part in range(1 + step % 3):
            scaler.scale(ddp(batch_of(rank, 10 * step + part)).square().mean()).backward()
        if step % 4 == 1:
            continue
        scaler.unscale_(optimizer)
        if step % 2:
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3)
        else:
            for parameter in ddp.parameters():
                parameter.grad.add_(parameter.detach(), alpha=1e-2)
        scaler.step(optimizer)
        scaler.update()
        if step == 6:
            ddp.module.load_state_dict(saved)
    training.close()
    optimizer.step()  # the hooks are gone


@on_ranks(2)
def test_table_is_refreshed_by_need_and_not_without(rank: int, world_size: int) -> None:
    """Gradients of one kind need one new table; when they become a million times smaller, another."""
    training = Training(rank, schemes.by_name("gcomp", importance="none"))
    for n_refreshes, scale in enumerate((1.0, 1e-6), start=1):
        for step in range(20):
            training.backward(step % 4, scale)
        assert training.stats()["table_refreshes"] == n_refreshes
    training.close()
