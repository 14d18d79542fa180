"""There and back through a float codec, and gradients that show it every kind of value."""

from __future__ import annotations

import numpy as np
import torch

from gradwire.codecs import Codec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEVELS = {"portable": (False, False), "avx2": (True, False), "avx512": (True, True)}


def encode(codec: Codec, gradient: torch.Tensor) -> torch.Tensor:
    out = torch.full((codec.max_encoded_bytes(gradient.numel(), gradient.dtype),), 0xA5, dtype=torch.uint8)
    n_bytes = codec.encode(gradient, out)
    assert (out[n_bytes:] == 0xA5).all() or codec.name == "truncated-float", "written past the message"
    return out[:n_bytes].clone()


def decode(codec: Codec, message: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(like, -12345.0)
    codec.decode(message, out)
    return out


def there_and_back(codec: Codec, gradient: torch.Tensor) -> torch.Tensor:
    return decode(codec, encode(codec, gradient), gradient)


def finite_gradient(n: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """(n,): many magnitudes, zeros of both signs, subnormals, the largest and smallest values."""
    rng = np.random.default_rng([seed, n])
    values = rng.normal(size=n) * 2.0 ** rng.normal(-10, 4, n)
    gradient = torch.from_numpy(values.astype(np.float32)).to(dtype)
    limits = torch.finfo(dtype)
    special = [0.0, -0.0, limits.max, -limits.max, limits.smallest_normal, limits.smallest_normal / 8, limits.eps]
    for start in range(n // 2, n, 9):  # the first half stays free of what would dwarf all other values
        gradient[start] = special[start % len(special)]
    return gradient


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    words = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(words), b.view(words))


def every_16_bit_value(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
