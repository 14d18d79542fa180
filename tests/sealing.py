"""Numbers in messages, and the program that makes checksums right again, as a liar would."""

import functools
import struct
from collections.abc import Callable

import torch
from torch import Tensor

from gradwire import _native

CHUNK = 16384  # values of a chunk of the float codecs and of gcomp


def put(message: Tensor, at: int, layout: str, *values: int) -> Tensor:
    content = struct.pack(layout, *values)
    message[at : at + len(content) or None] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return message


def get(message: Tensor, at: int, layout: str) -> int:
    return int(struct.unpack_from(layout, message.numpy(), at)[0])


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
    if 0 < n <= CHUNK:
        put(message, 40, "<I", _native.crc32c(message[first:end]))
    of_headers = _native.crc32c(message[40:first], _native.crc32c(message[:36]))
    put(message, 36, "<I", _native.crc32c(message[end:], of_headers))


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
