"""A bucket that was sent again uncompressed, in a step that ends well: nothing is lost, and nothing is sent twice."""

from __future__ import annotations

import pytest
import torch

from buckets import Driver
from gradwire import schemes
from ranks import run_ranks

N = 600


def overflow_once(rank: int, world_size: int, name: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(what the ranks gave of the second bucket, what came back and stays behind, buckets redone); means over the ranks.

    The first bucket's sum is too large for float32 in step 1, and its mean is not: the step is good.
    """
    scheme = schemes.by_name(name, **schemes.as_published(name, {}))
    driver = Driver(scheme, [torch.zeros(N), torch.zeros(N)], [1, 1])
    given, returned = torch.zeros(N), torch.zeros(N)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        first, second = torch.randn(N, generator=generator), torch.randn(N, generator=generator)
        if step == 1:
            first.fill_(3e38)
        results = driver.reduce([first, second])
        if step == 1:
            assert torch.equal(results[0], torch.full((N,), 3e38)), "the plain mean"
        given += second
        returned += results[1]
    left = scheme.session.feedback.state_by_name(scheme.session.slots)["p1"].view(-1)
    kept = driver.communicator.all_gather(torch.cat([given, left])).view(world_size, 2, N).mean(0)
    redone = scheme.stats()["n_buckets_redone"]
    driver.close()
    return kept[0], returned + kept[1], redone


@pytest.mark.parametrize("name", ["random-k", "one-bit"])
def test_other_buckets_of_the_step_count_once(name: str) -> None:
    for given, found, redone in run_ranks(overflow_once, 2, name):
        assert redone == 1
        torch.testing.assert_close(found, given, atol=1e-4, rtol=0)
