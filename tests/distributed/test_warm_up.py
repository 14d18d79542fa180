"""Plain first steps of one-bit and two-bit: as many as told, then compressed, on all ranks alike."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

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


def test_plain_steps_count_as_settling_and_none_is_the_default() -> None:
    for name in ("one-bit", "two-bit"):
        told, default = schemes.by_name(name, warmup_steps=7), schemes.by_name(name)
        assert (told.settling_steps, told.is_settled) == (7, False)
        assert (default.settling_steps, default.is_settled) == (0, True)
        assert told.configuration["warmup_steps"] == 7, "ranks must agree on it"


def end_early(rank: int, world_size: int) -> list[str]:
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("gradwire.schemes.quantised")
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


def words_beside(rank: int, world_size: int, name: str, options: dict[str, Any], optimizer: str) -> list[str]:
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire.schemes.quantised").addHandler(handler)
    parameter = torch.nn.Parameter(torch.zeros(N))
    stepping = getattr(torch.optim, optimizer)([parameter], lr=0.1)
    gradwire.Reducer(schemes.by_name(name, **options), names={"weight": parameter}, optimizer=stepping).close()
    return texts


@pytest.mark.parametrize("name", ["one-bit", "two-bit"])
def test_what_adam_loses_is_said_once_where_steps_are_compressed_from_the_first(name: str) -> None:
    first, other = run_ranks(words_beside, 2, name, {}, "AdamW")
    assert len(first) == 1
    assert f"{name} beside AdamW" in first[0]
    assert 'fidelity="close"' in first[0]
    assert other == []
    assert run_ranks(words_beside, 1, name, {"warmup_steps": 9}, "AdamW") == [[]]
    assert run_ranks(words_beside, 1, name, {}, "SGD") == [[]]


@pytest.mark.parametrize("wrong", [-1, 1.5, True, None, "50"])
def test_what_is_no_count_is_refused(wrong: Any) -> None:
    for name in ("one-bit", "two-bit"):
        with pytest.raises(InvalidArgument, match="warmup_steps"):
            schemes.by_name(name, warmup_steps=wrong)
