"""one-bit-adam in a training that changes: its learning rate, parameter groups, number of ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from frozen_adam_oracle import DECAY, FREEZE, LR, STEPS, Q, check, start, transcribed
from gradwire import InvalidArgument
from ranks import run_ranks
from small_training import Training

CHANGE = FREEZE + 2


def begin(rank: int) -> Training:
    return start(rank, scale_values=Q)


def ended(training: Training) -> list[Tensor]:
    training.close()
    return [parameter.detach().clone() for parameter in training.ddp.parameters()]


def restart(rank: int, world_size: int) -> list[Tensor]:
    """A schedule that falls, and starts again after the freeze."""
    training = begin(rank)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(training.optimizer, CHANGE)
    for step in range(STEPS):
        training.take_steps([step])
        schedule.step()
    return ended(training)


def cut_groups(rank: int, world_size: int, change: dict[str, Any]) -> list[Tensor]:
    """The first layer goes into a group of its own after the freeze."""
    training = begin(rank)
    training.take_steps(range(CHANGE))
    group = training.optimizer.param_groups[0]
    parameters, group["params"] = group["params"], group["params"][2:]
    training.optimizer.add_param_group({"params": parameters[:2], **change})
    training.take_steps(range(CHANGE, STEPS))
    return ended(training)


def test_a_restart_of_the_learning_rate_is_the_transcription() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], LR)
    schedule, rates = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, CHANGE), []
    for _ in range(STEPS):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    assert rates[CHANGE] == LR > rates[CHANGE - 1]
    check(run_ranks(restart, 2), transcribed(2, lambda step, name: (rates[step], DECAY)))


@pytest.mark.parametrize("change", [{"lr": 0.0}, {"lr": 0.03}, {"weight_decay": 5.0}])
def test_groups_cut_anew_after_the_freeze_rule_from_the_next_step_on(change: dict[str, float]) -> None:
    def rates(step: int, name: str) -> tuple[float, float]:
        if step < CHANGE or name.startswith("2."):
            return LR, DECAY
        return change.get("lr", LR), change.get("weight_decay", DECAY)

    check(run_ranks(cut_groups, 2, change), transcribed(2, rates))


def save(rank: int, world_size: int) -> list[Any]:
    training = begin(rank)
    training.take_steps(range(CHANGE))
    saved = [*training.state(), copy.deepcopy(training.attachment.state_dict(all_ranks=True))]
    training.close()
    return saved


def go_on(rank: int, world_size: int, saved: list[Any]) -> tuple[dict[str, Any], list[Tensor]]:
    """Load another number's checkpoint; the state that it becomes, and the parameters in the end."""
    training = begin(rank)
    attachment, optimizer = training.attachment, training.optimizer
    with pytest.raises(InvalidArgument, match=r"written by 2 ranks.*state_dict\(all_ranks=True\)"):
        attachment.load_state_dict(saved[2], strict=False)
    training.load((*saved[:2], saved[3]))
    loaded = copy.deepcopy(attachment.state_dict()["state"])
    before = [state["exp_avg_sq"].clone() for state in optimizer.state.values()]
    training.take_steps(range(CHANGE, STEPS))
    after = [state["exp_avg_sq"] for state in optimizer.state.values()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True)), "the variance stays frozen"
    assert training.stats()["n_frozen"] == len(before)
    return loaded, ended(training)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_checkpoint_of_another_number_of_ranks_keeps_the_freeze_and_what_was_not_sent(world_size: int) -> None:
    saved = run_ranks(save, 2)
    written = [states[2]["state"] for states in saved]
    assert written[0]["frozen_at"] == dict.fromkeys(["0.weight", "0.bias", "2.weight", "2.bias"], FREEZE)
    ranks = run_ranks(go_on, world_size, saved[0])
    for loaded, ours in ranks:
        assert loaded["frozen_at"] == written[0]["frozen_at"]
        assert all(torch.equal(one, other) for one, other in zip(ours, ranks[0][1], strict=True))
        moved = [float((one - start).norm()) for one, start in zip(ours, saved[0][0].values(), strict=True)]
        assert all(0 < one < 10 for one in moved)
    for name, own in written[0]["residuals"].items():
        mean = (own + written[1]["residuals"][name]) / 2
        kept = torch.stack([loaded["residuals"][name] for loaded, _ in ranks]).mean(0)
        assert torch.allclose(kept, mean, rtol=1e-5, atol=1e-8), "the mean over the ranks is what counts"
        assert mean.any()
