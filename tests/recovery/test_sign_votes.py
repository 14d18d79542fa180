"""Sign words and their majority against a count of signs in torch."""

import pytest
import torch

from float_messages import DTYPES
from gradwire.codecs.signs import Signs


def pack(values: torch.Tensor) -> tuple[torch.Tensor, bool]:
    words = torch.empty(Signs.n_words(values), dtype=torch.int32)
    return words, bool(Signs(False).pack(values, words))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 1_000, 300_001])
@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4, 7])
def test_majority_is_the_sign_of_the_sum_of_signs(dtype: torch.dtype, n: int, n_ranks: int) -> None:
    gradients = torch.randn(n_ranks, n, generator=torch.Generator().manual_seed(n)).to(dtype)
    gradients[:, ::5] = 0.0
    gradients[:, 1::5] *= -0.0
    packed = [pack(gradient) for gradient in gradients]
    assert all(finite for _, finite in packed)
    # Below zero counts as -1, everything else (both zeros too) as +1.
    signs = torch.where(gradients.float() < 0, -1, 1).sum(0).sign()
    for ties_are_positive in (False, True):
        votes = torch.full((n,), 9.0, dtype=dtype)
        Signs(ties_are_positive).vote(torch.stack([words for words, _ in packed]), votes, 2.0)
        expected = torch.where(signs == 0, int(ties_are_positive), signs)
        assert torch.equal(votes.float(), 2.0 * expected.float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at", [0, 37, 63, 64, 99])
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_inf_and_nan_are_reported_wherever_they_stand(dtype: torch.dtype, at: int, bad: float) -> None:
    values = torch.ones(100, dtype=dtype)
    assert pack(values)[1]
    values[at] = bad
    assert not pack(values)[1]


def test_many_ranks_are_counted_without_overflow() -> None:
    words, votes = torch.zeros(255, 2, dtype=torch.int32), torch.empty(64)
    words[:128] = -1
    Signs(False).vote(words, votes, 1.0)
    assert torch.equal(votes, torch.full((64,), -1.0))
