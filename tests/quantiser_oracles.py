"""The quantisers by their definitions, in numpy; messages are compared with them field by field."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

HEADER_BYTES = 32
GROUP = 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# None, one, odd ones, both sides of groups, blocks and tasks.
LENGTHS = (0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 1_000, 4_095, 4_097, 65_535, 65_537, 140_001)


def philox(counter: np.ndarray, key: int) -> np.ndarray:
    """(n, 4) uint32 of (n, 4) uint32: Philox4x32-10."""
    c = counter.astype(np.uint64)
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        p0, p1 = c[:, 0] * np.uint64(0xD2511F53), c[:, 2] * np.uint64(0xCD9E8D57)
        low, high = np.uint64(0xFFFFFFFF), np.uint64(32)
        c = np.stack(
            [(p1 >> high) ^ c[:, 1] ^ np.uint64(k0), p1 & low, (p0 >> high) ^ c[:, 3] ^ np.uint64(k1), p0 & low], axis=1
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c.astype(np.uint32)


def numbers(seed: int, step: int, n: int) -> np.ndarray:
    """(n,) uint32: what elements 0 to n-1 draw."""
    index = np.arange(n)
    group, q, lane = index // GROUP, index % GROUP // 8, index % 8
    counter = np.zeros((n, 4), np.uint64)
    place = (8 * group + lane).astype(np.uint64)
    counter[:, 0], counter[:, 1] = place & np.uint64(0xFFFFFFFF), place >> np.uint64(32)
    counter[:, 2], counter[:, 3] = step & 0xFFFFFFFF, step >> 32
    words = philox(counter, seed)[index, q // 2]
    return np.where(q % 2, (words << np.uint32(16)) | (words >> np.uint32(16)), words)


def uniform(seed: int, step: int, n: int) -> np.ndarray:
    """(n,) float32 in [0, 1), multiples of 2^-24."""
    return (numbers(seed, step, n) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


def one_bit(x: np.ndarray, scale: str, threshold: float = 0.5) -> np.ndarray:
    """What a one-bit message of `x` (float32) decodes to."""
    negative = x < 0
    wide = x.astype(np.float64)
    if scale == "fixed":
        above = below = threshold
    elif scale == "mean":
        above = below = float(np.abs(wide).mean()) if x.size else 0.0
    else:
        above = float(wide[~negative].mean()) if (~negative).any() else 0.0
        below = float(-wide[negative].mean()) if negative.any() else 0.0
    return np.where(negative, np.float32(-below), np.float32(above)).astype(np.float32)


def two_bit(x: np.ndarray, threshold: float, relative: bool) -> np.ndarray:
    t = np.float32(threshold)
    if relative:
        t = (
            np.float32(float(np.float32(threshold)) * float(np.float32(np.abs(x.astype(np.float64)).mean())))
            if x.size
            else t
        )
    return np.where((x >= t) & (x > 0), t, np.where((x <= -t) & (x < 0), -t, np.float32(0))).astype(np.float32)


def ternary_scale(x: np.ndarray, clip: float) -> np.float32:
    if not x.size:
        return np.float32(0)
    return np.float32(min(float(np.abs(x).max()), clip * np.sqrt(np.square(x.astype(np.float64)).mean())))


def ternary(x: np.ndarray, scale: np.float32, seed: int, step: int) -> np.ndarray:
    """-1, 0, 1"""
    if scale == 0:
        return np.zeros(x.size)
    upper = (numbers(seed, step, x.size) >> np.uint32(8)).astype(np.float32)
    return np.where(upper < np.abs(x) * (np.float32(2.0**24) / scale), np.sign(x), 0)


def qsgd(x: np.ndarray, levels: int, block: int, seed: int, step: int) -> np.ndarray:
    """What a qsgd message of `x` (float32) decodes to."""
    fractions, decoded = uniform(seed, step, x.size), np.zeros(x.size, np.float32)
    for begin in range(0, x.size, block):
        part = x[begin : begin + block]
        wide = float(np.sqrt(np.square(part.astype(np.float64)).sum()))
        if np.float32(wide) < np.float32(2.0**-100):
            continue
        raised = np.abs(part) * np.float32(levels / wide) + fractions[begin : begin + block]
        level = np.minimum(np.trunc(raised), levels).astype(np.float32)
        decoded[begin : begin + block] = np.sign(part) * level * (np.float32(wide) / np.float32(levels))
    return decoded


def make_gradient(n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """(n,): heavy tails, exact zeros, negative zeros."""
    generator = torch.Generator().manual_seed(seed + n)
    values = torch.randn(n, generator=generator) * torch.rand(n, generator=generator).square() * 1e-2
    values[::11] = 0.0
    values[5::13] = -0.0
    return values.to(dtype)


def encode(codec: Any, gradient: torch.Tensor, **options: Any) -> torch.Tensor:
    """One message, exactly."""
    out = torch.full((codec.max_encoded_bytes(gradient.numel(), gradient.dtype),), 0xAB, dtype=torch.uint8)
    return out[: codec.encode(gradient, out, **options)].clone()


def decode(codec: Any, message: torch.Tensor, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full((n,), torch.nan, dtype=dtype)
    codec.decode(message, out)
    return out
