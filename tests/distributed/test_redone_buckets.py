"""A bucket that was sent again uncompressed, in a step that ends well: nothing is lost, and nothing is sent twice."""

from __future__ import annotations

import math

import pytest
import torch

from buckets import Driver
from gradwire import schemes
from ranks import run_ranks

SHAPE = 20, 30


def overflow_once(rank: int, world_size: int, name: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(what the ranks gave of the second bucket, what came back and stays behind, buckets redone); means over the ranks.

    The first bucket's sum is too large for float32 in step 1, and its mean is not: the step is good.
    """
    options = {"threshold_bytes": 0} if name == "slimgc" else {}
    scheme = schemes.by_name(name, **schemes.as_published(name, options))
    driver = Driver(scheme, [torch.zeros(SHAPE), torch.zeros(SHAPE)], [1, 1])
    given, returned = torch.zeros(SHAPE), torch.zeros(SHAPE)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        first, second = torch.randn(2, *SHAPE, generator=generator)
        if step == 1:
            first.fill_(3e38)
        results = driver.reduce([first, second])
        if step == 1:
            assert torch.equal(results[0], torch.full(SHAPE, 3e38)), "the plain mean"
        given += second
        returned += results[1]
    left = scheme.session.feedback.state_by_name(scheme.session.slots)["p1"].view(SHAPE)
    kept = driver.communicator.all_gather(torch.stack([given, left]).view(-1)).view(world_size, 2, *SHAPE).mean(0)
    redone = scheme.stats()["n_buckets_redone"]
    driver.close()
    return kept[0], returned + kept[1], redone


@pytest.mark.parametrize("name", ["random-k", "one-bit", "slimgc", "acp-sgd", "power-sgd"])
def test_other_buckets_of_the_step_count_once(name: str) -> None:
    for given, found, redone in run_ranks(overflow_once, 2, name):
        assert redone == 1
        torch.testing.assert_close(found, given, atol=1e-4, rtol=0)


def overflow_what_is_kept(rank: int, world_size: int, name: str) -> list[int]:
    """Buckets redone, after each of three steps that begin with an infinite residual."""
    scheme = schemes.by_name(name)
    driver = Driver(scheme, [torch.zeros(SHAPE)])
    feedback = scheme.session.feedback
    feedback.stage(driver.slots[0], torch.full(SHAPE, math.inf))
    feedback.commit()
    redone = []
    for step in range(3):
        driver.reduce([torch.randn(SHAPE, generator=torch.Generator().manual_seed(10 * step + rank))])
        redone.append(scheme.stats()["n_buckets_redone"])
    assert feedback.state_by_name(scheme.session.slots)["p0"].isfinite().all()
    driver.close()
    return redone


@pytest.mark.parametrize("name", ["acp-sgd", "power-sgd"])
def test_a_residual_beyond_float32_costs_one_step(name: str) -> None:
    """The products of a low rank can be larger than what they stand for."""
    assert run_ranks(overflow_what_is_kept, 2, name) == [[1, 1, 1]] * 2
