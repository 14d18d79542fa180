"""auto on bad days: ranks that stall, raise or differ, overflows, slow loaders, other world sizes, a torch without timers."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from auto_cases import Quick, quick
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import InvalidArgument, RankMismatch
from gradwire.schemes.auto.scheme import Auto
from gradwire.telemetry.stopwatch import StepClock
from ranks import on_ranks, run_ranks
from small_training import Training, batch_of


@on_ranks(2)
def test_a_data_loader_that_is_the_bottleneck_is_not_on_a_steps_account(rank: int, world_size: int) -> None:
    training, took_s = Training(rank), []
    ddp = training.ddp
    clock = StepClock(ddp, ddp, lambda: None, lambda lap: took_s.append(lap.took_ns / 1e9))
    started = time.perf_counter()
    for step in range(8):
        time.sleep(0.25)  # the loader
        training.take_steps([step])
        ddp.eval()
        ddp(torch.randn(8, 20))
        ddp.train()
    clock.close()
    assert len(took_s) == 8
    assert sum(took_s) <= time.perf_counter() - started - 8 * 0.25


@on_ranks(2)
def test_a_rank_that_stalls_in_its_steps_parts_nobody(rank: int, world_size: int) -> tuple[Any, ...]:
    training = Training(rank, Auto(fidelity=["one-bit", "bf16"]))
    handle = training.ddp.module[0].register_forward_pre_hook(
        lambda module, inputs: time.sleep(0.2) if rank == 1 and training.attachment.step % 9 == 7 else None
    )
    training.take_steps(range(40))
    handle.remove()
    auto = training.close()["auto"]
    return auto["schedule"], auto["decisions"], auto["scheme"], training.flat()


def trained_a_while(rank: int, world_size: int) -> tuple[str, dict[str, Any]]:
    training = Training(rank, quick(rank))
    training.take_steps(range(40))
    state = training.attachment.state_dict(all_ranks=True)
    return training.close()["auto"]["scheme"], state


def goes_on_in_another_world(rank: int, world_size: int, state: dict[str, Any]) -> tuple[str, int]:
    training = Training(rank, quick(rank))
    training.attachment.load_state_dict(state)
    training.take_steps(range(10))
    step = training.attachment.step
    return training.close()["auto"]["schedule"][0][1], step


def test_of_another_world_size_it_begins_anew() -> None:
    (scheme, state), _ = run_ranks(trained_a_while, 2)
    assert scheme == "one-bit"
    assert run_ranks(goes_on_in_another_world, 3, state) == [("plain", 50)] * 3


@on_ranks(2)
def test_without_a_budget_nothing_is_tried_and_ddp_stays_as_it_is(rank: int, world_size: int) -> None:
    training = Training(rank, Quick(rank, {"one-bit": 3.0}, budget=0))
    training.take_steps(range(60))
    auto = training.close()["auto"]
    assert (auto["schedule"], auto["decisions"]) == ([(0, "plain")], [])
    assert not training.ddp._comm_hooks


@pytest.mark.parametrize("asks_at", [50, 51, 52, 53, 54])
@on_ranks(2)
def test_any_rank_may_ask_to_think_again_whatever_is_on_its_ballot(
    rank: int, world_size: int, asks_at: int
) -> tuple[Any, Tensor]:
    auto = Quick(rank, {"one-bit": 3.0}, noise=0.01)
    training = Training(rank, auto)
    training.take_steps(range(asks_at))
    if rank == 1:
        auto.reconsider()
    training.take_steps(range(asks_at, 70))
    decisions = training.close()["auto"]["decisions"]
    assert any(d["kind"] == "drift" and d["step"] >= asks_at for d in decisions)
    return decisions, training.flat()


@on_ranks(2)
def test_a_torch_without_ddps_private_timers_does(rank: int, world_size: int) -> None:
    def gone(*_: Any) -> None:
        raise AttributeError("no such timer in this torch")

    for name in ("_set_ddp_runtime_logging_sample_rate", "_get_ddp_logging_data"):
        setattr(DistributedDataParallel, name, gone)
    training = Training(rank, quick(rank))
    training.take_steps(range(40))
    assert training.close()["auto"]["scheme"] == "one-bit"


@on_ranks(2, raises=RankMismatch, match="no such luck")
def test_a_candidate_that_raises_in_a_trial_is_heard_on_every_rank(rank: int, world_size: int) -> None:
    auto = Auto(fidelity=["one-bit"], replay=[(0, "plain"), (3, "one-bit")])
    training = Training(rank, auto)
    if rank == 1:

        def broken(bucket: Any) -> Any:
            raise ValueError("no such luck")

        auto._subs["one-bit"].reduce = broken  # type: ignore[method-assign]
    training.take_steps(range(6))


@on_ranks(2, raises=RankMismatch, match="options")
def test_ranks_that_were_given_other_classes_are_told_when_they_attach(rank: int, world_size: int) -> None:
    training = Training(rank)
    gradwire.attach(training.ddp, training.optimizer, fidelity="exact" if rank else "close")


@on_ranks(2)
def test_overflows_under_amp_neither_stop_it_nor_part_the_ranks(rank: int, world_size: int) -> Tensor:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    training = Training(rank, quick(rank), scaler=scaler)
    for step in range(60):
        training.optimizer.zero_grad()
        loss = training.ddp(batch_of(rank, step)).square().mean()
        scaler.scale(loss * math.inf if step % 13 == 5 and rank == 1 else loss).backward()
        scaler.step(training.optimizer)
        scaler.update()
    assert training.close()["auto"]["scheme"] == "one-bit"
    assert bool(training.flat().isfinite().all())
    return training.flat()


def as_ddp(state, bucket):  # type: ignore[no-untyped-def]
    buffer = bucket.buffer().div_(torch.distributed.get_world_size())
    return torch.distributed.all_reduce(buffer, async_op=True).get_future().then(lambda f: f.value()[0])


@on_ranks(2)
def test_where_another_hook_comes_first_it_stays_plain_and_says_so(rank: int, world_size: int) -> None:
    training = Training(rank, quick(rank))
    training.ddp.register_comm_hook(None, as_ddp)
    training.take_steps(range(20))
    assert "communication hook already" in training.close()["auto"]["stays_plain"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"fidelity": "exakt"}, "did you mean 'exact'"),
        ({"fidelity": ["slimgc"]}, "takes no turns"),
        ({"candidates": ["terngrad"]}, 'fidelity="any" would take it'),
        ({"candidates": ["gcmp"]}, "did you mean 'gcomp'"),
        ({"budget": 0.5}, "from 0 to 0.1"),
    ],
)
def test_bad_arguments_say_what_would_do(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        Auto(**options)
