"""Parameters as matrices, first dimension by the rest, and the rank up to which it pays to send factors of them."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from gradwire.core.bucket import Slot


class MatrixShape(NamedTuple):
    """A parameter as a matrix, first dimension by the rest, and the rank it is approximated with."""

    n_rows: int
    n_columns: int
    rank: int


def matrix_shape(
    parameter: Slot | Tensor, rank: int, min_compression_rate: float, n_factors: int = 2
) -> MatrixShape | None:
    """The matrix that `parameter` is compressed as, or None if it travels as it is.

    The rate is n m / what a step sends of it: both factors of (n + m) r, as in PyTorch's powerSGD_hook, or one, half of that.
    """
    n_rows, n_columns = sides_of(parameter)
    rank = min(rank, n_rows, n_columns)
    is_compressed = 0 < rank <= highest_rank(parameter, min_compression_rate, n_factors)
    return MatrixShape(n_rows, n_columns, rank) if is_compressed else None


def sides_of(parameter: Slot | Tensor) -> tuple[int, int]:
    """(rows, columns): the first dimension by the rest."""
    n_rows = parameter.shape[0] if parameter.dim() else 1
    return n_rows, parameter.numel() // max(1, n_rows)


def highest_rank(parameter: Slot | Tensor, min_compression_rate: float, n_factors: int) -> float:
    """The rank up to which `parameter` is compressed; 0 for what is no matrix."""
    if parameter.dim() < 2 or parameter.numel() == 0:
        return 0
    n_sent = sum(sides_of(parameter)) * n_factors / 2
    return parameter.numel() / (min_compression_rate * n_sent) if min_compression_rate else math.inf
