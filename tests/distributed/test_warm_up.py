"""Plain first steps of one-bit and two-bit: as many as told, then compressed, on all ranks alike."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradwire
from buckets import Driver
from gradwire import InvalidArgument, schemes
from ranks import run_ranks

N = 1_000


def gradient_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(100 * rank + step))


def reduce_five(rank: int, world_size: int, name: str) -> list[torch.Tensor]:
    driver = Driver(schemes.by_name(name, warmup_steps=3), [torch.zeros(N)])
    means = [driver.reduce([gradient_of(rank, step)])[0].clone() for step in range(5)]
    driver.close()
    return means


@pytest.mark.parametrize("name", ["one-bit", "two-bit"])
def test_the_first_steps_are_the_mean_and_the_others_are_compressed(name: str) -> None:
    of_ranks = run_ranks(reduce_five, 2, name)
    for step, means in enumerate(zip(*of_ranks, strict=True)):
        assert torch.equal(means[0], means[1])
        mean = (gradient_of(0, step).double() + gradient_of(1, step).double()) / 2
        distance = float((means[0].double() - mean).norm() / mean.norm())
        assert distance < 1e-6 if step < 3 else distance > 0.1, (step, distance)


def test_plain_steps_count_as_settling_and_without_an_optimizer_there_are_none() -> None:
    for name in ("one-bit", "two-bit"):
        told, default = schemes.by_name(name, warmup_steps=7), schemes.by_name(name)
        assert (told.settling_steps, told.is_settled) == (7, False)
        assert (default.settling_steps, default.is_settled) == (0, True)
        assert told.configuration["warmup_steps"] == 7, "ranks must agree on it"


def end_early(rank: int, world_size: int) -> list[str]:
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("gradwire.schemes.selective")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    driver = Driver(schemes.by_name("one-bit", warmup_steps=9), [torch.zeros(N)])
    driver.reduce([gradient_of(rank, 0)])
    driver.close()
    return texts


def test_the_log_names_the_warm_up_and_a_training_that_ended_within() -> None:
    (texts,) = run_ranks(end_early, 1)
    assert "steps before 9 are reduced plainly" in texts[0]
    assert "nothing was compressed" in texts[1]


Beside = tuple[dict[str, Any], list[str], int]


def beside(rank: int, world_size: int, name: str, options: dict[str, Any], optimizer: str) -> Beside:
    """What is chosen beside an optimizer, what the log says of it, and what a bind beside another chooses afterwards."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire.schemes.few_bits").addHandler(handler)
    parameter = torch.nn.Parameter(torch.zeros(N))
    stepping = getattr(torch.optim, optimizer)([parameter], lr=0.1)
    scheme = schemes.by_name(name, **options)
    gradwire.Reducer(scheme, names={"weight": parameter}, optimizer=stepping).close()
    chosen = {key: scheme.configuration.get(key) for key in ("warmup_steps", "scale_values")}
    gradwire.Reducer(scheme, names={"weight": parameter}, optimizer=torch.optim.SGD([parameter], lr=0.1)).close()
    return chosen, texts, scheme.settling_steps


@pytest.mark.parametrize("name", ["one-bit", "two-bit"])
def test_the_optimizer_chooses_what_was_left_out_and_one_rank_says_so(name: str) -> None:
    for_adam, published = {"warmup_steps": 50, "scale_values": 512}, {"warmup_steps": None, "scale_values": None}
    first, other = run_ranks(beside, 2, name, {}, "AdamW")
    assert (first[0], other[0], other[1]) == (for_adam, for_adam, [])
    (text,) = first[1]
    assert f"{name} beside AdamW: warmup_steps=50, scale_values=512" in text
    assert 'fidelity="close"' in text
    assert first[2] == 0, "bound again beside SGD, it is as published"
    assert run_ranks(beside, 1, name, {}, "SGD") == [(published, [], 0)]
    asked = {"warmup_steps": 9, "scale_values": 64}
    assert run_ranks(beside, 1, name, asked, "AdamW") == [(asked, [], 9)]
    assert run_ranks(beside, 1, name, schemes.as_published(name, {}), "AdamW") == [(published, [], 0)]


@pytest.mark.parametrize(("name", "options"), [("one-bit", {"scale": "fixed"}), ("two-bit", {"relative": False})])
def test_one_fixed_scale_stays_one(name: str, options: dict[str, Any]) -> None:
    ((chosen, _, _),) = run_ranks(beside, 1, name, options, "Adam")
    assert chosen == {"warmup_steps": 50, "scale_values": None}


def train(rank: int, steps: range, state: dict[str, Any] | None) -> tuple[torch.Tensor, dict[str, Any]]:
    """A linear model under AdamW, with all defaults of one-bit; without a scheme where `state` is None."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(40, 40))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    attachment = None if state is None else gradwire.attach(ddp, optimizer, "one-bit")
    if attachment is not None and state:
        ddp.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        attachment.load_state_dict(state["gradwire"])
    for step in steps:
        optimizer.zero_grad()
        ddp(gradient_of(rank, step)[:400].view(10, 40)).square().mean().backward()
        optimizer.step()
    saved = {"model": ddp.state_dict(), "optimizer": optimizer.state_dict()}
    weights = ddp.module.weight.detach().clone()
    if attachment is not None:
        saved = copy.deepcopy(saved | {"gradwire": attachment.state_dict()})
        attachment.close()
    return weights, saved


def train_in_parts(rank: int, world_size: int) -> list[torch.Tensor]:
    alone, plain_after = train(rank, range(50), None)[0], train(rank, range(52), None)[0]
    warm, whole = train(rank, range(50), {})[0], train(rank, range(52), {})[0]
    _, state = train(rank, range(30), {})
    return [alone, warm, plain_after, whole, train(rank, range(30, 52), state)[0]]


def test_beside_adam_fifty_steps_are_plain_and_a_resumed_training_counts_on() -> None:
    for alone, warm, plain_after, whole, resumed in run_ranks(train_in_parts, 2):
        assert torch.equal(alone, warm)
        assert not torch.equal(plain_after, whole)
        assert torch.equal(whole, resumed)


def other_optimizers(rank: int, world_size: int) -> str:
    parameter = torch.nn.Parameter(torch.zeros(N))
    optimizer = (torch.optim.SGD if rank else torch.optim.AdamW)([parameter], lr=0.1)
    reducer = gradwire.Reducer("one-bit", names={"weight": parameter}, optimizer=optimizer, timeout_s=20)
    try:
        reducer.all_reduce({"weight": torch.ones(N)}).wait()
    except gradwire.RankMismatch as error:
        return str(error)
    finally:
        reducer.close()
    return ""


def test_ranks_whose_optimizers_choose_otherwise_are_told() -> None:
    for text in run_ranks(other_optimizers, 2):
        assert "configuration" in text


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "50"])
def test_what_is_no_count_is_refused(wrong: Any) -> None:
    for name in ("one-bit", "two-bit"):
        with pytest.raises(InvalidArgument, match="warmup_steps"):
            schemes.by_name(name, warmup_steps=wrong)
