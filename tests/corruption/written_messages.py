"""Messages of every codec, with the program that makes their checksums right again, as a liar would."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from float_messages import DTYPES, decode, encode, finite_gradient
from gcomp_gradients import KINDS, make_importance
from gcomp_gradients import make_gradient as gcomp_gradient
from gradwire import _native, codecs
from quantiser_oracles import make_gradient

CHUNK, N_CHUNKED = 16384, 16384 + 900  # values of a chunk of the float codecs and of gcomp; two chunks


def put(message: Tensor, at: int, layout: str, *values: int) -> Tensor:
    content = struct.pack(layout, *values)
    message[at : at + len(content) or None] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return message


def get(message: Tensor, at: int, layout: str) -> int:
    return int(struct.unpack_from(layout, message.numpy(), at)[0])


# ---- messages, and their checksums put right


def seal_quantised(message: Tensor, n: int) -> None:
    put(message, 28, "<I", _native.crc32c(message[32:], _native.crc32c(message[:28])))


def seal_general(message: Tensor, n: int) -> None:
    put(message, 16, "<Q", message.numel() - 28)
    put(message, 24, "<I", _native.crc32c(message[28:], _native.crc32c(message[:24])))


def seal_float(message: Tensor, n: int, entry_bytes: int) -> None:
    first, n_marks = 40 + entry_bytes * -(-n // CHUNK), 0
    if entry_bytes == 4 and message[18]:  # truncated-float's marks of partitions with Inf and NaN
        n_marks = (-(-n // 256) + 7) // 8
    end = message.numel() - n_marks
    if n <= CHUNK:
        put(message, 40, "<I", _native.crc32c(message[first:end]))
    put(
        message,
        36,
        "<I",
        _native.crc32c(message[end:], _native.crc32c(message[40:first], _native.crc32c(message[:36]))),
    )


def seal_gcomp(message: Tensor, n: int) -> None:
    end_of_headers = 48 + 32 * min(get(message, 32, "<I"), (message.numel() - 48) // 32)
    for at in range(48, end_of_headers, 32):
        begin, *lengths = struct.unpack_from("<Q3I", message.numpy(), at)
        if message[4] != 1:
            lengths[1] = 0  # version 2 has no levels, but a checksum of the importance there
        end = begin + lengths[0] + -(-lengths[1] // 8) + -(-lengths[2] // 8)
        put(message, at + 28, "<I", _native.crc32c(message[begin:end]) if end <= message.numel() else 0)
    put(message, 44, "<I", _native.crc32c(message[48:end_of_headers], _native.crc32c(message[:44])))


SEALS: dict[str, Callable[[Tensor, int], None]] = {
    **dict.fromkeys(("one-bit", "two-bit", "ternary", "qsgd", "thc"), seal_quantised),
    **dict.fromkeys(("raw", "zlib", "zstd"), seal_general),
    "embedded-float": functools.partial(seal_float, entry_bytes=8),
    "truncated-float": functools.partial(seal_float, entry_bytes=4),
    "gcomp": seal_gcomp,
}


class Written:
    """A message, with the codec that wrote it and reads it."""

    def __init__(self, name: str, gradient: Tensor, cuts: tuple[int, ...] = (), **options: Any) -> None:
        self.name, self.codec = name, codecs.by_name(name, **options)
        self.n, self.dtype = gradient.numel(), gradient.dtype
        self._options = {"importance": make_importance(self.n)} if name == "gcomp" else {}
        self.message = encode(self.codec, gradient, **self._options, **({"cuts": cuts} if cuts else {}))

    def read(self, message: Tensor) -> Tensor:
        return decode(self.codec, message, self.n, self.dtype, **self._options)

    def sealed(self, message: Tensor) -> Tensor:
        """`message` with every checksum right, as a liar would send it."""
        SEALS[self.name](message, self.n)
        return message

    def with_lie(self, at: int, layout: str, *values: int) -> Tensor:
        return self.sealed(put(self.message.clone(), at, layout, *values))


def with_infinity(n: int) -> Tensor:
    values = finite_gradient(2 * n, torch.float32)[:n]
    values[n // 7] = float("inf")
    return values


ROUND = torch.randn(300, generator=torch.Generator().manual_seed(3)).round(decimals=1)
WRITTEN = {
    "one-bit": Written("one-bit", make_gradient(300)),
    "two-bit": Written("two-bit", make_gradient(300)),
    "two-bit by groups": Written("two-bit", make_gradient(300), (100, 200), scale_values=64),
    "ternary": Written("ternary", make_gradient(300)),
    "qsgd": Written("qsgd", make_gradient(300), block=128),
    "qsgd wide": Written("qsgd", make_gradient(300), levels=100, block=128),
    "qsgd of 5 levels": Written("qsgd", make_gradient(300), levels=5, block=128),
    "thc": Written("thc", make_gradient(300)),
    **{name: Written(name, ROUND) for name in ("raw", "zlib", "zstd")},
    "embedded-float": Written("embedded-float", with_infinity(N_CHUNKED)),
    "embedded-float whole": Written("embedded-float", finite_gradient(2_000, torch.float32)[:1_000], bits=32),
    "truncated-float": Written("truncated-float", with_infinity(N_CHUNKED), bits=12),
    "truncated-float native": Written("truncated-float", with_infinity(700), bits=9, format="native"),
    **{
        f"gcomp {format}": Written("gcomp", gcomp_gradient("sparse", N_CHUNKED, torch.float32), format=format)
        for format in (1, 2)
    },
    **{
        f"gcomp {format} {mode} {dtype} {kind}": Written(
            "gcomp", gcomp_gradient(kind, 700, dtype), importance=mode, bits=bits, format=format
        )
        for format in (1, 2)
        for dtype in DTYPES
        for (mode, bits), kind in zip(
            (("none", None), ("paper", None), ("uniform", 4), ("truncate", 4)), KINDS[::-1], strict=True
        )
    },
}
GCOMP_1, GCOMP_2 = WRITTEN["gcomp 1"], WRITTEN["gcomp 2"]
