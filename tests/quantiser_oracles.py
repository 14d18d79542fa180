"""The quantisers by their definitions, in numpy; messages are compared with them field by field."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from float_messages import decode as decode
from float_messages import encode as encode

GROUP = 64
Rounding = Callable[[float], np.float32]
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


def to_bfloat16(value: float) -> np.float32:
    return np.float32(torch.tensor(value, dtype=torch.float64).to(torch.float32).to(torch.bfloat16).item())


def one_bit(x: np.ndarray, scale: str = "mean", threshold: float = 0.5, rounded: Rounding = np.float32) -> np.ndarray:
    negative, wide = x < 0, x.astype(np.float64)
    if scale == "fixed":
        above = below = threshold
    elif scale == "mean":
        above = below = float(np.abs(wide).mean()) if x.size else 0.0
    else:
        above = float(wide[~negative].mean()) if (~negative).any() else 0.0
        below = float(-wide[negative].mean()) if negative.any() else 0.0
    return np.where(negative, -rounded(below), rounded(above)).astype(np.float32)


def two_bit(
    x: np.ndarray, threshold: float = 1.25, relative: bool = True, levels: int = 3, rounded: Rounding = np.float32
) -> np.ndarray:
    mean = np.abs(x.astype(np.float64)).mean() if x.size else 0.0
    if levels == 4:
        inner, outer = (rounded(factor * mean) for factor in (0.5675, 1.893))
        is_outer = np.abs(np.abs(x) - float(outer)) <= np.abs(np.abs(x) - float(inner))
        return np.where(is_outer, outer, inner) * np.where(x < 0, np.float32(-1), np.float32(1))
    t = rounded(float(np.float32(threshold)) * mean) if relative else np.float32(threshold)
    return np.where((x >= t) & (x > 0), t, np.where((x <= -t) & (x < 0), -t, np.float32(0))).astype(np.float32)


def decoded(name: str, options: dict[str, Any], x: np.ndarray, step: int, cuts: Sequence[int] = ()) -> np.ndarray:
    """Returns the values that a message of `x` (float32) decodes to; for thc compare `thc_codes` instead."""
    settings = {key: value for key, value in options.items() if key not in ("seed", "scale_values")}
    if name == "ternary":
        scale = ternary_scale(x, 2.5)
        return (ternary(x, scale, options["seed"], step) * scale).astype(np.float32)
    if name == "qsgd":
        return qsgd(x, **{"levels": 7, "block": 512} | settings, seed=options["seed"], step=step)
    definition = {"one-bit": one_bit, "two-bit": two_bit}[name]
    if "scale_values" not in options:
        return definition(x, **settings)
    out, n_group = np.empty_like(x), options["scale_values"]
    for start, end in zip([0, *cuts], [*cuts, x.size], strict=True):
        for first in range(start, end, n_group):
            mine = slice(first, min(end, first + n_group))
            out[mine] = definition(x[mine], **settings, rounded=to_bfloat16)
    return out


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


THC_TABLE = np.array([0, 3, 5, 7, 9, 11, 13, 14, 16, 17, 19, 21, 23, 25, 27, 30])
THC_SIGN_SEED = 0x9D8A_5C17_43E1_0B6F


@functools.cache
def hadamard(size: int) -> np.ndarray:
    """Orthonormal, by Sylvester's construction."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(size)


def thc_blocks(n: int) -> list[tuple[int, int, int]]:
    """(begin, values, padded size) of each block."""
    blocks = []
    for begin in range(0, n, 1_024):
        count = min(1_024, n - begin)
        blocks.append((begin, count, max(64, 1 << (count - 1).bit_length())))
    return blocks


def thc_rotation(block: int, size: int, seed: int, sign_step: int) -> np.ndarray:
    """(size, size) float64: signs, then the transform."""
    places = np.arange(8, dtype=np.uint64) + np.uint64(8 * block)
    counter = np.zeros((8, 4), np.uint64)
    counter[:, 0], counter[:, 2], counter[:, 3] = places, sign_step & 0xFFFFFFFF, sign_step >> 32
    words = philox(counter, seed ^ THC_SIGN_SEED).T.reshape(-1)  # word 8 k + lane
    bits = (words[np.arange(size) // 32] >> (np.arange(size) % 32).astype(np.uint32)) & 1
    return hadamard(size) * (1 - 2.0 * bits)


def thc_codes(x: np.ndarray, norms: np.ndarray, clip: float, seed: int, sign_step: int, step: int) -> np.ndarray:
    """Table values of the rotated values, padded blocks one after another."""
    codes = []
    fractions = uniform(seed, step, (len(norms) + 1) * 1_024).astype(np.float64)
    for block, (begin, count, size) in enumerate(thc_blocks(x.size)):
        padded = np.zeros(size)
        padded[:count] = x[begin : begin + count]
        rotated = thc_rotation(block, size, seed, sign_step) @ padded
        reach = clip * norms[block] / np.sqrt(size)
        place = np.clip(rotated * 15 / reach + 15, 0, 30) if reach > 0 else np.full(size, 15.0)
        index = np.searchsorted(THC_TABLE, np.floor(place), side="right") - 1
        low, high = THC_TABLE[index], THC_TABLE[np.minimum(index + 1, 15)]
        up = fractions[begin : begin + size] * (high - low) < place - low
        codes.append(np.where(up, high, low))
    return np.concatenate(codes) if codes else np.zeros(0)


def thc_mean(
    sums: np.ndarray, n: int, n_ranks: int, norms: np.ndarray, clip: float, seed: int, sign_step: int
) -> np.ndarray:
    """What sums of codes over `n_ranks` stand for, divided by n_ranks."""
    out, first = np.zeros(n), 0
    for block, (begin, count, size) in enumerate(thc_blocks(n)):
        step = clip * norms[block] / np.sqrt(size) / 15 / n_ranks
        rotated = (sums[first : first + size] - 15.0 * n_ranks) * step
        out[begin : begin + count] = (thc_rotation(block, size, seed, sign_step).T @ rotated)[:count]
        first += size
    return out


def thc_norms(x: np.ndarray) -> np.ndarray:
    return np.array([np.sqrt(np.square(x[b : b + c].astype(np.float64)).sum()) for b, c, _ in thc_blocks(x.size)])


def make_gradient(n: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """(n,): heavy tails, exact zeros, negative zeros."""
    generator = torch.Generator().manual_seed(seed + n)
    values = torch.randn(n, generator=generator) * torch.rand(n, generator=generator).square() * 1e-2
    values[::11] = 0.0
    values[5::13] = -0.0
    return values.to(dtype)


def top_k(given: torch.Tensor, left: torch.Tensor, k: int, decay: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """The means (steps, n) of gradients (steps, ranks, n), and what ranks have left (ranks, n), from what they had."""
    means, left = [], left.double()
    for gradients in given.double():
        whole = gradients + left
        largest = whole.abs().topk(k, 1).indices
        left = whole.scatter(1, largest, 0.0)
        means.append((whole - left).mean(0))
        left = decay * left
    return torch.stack(means), left
