"""exempt= and only=: what is named travels plainly, by name, in quantising and low-rank schemes alike."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from buckets import Driver
from gradwire import InvalidArgument, schemes
from ranks import run_ranks

SHAPES = [(30, 20), (7,), (40, 30), (9, 8)]


def gradients_of(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(shape, generator=generator) * 10.0**place for place, shape in enumerate(SHAPES)]


def deviations(rank: int, world_size: int, name: str, options: dict[str, Any]) -> list[float]:
    """Of each tensor's result from the mean, of the second of two steps."""
    driver = Driver(schemes.by_name(name, **options), [torch.zeros(shape) for shape in SHAPES], [2, 2])
    for step in range(2):
        results = driver.reduce(gradients_of(rank, step))
    driver.close()
    means = [torch.stack(own).mean(0) for own in zip(gradients_of(0, 1), gradients_of(1, 1), strict=True)]
    return [float((one - mean).norm() / mean.norm()) for one, mean in zip(results, means, strict=True)]


CASES = [
    ("one-bit", {"exempt": "p0+p3"}, {0, 3}),
    ("one-bit", {"exempt": ["p[03]"], "scale_values": 64}, {0, 3}),
    ("two-bit", {"only": "p2"}, {0, 1, 3}),
    ("one-bit", {"exempt": lambda name, shape: len(shape) < 2 or shape[0] == 9}, {1, 3}),
    ("acp-sgd", {"exempt": ["p0"], "rank": 1}, {0, 1}),  # p1 is a vector
    ("power-sgd", {"only": ["p0"], "rank": 1}, {1, 2, 3}),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_what_is_exempt_is_the_mean(case: int) -> None:
    name, options, plain = CASES[case]
    if not callable(options.get("exempt")):
        (found, others) = run_ranks(deviations, 2, name, options)
    else:
        (found, others) = run_ranks(deviate_without_small_ones, 2)
    assert found == others
    for place, deviation in enumerate(found):
        assert deviation < 1e-6 if place in plain else deviation > 0.05, (place, deviation)


def deviate_without_small_ones(rank: int, world_size: int) -> list[float]:
    return deviations(rank, world_size, "one-bit", {"exempt": lambda name, shape: len(shape) < 2 or shape[0] == 9})


def infinite(rank: int, world_size: int) -> list[bool]:
    """Inf in an exempt tensor of one rank: the step's residuals are dropped, as for any other."""
    scheme = schemes.by_name("one-bit", exempt="p1")
    driver = Driver(scheme, [torch.zeros(shape) for shape in SHAPES])
    driver.reduce(gradients_of(rank, 0))
    before = {name: kept.clone() for name, kept in scheme.state_dict()["residuals"].items()}
    gradients = gradients_of(rank, 1)
    if rank == 1:
        gradients[1][3] = math.inf
    results = driver.reduce(gradients)
    after = scheme.state_dict()["residuals"]
    driver.close()
    return [bool(results[1].isfinite().all()), *(torch.equal(before[name], after[name]) for name in before)]


def test_an_exempt_tensor_that_is_not_finite() -> None:
    for is_finite, *unchanged in run_ranks(infinite, 2):
        assert not is_finite
        assert all(unchanged)


def complain(rank: int, world_size: int) -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for name in ("one-bit", "two-bit", "acp-sgd", "power-sgd"):
        with pytest.raises(
            InvalidArgument, match=r"only='tail' matches no tensor; there are 0\.weight, 1\.weight, 1\.bias"
        ):
            gradwire.attach(ddp, optimizer, schemes.by_name(name, only=["tail"]))


def test_names_of_nothing() -> None:
    run_ranks(complain, 1)
    for wrong in (3, [""], [None]):
        with pytest.raises(InvalidArgument, match="exempt takes names"):
            schemes.by_name("one-bit", exempt=wrong)


def compressed_by_acp(rank: int, world_size: int, adam: bool, exempt: Any) -> int:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Embedding(90, 40), nn.Linear(40, 40), nn.Linear(40, 90, bias=False)))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    if adam:
        optimizer = torch.optim.AdamW(ddp.parameters())
    attachment = gradwire.attach(ddp, optimizer, schemes.by_name("acp-sgd", rank=2, exempt=exempt, start_step=0))
    ddp(torch.arange(8)).square().mean().backward()
    n_matrices = attachment.stats()["n_matrices"]
    attachment.close()
    return int(n_matrices)


@pytest.mark.parametrize(("adam", "exempt", "expected"), [(True, None, 1), (True, (), 3), (False, None, 3)])
def test_low_rank_leaves_words_alone_under_adam(adam: bool, exempt: Any, expected: int) -> None:
    assert run_ranks(compressed_by_acp, 2, adam, exempt) == [expected, expected]


def shares_sent(rank: int, world_size: int, per: str) -> list[int]:
    """How many values of each tensor have a result, where one's gradients are a thousandfold the other's."""
    shapes = [(200, 100), (100, 100)]
    driver = Driver(schemes.by_name("dgc", share=0.01, per=per), [torch.zeros(shape) for shape in shapes])
    generator = torch.Generator().manual_seed(rank)
    gradients = [
        torch.randn(shape, generator=generator) * scale for shape, scale in zip(shapes, (1e3, 1.0), strict=True)
    ]
    results = driver.reduce(gradients)
    driver.close()
    return [int((one != 0).sum()) for one in results]


def test_dgc_takes_its_share_of_every_layer_or_of_the_bucket() -> None:
    (by_layer, _), (by_bucket, _) = (run_ranks(shares_sent, 2, per) for per in ("layer", "bucket"))
    assert 2 * 160 <= by_layer[0] <= 2 * 260  # of both ranks, hardly any in common
    assert 2 * 80 <= by_layer[1] <= 2 * 130
    assert by_bucket[1] == 0
