"""Made-up gradients that show a GComp codec every kind of value. Bit patterns, so that NaNs survive."""

import numpy as np
import torch

from gradwire.codecs.gcomp import GCompCodec, HuffmanTable

WORDS = {torch.float32: np.uint32, torch.bfloat16: np.uint16, torch.float16: np.uint16}
SIGNED = {torch.float32: np.int32, torch.bfloat16: np.int16, torch.float16: np.int16}
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
KINDS = ("gaussian", "sparse", "special", "random bits")


def tensor_of(words: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(words.view(SIGNED[dtype]).copy()).view(dtype)


def words_of(tensor: torch.Tensor) -> np.ndarray:
    dtype = tensor.dtype
    return tensor.view({4: torch.int32, 2: torch.int16}[dtype.itemsize]).numpy().view(WORDS[dtype])


def make_gradient(kind: str, n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """(n,) `dtype`: "gaussian" as gradients are, "sparse" mostly zeros of both signs, "special" full of Inf, NaN with
    every payload, subnormals and the largest and smallest values, or "random bits"."""
    rng = np.random.default_rng([seed, n, KINDS.index(kind)])
    bits = rng.integers(0, 2 ** (8 * dtype.itemsize), n).astype(WORDS[dtype])
    if kind == "random bits":
        return tensor_of(bits, dtype)
    scale = 2.0 ** rng.normal(-12 if dtype != torch.float16 else -6, 2, n)
    words = words_of(torch.from_numpy((rng.normal(size=n) * scale).astype(np.float32)).to(dtype)).copy()
    n_mantissa = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}[dtype]
    sign = WORDS[dtype](1 << (8 * dtype.itemsize - 1))
    if kind == "sparse":
        words[rng.random(n) < 0.9] &= sign
    if kind == "special":
        mantissa = WORDS[dtype]((1 << n_mantissa) - 1)
        field = ~(sign | mantissa)
        pick = rng.integers(0, 6, n)
        words = np.select(
            [pick == 0, pick == 1, pick == 2, pick == 3],
            [bits | field, (bits & sign) | field, bits & ~field, (bits & sign) | (field - 1)],
            words,
        ).astype(WORDS[dtype])
    return tensor_of(words, dtype)


def fitted_table(gradient: torch.Tensor, format: int = 2) -> HuffmanTable:
    codec = GCompCodec("none", format=format)
    histogram = torch.zeros(2 ** codec.exponent_bits(gradient.dtype), dtype=torch.int64)
    codec.histogram(gradient, histogram)
    return HuffmanTable.from_histogram(histogram) if histogram.any() else codec.table_in_use(gradient.dtype)


def make_importance(n: int) -> torch.Tensor:
    """(n,) uint8: mostly around the gradients' own size, so that every level occurs, and some of any value."""
    rng = np.random.default_rng([0, n])
    near = rng.normal(4 * (40 - 12) + 40, 30, n).clip(0, 255)
    return torch.from_numpy(np.where(rng.random(n) < 0.2, rng.integers(0, 256, n), near).astype(np.uint8))
