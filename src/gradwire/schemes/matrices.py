"""Matrices and their factors: the shape a parameter has as one, the rank up to which it pays, and products of factors."""

import hashlib
import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gradwire import _native
from gradwire.codecs.tensors import dtype_code
from gradwire.core.bucket import Slot
from gradwire.gpu.kernels import Kernels
from gradwire.gpu.launching import THREADS, fill_struct, grid


class MatrixShape(NamedTuple):
    """A parameter as a matrix, first dimension by the rest, and the rank it is approximated with."""

    n_rows: int
    n_columns: int
    rank: int


def matrix_shape(
    parameter: Slot | Tensor, rank: int, min_compression_rate: float, n_factors: int = 2
) -> MatrixShape | None:
    """The matrix that `parameter` is compressed as, or None if it travels as it is: if the rate is too small, which is n m /
    what a step sends of it: both factors of (n + m) r, as in PyTorch's powerSGD_hook, or one, half of that."""
    highest = highest_rank(parameter, min_compression_rate, n_factors)
    if highest == 0:
        return None
    n_rows, n_columns = parameter.shape[0], parameter.numel() // parameter.shape[0]
    rank = min(rank, n_rows, n_columns)
    return MatrixShape(n_rows, n_columns, rank) if rank <= highest else None


def highest_rank(parameter: Slot | Tensor, min_compression_rate: float, n_factors: int) -> float:
    """The rank up to which `parameter` is compressed; 0 for what is no matrix."""
    if parameter.dim() < 2 or parameter.numel() == 0:
        return 0
    n_sent = (parameter.shape[0] + parameter.numel() // parameter.shape[0]) * n_factors / 2
    return parameter.numel() / (min_compression_rate * n_sent) if min_compression_rate else math.inf


# ---- factors, each (rank, n): with the same bits on every machine, by the native core or, if given, kernels


def draw_factor(seed: int, key: str, step: int, rank: int, length: int) -> Tensor:
    """(rank, length) float32 from N(0, 1), the same on every rank: from what all ranks share alone."""
    digest = hashlib.blake2b(repr((seed, key, step, rank, length)).encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    return torch.from_numpy(generator.standard_normal((rank, length), dtype=np.float32))


def multiply(
    kernels: Kernels | None, left: Tensor, right: Tensor, out: Iterable[Tensor], subtract: bool = False
) -> None:
    """Each of `out` (n, m) = left^T right, of (k, rank, n) and (k, rank, m) float32, rounded to its dtype; or, of float32,
    out -= that."""
    for one, other, matrix in zip(left, right, out, strict=True):
        if kernels is None:
            is_direct = matrix.dtype == torch.float32
            product = matrix if is_direct else torch.empty(matrix.shape, dtype=torch.float32, device="cpu")
            _native.multiply_factors(one.view(-1), other.view(-1), one.shape[0], subtract, product.view(-1))
            if product is not matrix:
                matrix.copy_(product)
            continue
        parameters = fill_struct(
            "MultiplyFactors", left=one, right=other, matrix=matrix, n_rows=matrix.shape[0], n_columns=matrix.shape[1],
            rank=one.shape[0], dtype=dtype_code(matrix.dtype), subtracts=subtract,
        )  # fmt: skip
        kernels.launch("gw_multiply_factors", grid(matrix.numel()), THREADS, 0, parameters)


def orthogonalise(kernels: Kernels | None, factors: Tensor) -> None:
    """Make the rows of each of `factors` (k, rank, n), rank at most n, orthonormal, in place."""
    n_factors, rank, n = factors.shape
    if kernels is None:
        _native.orthogonalise_factors(factors.view(-1), n_factors, rank)
        return
    parameters = fill_struct("OrthogonaliseFactors", factors=factors, n=n, rank=rank)
    kernels.launch("gw_orthogonalise_factors", n_factors, THREADS, 4 * (2 + rank), parameters)


def checksum(factors: Tensor, before: int) -> int:
    """32 bits of `factors` and of `before`, for ranks to compare; waits for a device's current stream."""
    if factors.device.type == "cpu":
        return _native.crc32c(factors.view(-1).view(torch.uint8), before)
    words = factors.view(-1).view(torch.int32)
    return (31 * before + int(words.sum(dtype=torch.int64))) & 0xFFFFFFFF
