"""Silent mistakes that importance="paper" notices, what it must not take for one, and tables refreshed by need."""

from __future__ import annotations

import pytest
import torch
from test_gcomp_scheme import batch_of, build, run_steps

import gradwire
from gradwire import schemes
from ranks import run_ranks


def new_optimizer(rank: int, world_size: int) -> None:
    ddp, optimizer = build()
    gradwire.attach(ddp, optimizer, "gcomp")
    run_steps(ddp, optimizer, rank, range(2))
    another = torch.optim.AdamW(ddp.parameters(), lr=1e-4)
    with pytest.raises(gradwire.Unsupported, match="attach the optimizer that makes the steps"):
        run_steps(ddp, another, rank, range(2, 6))


def scaled_gradients(rank: int, world_size: int) -> None:
    ddp, optimizer = build("sgd")
    gradwire.attach(ddp, optimizer, "gcomp")
    run_steps(ddp, optimizer, rank, range(2))
    optimizer.zero_grad()
    ddp(batch_of(rank, 2)).square().mean().backward()
    for parameter in ddp.parameters():
        parameter.grad.mul_(8.0)
    with pytest.raises(gradwire.Unsupported, match="8 times as large"):
        optimizer.step()


def honest_training(rank: int, world_size: int) -> None:
    """Clipping, accumulation, a checkpoint loaded, a GradScaler, skipped steps, weight decay by hand."""
    ddp, optimizer = build()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    attachment = gradwire.attach(ddp, optimizer, "gcomp", scaler=scaler)
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
    attachment.close()
    optimizer.step()  # the hooks are gone


def by_need(rank: int, world_size: int) -> tuple[int, int]:
    """Gradients of one kind need one new table; when they become a million times smaller, another."""
    ddp, optimizer = build("sgd")
    attachment = gradwire.attach(ddp, optimizer, schemes.by_name("gcomp", importance="none"))
    n_refreshes = []
    for scale in (1.0, 1e-6):
        for step in range(20):
            optimizer.zero_grad()
            (ddp(batch_of(rank, step % 4)).square().mean() * scale).backward()
        n_refreshes.append(attachment.stats()["table_refreshes"])
    attachment.close()
    first, second = n_refreshes
    return first, second


@pytest.mark.parametrize("case", [new_optimizer, scaled_gradients, honest_training])
def test_mistakes_are_noticed_and_honest_training_is_not(case: object) -> None:
    assert callable(case)
    run_ranks(case, 2)


def test_table_is_refreshed_by_need_and_not_without() -> None:
    for first, second in run_ranks(by_need, 2):
        assert first == 1
        assert second == 2
