"""Selection by histogram against an exact sort."""

import pytest
import torch

from gradwire import _native


def select(values: torch.Tensor, k: int) -> torch.Tensor:
    indices = torch.full((k,), -1, dtype=torch.int32)
    assert _native.select_largest(values, indices) == int((~values.isfinite()).sum())
    return indices.long()


def exact(values: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest magnitudes; of equal ones the first: a stable sort keeps their order."""
    return values.abs().sort(descending=True, stable=True).indices[:k].sort().values


GRADIENTS = {
    "normal": lambda g: torch.randn(300_000, generator=g),
    "heavy tails": lambda g: torch.randn(200_000, generator=g) ** 7,
    "few bits": lambda g: torch.randn(250_000, generator=g).to(torch.bfloat16).float(),
    "mostly zero": lambda g: torch.randn(250_000, generator=g) * (torch.rand(250_000, generator=g) < 1e-3),
    "all equal": lambda g: torch.full((200_000,), -0.25),
    "all zero": lambda g: torch.zeros(200_000),
    "subnormal": lambda g: torch.randn(100_000, generator=g) * 1e-42,
    "one": lambda g: torch.ones(1),
    "none": lambda g: torch.empty(0),
    "with inf and nan": lambda g: torch.cat(
        [torch.randn(1_000, generator=g), torch.tensor([float("inf"), float("nan"), -float("inf")])]
    ),
}


@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("share", [0.0, 1e-5, 1e-3, 0.1, 0.7, 1.0])
def test_selection_is_that_of_an_exact_sort(kind: str, share: float) -> None:
    values = GRADIENTS[kind](torch.Generator().manual_seed(3))
    k = round(share * values.numel())
    chosen = select(values, k)
    if kind == "with inf and nan":
        assert chosen.unique().numel() == k
        assert set(range(1_000, 1_003)) <= set(chosen.tolist()) or k < 3
    else:
        assert torch.equal(chosen, exact(values, k))
