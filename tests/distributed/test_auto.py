"""attach(ddp, optimizer): watching, trying, switching, and loops of every kind."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from auto_cases import Quick, build, flat, step_once, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.schemes.auto.scheme import Auto
from ranks import run_ranks

THROUGH_ALL = [
    "gcomp:importance=uniform,bits=12",
    "one-bit",
    "terngrad",
    "qsgd",
    "bf16",
    "two-bit",
    "embedded-float:bits=8",
]


def everyother(names: list[str], every: int) -> list[tuple[int, str]]:
    order = ["plain", *names]
    return [(step, order[step // every % len(order)]) for step in range(0, 200, every)]


# ---- watching


def watched_beside_ddp(rank: int, world_size: int) -> tuple[bool, bool, dict[str, Any]]:
    alone, _, _ = train(rank, 12)
    watched, stats, has_hook = train(rank, 12, Auto(replay=[(0, "plain")]))
    return torch.equal(alone, watched), has_hook, stats


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_where_nothing_is_tried_ddp_is_untouched_and_every_step_is_counted(world_size: int) -> None:
    for equal, has_hook, stats in run_ranks(watched_beside_ddp, world_size):
        assert equal
        assert not has_hook
        assert stats["n_steps"] == 12
        assert stats["auto"]["scheme"] == "plain"
        assert stats["ratio"] == 1.0


def late_hook(rank: int, world_size: int, static_graph: bool) -> tuple[bool, bool]:
    """The hook comes at step 5 for one compressed step; from then on it does what DDP does."""
    schedule = [(0, "plain"), (5, "gcomp:importance=none"), (6, "plain")]
    options = {"static_graph": True} if static_graph else {}
    watched, _, has_hook = train(rank, 12, Auto(fidelity=["gcomp:importance=none"], replay=schedule), **options)
    alone, _, _ = train(rank, 12, **options)
    return bool((watched - alone).abs().max() < 1e-6), has_hook


@pytest.mark.parametrize("static_graph", [False, True])
def test_a_hook_may_come_late(static_graph: bool) -> None:
    assert run_ranks(late_hook, 2, static_graph) == [(True, True)] * 2


def plain_with_late_hook(rank: int, world_size: int) -> bool:
    ddp, optimizer = build(rank)
    attachment = gradwire.attach(ddp, optimizer, Auto(replay=[(0, "plain")]))
    generator = torch.Generator().manual_seed(rank)
    for step in range(12):
        if step == 5:
            attachment._door.register()
        step_once(ddp, optimizer, generator)
    attachment.close()
    return torch.equal(flat(ddp), train(rank, 12)[0])


def test_plain_through_a_late_hook_has_the_bits_of_ddp() -> None:
    assert all(run_ranks(plain_with_late_hook, 3))


# ---- switching


def through_all_schemes(rank: int, world_size: int) -> tuple[torch.Tensor, list[Any]]:
    parameters, stats, _ = train(rank, 48, Auto(fidelity=THROUGH_ALL, replay=everyother(THROUGH_ALL, 3)))
    return parameters, stats["auto"]["schedule"]


def test_ranks_stay_equal_through_every_scheme_and_replay_repeats_to_the_bit() -> None:
    first, second = run_ranks(through_all_schemes, 3), run_ranks(through_all_schemes, 3)
    assert all(torch.equal(first[0][0], parameters) for parameters, _ in [*first, *second])
    assert [name for _, name in first[0][1]][:8] == ["plain", *THROUGH_ALL]


def with_noisy_clocks(rank: int, world_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
    auto = Quick(rank, {"one-bit": 3.0, "qsgd": 1.5, "bf16": 0.5}, fidelity=["one-bit", "qsgd", "bf16"])
    parameters, stats, _ = train(rank, 150, auto)
    return parameters, stats["auto"]


def test_ranks_with_clocks_that_differ_decide_alike_and_end_with_the_fastest() -> None:
    results = run_ranks(with_noisy_clocks, 3)
    parameters, auto = results[0]
    assert auto["scheme"] == "one-bit"
    kinds = [decision["kind"] for decision in auto["decisions"]]
    assert "try" in kinds
    assert "switch" in kinds
    assert all("ms a step" in decision["why"] for decision in auto["decisions"])
    for other, others in results[1:]:
        assert torch.equal(other, parameters)
        assert others["schedule"] == auto["schedule"]
        assert others["decisions"] == auto["decisions"]


def adam_waits(rank: int, world_size: int) -> list[Any]:
    ddp, _ = build(rank)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    auto = Quick(rank, {"one-bit": 3.0}, fidelity=["one-bit"])
    attachment = gradwire.attach(ddp, optimizer, auto)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(130):
        step_once(ddp, optimizer, generator)
    schedule = attachment.stats()["auto"]["schedule"]
    attachment.close()
    return schedule


def test_under_adam_error_feedback_waits_a_hundred_steps() -> None:
    schedule = run_ranks(adam_waits, 2)[0]
    assert schedule[0] == (0, "plain")
    assert schedule[1][0] >= 100
    assert schedule[1][1] == "one-bit"


# ---- residuals


def conserved(rank: int, world_size: int) -> tuple[float, float]:
    """The sum of what was applied and what is left is the sum of all gradients, over twenty changes of scheme."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(64, 32, bias=False))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    names = ["one-bit", "two-bit"]
    order = ["one-bit", "plain", "two-bit", "one-bit", "two-bit", "plain"]
    schedule = [(step, order[step // 4 % len(order)]) for step in range(0, 84, 4)]
    attachment = gradwire.attach(ddp, optimizer, Auto(fidelity=names, replay=schedule))
    generator = torch.Generator().manual_seed(rank)
    given, applied = (torch.zeros(32, 64, dtype=torch.float64) for _ in range(2))
    for _ in range(84):
        inputs = torch.randn(4, 64, generator=generator)
        weights = torch.randn(4, 32, generator=generator)
        optimizer.zero_grad(set_to_none=True)
        (ddp(inputs) * weights).sum().backward()
        given += (weights.T @ inputs).double()
        applied += ddp.module.weight.grad.double()
        optimizer.step()
    left = attachment.communicator.submit(attachment.scheme.take_residuals).wait()
    attachment.close()
    rest = next(iter(left.values())).view(32, 64).double() if left else torch.zeros(32, 64, dtype=torch.float64)
    total = given - rest
    torch.distributed.all_reduce(total)
    difference = (total / world_size - applied).abs().max()
    return float(difference), float(rest.abs().max())


def test_what_one_scheme_has_not_sent_the_next_one_does() -> None:
    for difference, rest in run_ranks(conserved, 2):
        assert difference < 1e-3
        assert rest > 1e-2


# ---- in loops of every kind


def accumulates(rank: int, world_size: int) -> tuple[bool, int, int]:
    def run(attached: bool) -> tuple[torch.Tensor, Any]:
        ddp, optimizer = build(rank)
        attachment = gradwire.attach(ddp, optimizer, Auto(replay=[(0, "plain")])) if attached else None
        generator = torch.Generator().manual_seed(rank)
        for _ in range(5):
            optimizer.zero_grad()
            for micro in range(3):
                with contextlib.nullcontext() if micro == 2 else ddp.no_sync():
                    ddp(torch.randn(8, 20, generator=generator)).square().mean().backward()
            optimizer.step()
        stats = attachment.stats() if attachment else None
        if attachment:
            attachment.close()
        return flat(ddp), stats

    (alone, _), (watched, stats) = run(False), run(True)
    return torch.equal(alone, watched), stats["n_steps"], stats["auto"]["state"] == "baseline"


def test_accumulation_without_synchronising_is_one_step() -> None:
    assert run_ranks(accumulates, 2)[0][:2] == (True, 5)


def evaluates_unevenly(rank: int, world_size: int) -> int:
    ddp, optimizer = build(rank)
    attachment = gradwire.attach(ddp, optimizer, Quick(rank, {"one-bit": 3.0}, fidelity=["one-bit"]))
    generator = torch.Generator().manual_seed(rank)
    for step in range(40):
        step_once(ddp, optimizer, generator)
        if rank == 0 and step % 3 == 0:
            with torch.no_grad():
                ddp.module(torch.zeros(1, 20))
            ddp.module(torch.zeros(1, 20))  # with gradients that nobody asks for
    n_steps = attachment.stats()["n_steps"]
    attachment.close()
    return n_steps


def test_a_rank_that_evaluates_alone_counts_no_steps() -> None:
    assert run_ranks(evaluates_unevenly, 2) == [40, 40]


def joins(rank: int, world_size: int, gain: float) -> tuple[int, torch.Tensor]:
    ddp, _ = build(rank)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)  # DDP gives parameters to those that ran out, and no momentum
    attachment = gradwire.attach(ddp, optimizer, Quick(rank, {"one-bit": gain}, fidelity=["one-bit"]))
    generator = torch.Generator().manual_seed(rank)
    for _ in range(40):
        step_once(ddp, optimizer, generator)
    for _ in range(3):
        with ddp.join():
            for _ in range(6 + 2 * rank):
                step_once(ddp, optimizer, generator)
    for _ in range(4):
        step_once(ddp, optimizer, generator)
    attachment.switch("gcomp")
    for _ in range(4):
        step_once(ddp, optimizer, generator)
    step = attachment.step
    attachment.close()
    return step, flat(ddp)


@pytest.mark.parametrize("gain", [3.0, 0.5])
def test_uneven_input_keeps_what_was_at_work_and_ranks_equal(gain: float) -> None:
    (step, parameters), (other_step, others) = run_ranks(joins, 2, gain)
    assert step == other_step
    assert torch.equal(parameters, others)


def resumes(rank: int, world_size: int) -> tuple[str, str, bool]:
    def start() -> tuple[Any, Any, Any]:
        ddp, optimizer = build(rank)
        auto = Quick(rank, {"one-bit": 3.0}, fidelity=["one-bit"])
        return ddp, optimizer, gradwire.attach(ddp, optimizer, auto)

    ddp, optimizer, attachment = start()
    generator = torch.Generator().manual_seed(rank)
    for _ in range(60):
        step_once(ddp, optimizer, generator)
    saved, weights = attachment.state_dict(), {k: v.clone() for k, v in ddp.module.state_dict().items()}
    kept = attachment.session.feedback.state_by_name(attachment.session.slots)
    attachment.close()
    ddp, optimizer, attachment = start()
    ddp.module.load_state_dict(weights)
    attachment.load_state_dict(saved)
    loaded = attachment.session.feedback.state_by_name(attachment.session.slots)
    step_once(ddp, optimizer, generator)
    first = attachment.stats()["auto"]["schedule"][0][1]
    for _ in range(20):
        step_once(ddp, optimizer, generator)
    then = attachment.stats()["auto"]["scheme"]
    attachment.close()
    return first, then, all(torch.equal(kept[name], loaded[name]) for name in kept)


def test_a_resumed_run_begins_with_the_scheme_and_the_residuals_that_it_had() -> None:
    assert run_ranks(resumes, 2) == [("one-bit", "one-bit", True)] * 2


def two_models(rank: int, world_size: int) -> tuple[str, str]:
    pairs = [build(rank), build(rank)]
    attachments = [
        gradwire.attach(*pairs[0], Quick(rank, {"one-bit": 3.0}, fidelity=["one-bit"])),
        gradwire.attach(*pairs[1], Quick(rank, {"one-bit": 0.5}, fidelity=["one-bit"])),
    ]
    generator = torch.Generator().manual_seed(rank)
    for _ in range(50):
        for ddp, optimizer in pairs:
            step_once(ddp, optimizer, generator)
    found = [attachment.stats()["auto"]["scheme"] for attachment in attachments]
    for attachment in attachments:
        attachment.close()
    return found[0], found[1]


def test_two_attachments_decide_each_for_itself() -> None:
    assert run_ranks(two_models, 2) == [("one-bit", "plain")] * 2
