"""Low-rank products and orthogonal factors: the same bits for every thread count and instruction set, and right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from float_messages import assert_same_bytes_everywhere
from gradwire import _native
from gradwire.errors import InvalidArgument

SHAPES = [(1, 1, 1), (1, 1, 9), (1, 7, 1), (2, 3, 5), (4, 64, 16), (5, 67, 33), (32, 300, 129), (40, 40, 41)]


def product(left: torch.Tensor, right: torch.Tensor, start: torch.Tensor | None = None) -> torch.Tensor:
    matrix = torch.empty(left.shape[1], right.shape[1]) if start is None else start.clone()
    _native.multiply_factors(left.view(-1), right.view(-1), left.shape[0], start is not None, matrix.view(-1))
    return matrix


def orthogonal(factors: torch.Tensor) -> torch.Tensor:
    result = factors.clone()
    _native.orthogonalise_factors(result.view(-1), factors.shape[0], factors.shape[1])
    return result


def expected_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Component by component in float32, as the kernel promises."""
    total = torch.zeros(left.shape[1], right.shape[1])
    for component in range(left.shape[0]):
        total += left[component][:, None] * right[component][None, :]
    return total


@pytest.mark.parametrize(("rank", "n_rows", "n_columns"), SHAPES)
def test_product_is_summed_in_ascending_order_bit_by_bit(rank: int, n_rows: int, n_columns: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    left = torch.randn(rank, n_rows, generator=generator)
    right = torch.randn(rank, n_columns, generator=generator)
    start = torch.randn(n_rows, n_columns, generator=generator)
    expected = expected_product(left, right)
    (plain, less) = assert_same_bytes_everywhere(lambda: [product(left, right), product(left, right, start)], (1, 3))
    assert torch.equal(plain, expected)
    assert torch.equal(less, start - expected)


@pytest.mark.parametrize(("rank", "n"), [(1, 1), (1, 50), (3, 3), (4, 4), (5, 77), (32, 768), (33, 200)])
@pytest.mark.parametrize("magnitude", [1.0, 1e-30, 1e30, 1e-41])
def test_rows_become_orthonormal_and_keep_their_span(rank: int, n: int, magnitude: float) -> None:
    factors = torch.randn(3, rank, n, generator=torch.Generator().manual_seed(n)) * magnitude
    (first,) = assert_same_bytes_everywhere(lambda: [orthogonal(factors)], (1, 3))
    gram = first.double() @ first.double().mT
    assert torch.allclose(gram, torch.eye(rank, dtype=torch.float64).expand_as(gram), atol=2e-6)
    exact = factors.double() / factors.double().norm()
    residue = exact - exact @ first.double().mT @ first.double()
    assert residue.norm() < (2e-6 if magnitude > 1e-40 else 1e-2)  # subnormals have few bits to begin with


def test_factor_that_is_zero_or_short_of_rank_gives_orthonormal_rows_without_nan() -> None:
    zero = torch.zeros(1, 4, 9)
    assert torch.equal(orthogonal(zero)[0], torch.eye(4, 9))
    row = torch.randn(9, generator=torch.Generator().manual_seed(1))
    for result in (orthogonal(row.expand(1, 4, 9).contiguous()), orthogonal(torch.eye(9)[None, :1].repeat(1, 4, 1))):
        gram = result[0].double() @ result[0].double().T
        assert torch.allclose(gram, torch.eye(4, dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: _native.multiply_factors(torch.ones(4), torch.ones(6), 2, False, torch.ones(5)), "another size"),
        (lambda: _native.multiply_factors(torch.ones(4), torch.ones(6), 0, False, torch.ones(5)), "rank at least 1"),
        (lambda: _native.orthogonalise_factors(torch.ones(6), 1, 3), "1 <= rank <= n"),
    ],
)
def test_sizes_that_do_not_fit_raise_invalid_argument(call: Callable[[], None], match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        call()
