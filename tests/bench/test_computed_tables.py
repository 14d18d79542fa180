"""What is reckoned from shapes is what the library sends: every computed table beside live bytes."""

import pytest
import torch
from torch import nn

from gradwire import schemes
from gradwire_lab.bench.measures import shapes
from ranks import on_ranks
from small_training import Training, sgd

RANK, STEPS = 4, 2  # of ACP-SGD a step for each factor
SPECS = {
    "s_sgd": ("plain", {}),
    "sign_sgd": ("sign-sgd", {}),
    "top_k": ("top-k", {"share": 0.001}),
    "power_sgd": ("power-sgd", {"rank": RANK}),
    "acp_sgd": ("acp-sgd", {"rank": RANK}),
}


def make_model() -> nn.Sequential:
    """Matrices, filters, and a good share of vectors that low rank leaves whole."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64), nn.Flatten(),
        nn.LayerNorm(64 * 16), nn.Linear(64 * 16, 200),
    )  # fmt: skip


def loss(module: nn.Module, rank: int, step: int) -> torch.Tensor:
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(10 * rank + step))
    return module(images).square().mean()


@on_ranks([2, 3])
def test_traffic_from_shapes_is_what_a_rank_sends(rank: int, world_size: int) -> None:
    """ACP-SGD's Tables I and II: the same sums give both."""
    reckoned = shapes.megabytes_of(shapes.sums_of(shapes.sizes_of_model(make_model(), RANK)), world_size)
    for method, (name, options) in SPECS.items():
        scheme = schemes.by_name(name, **schemes.as_published(name, options))
        training = Training(rank, scheme, sgd, make_model, loss, {"bucket_cap_mb": 25}).after(range(STEPS))
        n_bytes = training.close()["bytes_sent"] / STEPS
        # What is above: the headers of messages, and what ranks agree on beside the step.
        assert n_bytes == pytest.approx(1e6 * reckoned[method], rel=0.005, abs=100 * world_size), method


def test_ratios_are_those_of_the_traffic() -> None:
    for workload in ("resnet50", "resnet152"):
        (ratios,), traffic = shapes.describe_ratios(workload), shapes.describe_traffic(workload)
        for method in ("power_sgd", "acp_sgd"):
            for row in traffic:
                assert row["s_sgd"] / row[method] == pytest.approx(ratios[method])
    assert shapes.describe_ratios("resnet50")[0]["power_sgd"] == pytest.approx(66.5, abs=0.1), "the paper: 67"
    assert shapes.describe_ratios("resnet152")[0]["power_sgd"] == pytest.approx(52.9, abs=0.1), "the paper: 53"
