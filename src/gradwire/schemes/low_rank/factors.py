"""Factors: how they are drawn, and what each rank computes from them for itself, with the same bits on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from gradwire import _native


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


class Factors(Protocol):
    """What each rank computes for itself from factors: the same bits on every machine."""

    device: torch.device

    def multiply(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, subtract: bool = False) -> None:
        """out (n, m) = left^T right, rounded to its dtype, or out -= that; left (rank, n) and right (rank, m) float32."""

    def orthogonalise(self, factors: torch.Tensor) -> None:
        """Make the rows of each factor in (k, rank, n) orthonormal, in place."""

    def checksum(self, factors: torch.Tensor, before: int = 0) -> int:
        """32 bits of `factors` and of `before`."""


class HostFactors:
    """`Factors` in host memory."""

    device = torch.device("cpu")

    def multiply(self, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, subtract: bool = False) -> None:
        product = out if out.dtype == torch.float32 else torch.empty(out.shape)
        _native.multiply_factors(left.view(-1), right.view(-1), left.shape[0], subtract, product.view(-1))
        if product is not out:
            out.copy_(product)

    def orthogonalise(self, factors: torch.Tensor) -> None:
        _native.orthogonalise_factors(factors.view(-1), factors.shape[0], factors.shape[1])

    def checksum(self, factors: torch.Tensor, before: int = 0) -> int:
        return _native.crc32c(factors.view(-1).view(torch.uint8), before)
