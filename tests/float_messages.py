"""Encodes and decodes by any codec, on every instruction set, and makes values that show it every kind of float."""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from gradwire import _native

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEVELS = {"portable": (False, False), "avx2": (True, False), "avx512": (True, True)}


@contextlib.contextmanager
def at_level(level: str) -> Iterator[None]:
    """On this instruction set at most; a machine that lacks it takes the one below."""
    _native.limit_simd_level(*LEVELS[level])
    try:
        yield
    finally:
        _native.limit_simd_level(True, True)


def encode(codec: Any, gradient: torch.Tensor, **options: Any) -> torch.Tensor:
    """One message; nothing is written past what it may take, or by some codecs past what it does take."""
    most = [gradient.numel(), gradient.dtype, *([len(options["cuts"])] if "cuts" in options else [])]
    n_most = codec.max_encoded_bytes(*most)
    room = torch.full((n_most + 512,), 0xA5, dtype=torch.uint8)
    n_bytes = codec.encode(gradient, room[:n_most], **options)
    assert 0 < n_bytes <= n_most
    end = n_bytes if codec.name in ("raw", "zlib", "zstd", "embedded-float") else n_most
    assert (room[end:] == 0xA5).all(), "written past the end"
    return room[:n_bytes].clone()


def decode(
    codec: Any, message: torch.Tensor, n: int, dtype: torch.dtype = torch.float32, **options: Any
) -> torch.Tensor:
    """(n,) values; whatever becomes of the message, nothing is written beside them."""
    around = torch.full((n + 512,), -7.0, dtype=dtype)
    values = around[256 : 256 + n]
    try:
        codec.decode(message, values, **options)
    finally:
        assert (torch.cat([around[:256], around[256 + n :]]) == -7).all(), "written beside the values"
    return values


def planes(codec: Any, gradient: torch.Tensor, first_bit: int, n_bits: int) -> torch.Tensor:
    """The message of these bits of embedded floats; nothing is written past it."""
    n_max = codec.max_plane_bytes(gradient.numel(), gradient.dtype, first_bit, n_bits)
    out = torch.full((n_max,), 0xA5, dtype=torch.uint8)
    n_bytes = codec.encode_planes(gradient, first_bit, n_bits, out)
    assert (out[n_bytes:] == 0xA5).all()
    assert n_bytes == n_max or first_bit + n_bits == 32
    return out[:n_bytes].clone()


class Tapped:
    """A codec of which every message goes through `tap(out, n_bytes)`, which returns its length: longer by `more_bytes`."""

    def __init__(self, codec: Any, tap: Callable[[torch.Tensor, int], int], more_bytes: int = 0) -> None:
        self._codec, self._tap, self._more_bytes = codec, tap, more_bytes
        self.name, self.decode = codec.name, codec.decode

    def max_encoded_bytes(self, n_elements: int, dtype: torch.dtype) -> int:
        return self._codec.max_encoded_bytes(n_elements, dtype) + self._more_bytes

    def encode(self, gradient: torch.Tensor, out: torch.Tensor, importance: torch.Tensor | None = None) -> int:
        return self._tap(out, self._codec.encode(gradient, out, importance))


def there_and_back(codec: Any, gradient: torch.Tensor, **options: Any) -> torch.Tensor:
    """What a message of `gradient` decodes to."""
    return decode(codec, encode(codec, gradient, **options), gradient.numel(), gradient.dtype, **options)


def clamped(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 `values` in a dtype that may hold less, where the largest stand for those beyond."""
    return values.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


def any_bits(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """(n,): values of every kind, NaN with any payload too."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n * dtype.itemsize,), generator=random, dtype=torch.uint8).view(dtype)


def assert_same_bytes_everywhere(
    compute: Callable[[], Iterable[torch.Tensor]], thread_counts: Iterable[int] = (1, 2, 3)
) -> list[torch.Tensor]:
    """Returns what `compute()` gives: the same bytes on every instruction set with every number of threads."""
    n_threads, digests = _native.thread_count(), {}
    try:
        for level in LEVELS:
            for n in thread_counts:
                _native.set_thread_count(n)
                with at_level(level):
                    found = list(compute())
                digest = hashlib.blake2b()
                for tensor in found:
                    digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
                digests[level, n] = digest.hexdigest()
    finally:
        _native.set_thread_count(n_threads)
    assert len(set(digests.values())) == 1, digests
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    words = {4: torch.int32, 2: torch.int16}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.view(words), b.view(words))


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


def every_16_bit_value(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
