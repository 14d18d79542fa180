"""Zeros in gradients: how many there are, what they do to a prediction, and that ranks agree on it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.schemes.auto.costs import CodecCost, CostProfile, LinkCost, SharedCores, density_of
from ranks import run_ranks


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_a_sample_finds_the_share(share: float) -> None:
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn(shape, generator=generator) for shape in ((50_000, 8), (3,), (0,), (200, 200))]
    for gradient in gradients:
        gradient[torch.rand(gradient.shape, generator=generator) >= share] = 0
    assert density_of([*gradients, None]) == pytest.approx(share, abs=0.03)


def test_rows_of_zeros_are_seen_and_nothing_to_look_at_all_is_dense() -> None:
    embedding = torch.zeros(100_000, 32)
    embedding[:5_000] = 1  # in a run
    assert density_of([embedding]) == pytest.approx(0.05, abs=0.01)
    assert density_of([None, torch.zeros(0), torch.zeros(4, 4).t()[:, :2]]) == 1.0


def profile(density: float) -> CostProfile:
    return CostProfile(
        SharedCores(2, 1, 1),
        LinkCost(1e6, 1e-4, 1e-4, 1e-4, 1e-4),
        {"plain": CodecCost(), "short": CodecCost(bits=8), "long": CodecCost(bits=16, zero_bits=1)},
        {"plain": "sum", "short": "ring", "long": "ring"},
        (100_000,),
        density,
    )


def test_zeros_change_what_is_best() -> None:
    dense, sparse = profile(1.0).predict_us(1_000), profile(0.1).predict_us(1_000)
    assert dense["short"] < dense["long"]
    assert sparse["long"] < sparse["short"] == dense["short"]
    # 2.5 bits a value of 100,000, at a byte a microsecond.
    assert sparse["long"] == pytest.approx(31_250, rel=0.1)
    assert profile(0.1).costs["long"].bits == 0.1 * 16 + 0.9


def test_what_zeros_shorten_is_not_judged_by_its_family_where_there_are_many() -> None:
    dense, sparse = profile(1.0), profile(0.5)
    assert dense.family_of("long") == dense.family_of("short") == sparse.family_of("short") == "ring"
    assert sparse.family_of("long") != "ring"


def test_a_profile_keeps_its_density_and_an_old_one_is_dense() -> None:
    saved = profile(0.25).as_dict()
    assert CostProfile.from_dict(saved) == profile(0.25)
    del saved["density"]
    assert CostProfile.from_dict(saved).density == 1.0


def look_at_gradients(rank: int, world_size: int) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4_000, 16), nn.Flatten(), nn.Linear(64, 1))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    attachment = gradwire.attach(ddp, optimizer)
    for step in range(6):
        optimizer.zero_grad()
        rows = torch.arange(40 * step, 40 * step + 40).view(10, 4) + 1_000 * rank
        ddp(rows).sum().backward()
        optimizer.step()
    scheme = attachment.scheme
    density: float = scheme._profile.density  # type: ignore[attr-defined]
    attachment.close()
    return density


def test_ranks_agree_on_what_they_saw() -> None:
    first, second = run_ranks(look_at_gradients, 2)
    assert first == second
    assert 0.005 <= first <= 0.05, "80 rows of 4,000, and the last layer"
