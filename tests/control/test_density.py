"""Zeros in gradients: how many there are, what they do to a prediction, and that ranks agree on it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradwire.schemes.auto.costs import CodecCost, CostProfile, LinkCost, SharedCores, density_of
from gradwire.schemes.auto.fidelity import rows_for
from gradwire.schemes.auto.law import Candidate, most_promising
from ranks import on_ranks
from small_training import Training


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


@pytest.mark.parametrize(
    ("density", "best"),
    [(0.01, "homomorphic"), (0.05, "gcomp:tolerance=32,least_bits=7"), (1.0, "gcomp:tolerance=32,least_bits=7")],
)
def test_packed_sums_are_tried_where_next_to_nothing_is_not_zero(density: float, best: str) -> None:
    rows = rows_for("exact", {"adam"})
    found = CostProfile(
        SharedCores(2, 1, 1),
        LinkCost(1e6, 1e-4, 1e-4, 1e-4, 1e-4),
        {row.spec: CodecCost(0, 0, row.bits, zero_bits=row.zero_bits, densest=row.densest) for row in rows},
        {row.spec: row.shape for row in rows},
        (4_000_000,),
        density,
    ).predict_us(1_000)
    assert min(found, key=lambda spec: found[spec]) == best
    # Nor is it for curiosity, which a race costs little to satisfy.
    candidates = [Candidate("homomorphic", found["homomorphic"])]
    tried = most_promising(candidates, 10, found["plain"], allowed_us=20 * found["plain"], floor_us=1_000)
    assert (tried is not None) == (density < 0.1)


def embedding() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(4_000, 16), nn.Flatten(), nn.Linear(64, 1))


def sum_of_rows(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    return module(torch.arange(40 * step, 40 * step + 40).view(10, 4) + 1_000 * rank).sum()


@on_ranks(2)
def test_ranks_agree_on_what_they_saw(rank: int, world_size: int) -> float:
    training = Training(rank, "auto", model=embedding, loss=sum_of_rows, ddp={"bucket_cap_mb": 25})
    training.take_steps(range(6))
    density: float = training.attachment.scheme._profile.density
    training.close()
    assert 0.005 <= density <= 0.05, "80 rows of 4,000, and the last layer"
    return density
