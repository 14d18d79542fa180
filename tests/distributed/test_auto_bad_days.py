"""auto on bad days: ranks that stall, raise or differ, overflows, slow loaders, other world sizes, a torch without timers."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
from auto_cases import Quick, build, flat, step_once
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import GradwireError, InvalidArgument, RankMismatch
from gradwire.schemes.auto.scheme import Auto
from gradwire.telemetry.stopwatch import StepClock
from ranks import run_ranks, try_ranks


def loads_slowly(rank: int, world_size: int) -> list[float]:
    ddp, optimizer = build(rank)
    took_s: list[float] = []
    clock = StepClock(ddp, ddp, lambda: None, lambda took_ns, waited_ns: took_s.append(took_ns / 1e9))
    generator = torch.Generator().manual_seed(rank)
    started = time.perf_counter()
    for _ in range(8):
        time.sleep(0.25)  # the loader
        step_once(ddp, optimizer, generator)
        ddp.eval()
        ddp(torch.randn(8, 20))
        ddp.train()
    clock.close()
    return [sum(took_s), time.perf_counter() - started, len(took_s)]


def test_a_data_loader_that_is_the_bottleneck_is_not_on_a_steps_account() -> None:
    for took_s, passed_s, n_steps in run_ranks(loads_slowly, 2):
        assert n_steps == 8
        assert took_s <= passed_s - 8 * 0.25


def stalls(rank: int, world_size: int) -> tuple[list[Any], torch.Tensor]:
    ddp, optimizer = build(rank)
    attachment = gradwire.attach(ddp, optimizer, Auto(fidelity=["one-bit", "bf16"]))
    handle = ddp.module[0].register_forward_pre_hook(
        lambda module, inputs: time.sleep(0.2) if rank == 1 and attachment.step % 9 == 7 else None
    )
    generator = torch.Generator().manual_seed(rank)
    for _ in range(40):
        step_once(ddp, optimizer, generator)
    handle.remove()
    auto = attachment.stats()["auto"]
    attachment.close()
    return [auto["schedule"], auto["decisions"], auto["scheme"]], flat(ddp)


def test_a_rank_that_stalls_in_its_steps_parts_nobody() -> None:
    (decided, parameters), (others_decided, others) = run_ranks(stalls, 2)
    assert decided == others_decided
    assert torch.equal(parameters, others)


def trained_a_while(rank: int, world_size: int) -> tuple[str, dict[str, Any]]:
    ddp, optimizer = build(rank)
    attachment = gradwire.attach(ddp, optimizer, Quick(rank, {"one-bit": 3.0}, fidelity=["one-bit"]))
    generator = torch.Generator().manual_seed(rank)
    for _ in range(40):
        step_once(ddp, optimizer, generator)
    found = attachment.stats()["auto"]["scheme"], attachment.state_dict(all_ranks=True)
    attachment.close()
    return found


def goes_on_in_another_world(rank: int, world_size: int, state: dict[str, Any]) -> tuple[str, int]:
    ddp, optimizer = build(rank)
    attachment = gradwire.attach(ddp, optimizer, Quick(rank, {"one-bit": 3.0}, fidelity=["one-bit"]))
    attachment.load_state_dict(state)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(10):
        step_once(ddp, optimizer, generator)
    found = attachment.stats()["auto"]["schedule"][0][1], attachment.step
    attachment.close()
    return found


def test_of_another_world_size_it_begins_anew() -> None:
    (scheme, state), _ = run_ranks(trained_a_while, 2)
    assert scheme == "one-bit"
    assert run_ranks(goes_on_in_another_world, 3, state) == [("plain", 50)] * 3


def has_no_budget(rank: int, world_size: int) -> tuple[list[Any], bool]:
    ddp, optimizer = build(rank)
    attachment = gradwire.attach(ddp, optimizer, Quick(rank, {"one-bit": 3.0}, fidelity=["one-bit"], budget=0))
    generator = torch.Generator().manual_seed(rank)
    for _ in range(60):
        step_once(ddp, optimizer, generator)
    auto = attachment.stats()["auto"]
    attachment.close()
    return [auto["schedule"], auto["decisions"]], bool(ddp._comm_hooks)


def test_without_a_budget_nothing_is_tried_and_ddp_stays_as_it_is() -> None:
    assert run_ranks(has_no_budget, 2) == [([[(0, "plain")], []], False)] * 2


def asks_to_reconsider(rank: int, world_size: int, asks_at: int) -> tuple[list[Any], torch.Tensor]:
    ddp, optimizer = build(rank)
    auto = Quick(rank, {"one-bit": 3.0}, noise=0.01, fidelity=["one-bit"])
    attachment = gradwire.attach(ddp, optimizer, auto)
    generator = torch.Generator().manual_seed(rank)
    for step in range(70):
        if step == asks_at and rank == 1:
            auto.reconsider()
        step_once(ddp, optimizer, generator)
    found = attachment.stats()["auto"]["decisions"]
    attachment.close()
    return found, flat(ddp)


@pytest.mark.parametrize("asks_at", [50, 51, 52, 53, 54])
def test_any_rank_may_ask_to_think_again_whatever_is_on_its_ballot(asks_at: int) -> None:
    (decisions, parameters), (others_decisions, others) = run_ranks(asks_to_reconsider, 2, asks_at)
    assert decisions == others_decisions
    assert any(d["kind"] == "drift" and d["step"] >= asks_at for d in decisions)
    assert torch.equal(parameters, others)


def has_no_timers(rank: int, world_size: int) -> str:
    def gone(*_: Any) -> None:
        raise AttributeError("no such timer in this torch")

    for name in ("_set_ddp_runtime_logging_sample_rate", "_get_ddp_logging_data"):
        setattr(DistributedDataParallel, name, gone)
    ddp, optimizer = build(rank)
    attachment = gradwire.attach(ddp, optimizer, Quick(rank, {"one-bit": 3.0}, fidelity=["one-bit"]))
    generator = torch.Generator().manual_seed(rank)
    for _ in range(40):
        step_once(ddp, optimizer, generator)
    found = attachment.stats()["auto"]["scheme"]
    attachment.close()
    return str(found)


def test_a_torch_without_ddps_private_timers_does() -> None:
    assert run_ranks(has_no_timers, 2) == ["one-bit"] * 2


def raises_in_a_trial(rank: int, world_size: int) -> None:
    auto = Auto(fidelity=["one-bit"], replay=[(0, "plain"), (3, "one-bit")])
    ddp, optimizer = build(rank)
    attachment = gradwire.attach(ddp, optimizer, auto)
    if rank == 1:

        def broken(bucket: Any) -> Any:
            raise ValueError("no such luck")

        auto._subs["one-bit"].reduce = broken  # type: ignore[method-assign]
    generator = torch.Generator().manual_seed(rank)
    try:
        for _ in range(6):
            step_once(ddp, optimizer, generator)
    finally:
        with contextlib.suppress(GradwireError):
            attachment.close()


def test_a_candidate_that_raises_in_a_trial_is_heard_on_every_rank() -> None:
    for outcome in try_ranks(raises_in_a_trial, 2):
        assert isinstance(outcome.error, RankMismatch)
        assert "no such luck" in str(outcome.error)


def other_options(rank: int, world_size: int) -> None:
    ddp, optimizer = build(rank)
    gradwire.attach(ddp, optimizer, fidelity="exact" if rank else "close")


def test_ranks_that_were_given_other_classes_are_told_when_they_attach() -> None:
    for outcome in try_ranks(other_options, 2):
        assert isinstance(outcome.error, RankMismatch)
        assert "options" in str(outcome.error)


def overflows(rank: int, world_size: int) -> tuple[list[str], torch.Tensor]:
    ddp, optimizer = build(rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    auto = Quick(rank, {"one-bit": 3.0}, fidelity=["one-bit"])
    attachment = gradwire.attach(ddp, optimizer, auto, scaler)
    generator = torch.Generator().manual_seed(rank)
    for step in range(60):
        optimizer.zero_grad()
        loss = ddp(torch.randn(8, 20, generator=generator)).square().mean()
        if step % 13 == 5 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    found = attachment.stats()["auto"]["scheme"]
    attachment.close()
    return [found], flat(ddp)


def test_overflows_under_amp_neither_stop_it_nor_part_the_ranks() -> None:
    (first, parameters), (second, others) = run_ranks(overflows, 2)
    assert first == second == ["one-bit"]
    assert torch.equal(parameters, others)
    assert bool(parameters.isfinite().all())


def a_hook_of_ones_own(rank: int, world_size: int) -> str:
    ddp, optimizer = build(rank)
    attachment = gradwire.attach(ddp, optimizer, Quick(rank, {"one-bit": 3.0}, fidelity=["one-bit"]))
    ddp.register_comm_hook(None, as_ddp)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(20):
        step_once(ddp, optimizer, generator)
    why = attachment.stats()["auto"]["stays_plain"]
    attachment.close()
    return why


def as_ddp(state, bucket):  # type: ignore[no-untyped-def]
    buffer = bucket.buffer().div_(torch.distributed.get_world_size())
    return torch.distributed.all_reduce(buffer, async_op=True).get_future().then(lambda f: f.value()[0])


def test_where_another_hook_comes_first_it_stays_plain_and_says_so() -> None:
    assert all("communication hook already" in why for why in run_ranks(a_hook_of_ones_own, 2))


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
