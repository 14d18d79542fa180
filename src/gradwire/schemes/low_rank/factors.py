"""Factors: how they are drawn, and what each rank computes from them for itself, with the same bits on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gradwire import _native
from gradwire.gpu.kernels import kernels_for
from gradwire.gpu.low_rank import DeviceFactors


def draw_factor(seed: int, key: str, step: int, rank: int, length: int) -> Tensor:
    """(rank, length) float32 from N(0, 1), the same on every rank: from what all ranks share alone."""
    digest = hashlib.blake2b(repr((seed, key, step, rank, length)).encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    return torch.from_numpy(generator.standard_normal((rank, length), dtype=np.float32))


def redraw_factors(factors: Tensor, keys: Sequence[str], seed: int, step: int, only_zero: bool) -> None:
    """Draw the factors (k, rank, n) anew, or only those that are zero: they would stay so, whatever the gradients."""
    are_kept = factors.flatten(1).any(1).tolist() if only_zero else [False] * len(keys)
    for factor, key, is_kept in zip(factors, keys, are_kept, strict=True):
        if not is_kept:
            factor.copy_(draw_factor(seed, key, step, *factor.shape))


def multiply(left: Tensor, right: Tensor, out: Tensor, subtract: bool = False) -> None:
    """out (n, m) = left^T right, rounded to its dtype, or out -= that; left (rank, n) and right (rank, m) float32."""
    kernels = kernels_for(out.device)
    if kernels is not None:
        DeviceFactors(kernels).multiply(left, right, out, subtract)
        return
    product = out if out.dtype == torch.float32 else torch.empty(out.shape)
    _native.multiply_factors(left.view(-1), right.view(-1), left.shape[0], subtract, product.view(-1))
    if product is not out:
        out.copy_(product)


def orthogonalise(factors: Tensor) -> None:
    """Make the rows of each factor in (k, rank, n) orthonormal, in place."""
    kernels = kernels_for(factors.device)
    if kernels is not None:
        DeviceFactors(kernels).orthogonalise(factors)
    else:
        _native.orthogonalise_factors(factors.view(-1), factors.shape[0], factors.shape[1])


def checksum(factors: Tensor, before: int = 0) -> int:
    """32 bits of `factors` and of `before`; of those on a device others, for which the host waits."""
    kernels = kernels_for(factors.device)
    if kernels is not None:
        return DeviceFactors(kernels).checksum(factors, before)
    return _native.crc32c(factors.view(-1).view(torch.uint8), before)
