"""Factors: how they are drawn, and what each rank computes from them for itself, with the same bits on every machine.

In host memory, or on a device, enqueued on the current stream.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from gradwire import _native
from gradwire.codecs.tensors import dtype_code
from gradwire.gpu.kernels import kernels_for
from gradwire.gpu.launching import THREADS, grid
from gradwire.gpu.structs import fill_struct


def draw_factor(seed: int, key: str, step: int, rank: int, length: int) -> torch.Tensor:
    """(rank, length) float32 from N(0, 1), the same on every rank: from what all ranks share alone."""
    digest = hashlib.blake2b(repr((seed, key, step, rank, length)).encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    return torch.from_numpy(generator.standard_normal((rank, length), dtype=np.float32))


def redraw_factors(factors: torch.Tensor, keys: Sequence[str], seed: int, step: int, only_zero: bool) -> None:
    """Draw the factors (k, rank, n) anew, or only those that are zero: they would stay so, whatever the gradients."""
    are_kept = factors.flatten(1).any(1).tolist() if only_zero else [False] * len(keys)
    for factor, key, is_kept in zip(factors, keys, are_kept, strict=True):
        if not is_kept:
            factor.copy_(draw_factor(seed, key, step, *factor.shape))


def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, subtract: bool = False) -> None:
    """out (n, m) = left^T right, rounded to its dtype; or, of float32, out -= that.

    Args: left, right: (rank, n), (rank, m) float32.
    """
    kernels = kernels_for(out.device)
    if kernels is None:
        product = out if out.dtype == torch.float32 else torch.empty(out.shape, dtype=torch.float32, device="cpu")
        _native.multiply_factors(left.view(-1), right.view(-1), left.shape[0], subtract, product.view(-1))
        if product is not out:
            out.copy_(product)
        return
    parameters = fill_struct(
        "MultiplyFactors",
        left=left,
        right=right,
        matrix=out,
        n_rows=out.shape[0],
        n_columns=out.shape[1],
        rank=left.shape[0],
        dtype=dtype_code(out.dtype),
        subtracts=subtract,
    )
    kernels.launch("gw_multiply_factors", grid(out.numel()), THREADS, 0, parameters)


def orthogonalise(factors: torch.Tensor) -> None:
    """Make the rows of each of `factors` (k, rank, n), rank at most n, orthonormal, in place."""
    n_factors, rank, n = factors.shape
    kernels = kernels_for(factors.device)
    if kernels is None:
        _native.orthogonalise_factors(factors.view(-1), n_factors, rank)
        return
    parameters = fill_struct("OrthogonaliseFactors", factors=factors, n=n, rank=rank)
    kernels.launch("gw_orthogonalise_factors", n_factors, THREADS, 4 * (2 + rank), parameters)


def checksum(factors: torch.Tensor, before: int = 0) -> int:
    """32 bits of `factors` and of `before`, for ranks to compare; waits for a device's current stream."""
    if kernels_for(factors.device) is None:
        return _native.crc32c(factors.view(-1).view(torch.uint8), before)
    words = factors.view(-1).view(torch.int32)
    return (31 * before + int(words.sum(dtype=torch.int64))) & 0xFFFFFFFF
