"""The index of values that are not zero, which ranks OR, and the values at its bits, one after the other, which they sum.

A message is a head of HEAD_WORDS words, then a bit for every value: bit i % 32 of word i / 32 after the head stands for value
i. An OR can say more than it seems: the head tells that ranks differ (a bit and its complement are both set), that one of
them has an Inf or NaN, and the largest exponent of all (each sets a bit for every exponent up to its own; the longest run
survives). Format: docs/format.md#count-sketch. Tensors lie in host memory, or on a device, where nobody waits.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire import _native
from gradwire.codecs import count_sketch
from gradwire.codecs.count_sketch import index_words
from gradwire.gpu.index import FLAGS_AT, HEAD_WORDS, NOT_FINITE, PAST_THE_END, DeviceIndex
from gradwire.gpu.kernels import kernels_for

__all__ = [
    "HEAD_WORDS", "Head", "count", "is_finite", "message_words", "pack", "read_head", "unpack", "write_index",
]  # fmt: skip

# facts, ~facts, flags, then a bit for each exponent
_HEAD = struct.Struct("<III")
_FACTS_MASK = 0x7FFFFFFF
# A float32 that is not zero is below 2^e for an e from -148 to 128.
_SMALLEST_EXPONENT = -148


class Head(NamedTuple):
    """What the heads of all ranks say together.

    Attributes:
        exponent: every value of every rank is below 2^exponent; None if all are zero.
        is_finite: no rank holds Inf or NaN.
        is_whole: no bits past the end were found by `count` on a device; in host memory it raises.
        ranks_agree: on the facts.
    """

    exponent: int | None
    is_finite: bool
    is_whole: bool
    ranks_agree: bool


def message_words(n_elements: int) -> int:
    """Words of head and bits."""
    return HEAD_WORDS + index_words(n_elements)


def write_index(values: Tensor, message: Tensor, facts: int) -> None:
    """Write where `values` are not zero (-0.0 is), whether all are finite, and the exponent of the largest.

    Args:
        values: (n,) float32, bfloat16 or float16, contiguous.
        message: (message_words(n),) int32; overwritten, and bits past the end become 0.
        facts: 31 bits that ranks have to share.
    Raises: InvalidArgument (dtype, size).
    """
    kernels = kernels_for(values.device)
    if kernels is not None:
        largest = torch.empty(1, dtype=torch.int32, device=values.device)
        DeviceIndex(kernels).write(values, message, largest, facts)
        return
    found = count_sketch.write_index(values, message[HEAD_WORDS:])
    is_finite = math.isfinite(found.max_magnitude)
    run = 0
    if is_finite and found.max_magnitude > 0:
        run = (1 << (math.frexp(found.max_magnitude)[1] - _SMALLEST_EXPONENT + 1)) - 1
    head = bytearray(_HEAD.pack(facts, ~facts & _FACTS_MASK, 0 if is_finite else NOT_FINITE))
    head += run.to_bytes(4 * HEAD_WORDS - _HEAD.size, "little")
    message[:HEAD_WORDS] = torch.frombuffer(head, dtype=torch.int32)


def read_head(words: Sequence[int]) -> Head:
    """Read the (HEAD_WORDS,) int32 before an index, ORed over the ranks."""
    head = struct.pack(f"<{HEAD_WORDS}i", *words)
    facts, complement, flags = _HEAD.unpack_from(head)
    run = int.from_bytes(head[_HEAD.size :], "little")
    exponent = run.bit_length() - 1 + _SMALLEST_EXPONENT if run else None
    return Head(exponent, not flags & NOT_FINITE, not flags & PAST_THE_END, facts & complement == 0)


def is_finite(message: Tensor) -> Tensor:
    """() bool, where the message lies: as `Head.is_finite`."""
    return message[FLAGS_AT].bitwise_and(NOT_FINITE) == 0


def count(message: Tensor, n_elements: int) -> Tensor:
    """Count the bits that are set: (m,) int32, of which the last is their number. `pack` and `unpack` take all of it.

    Raises: InvalidArgument (size), CorruptMessage (bits past the end; on a device they are told in the head).
    """
    kernels = kernels_for(message.device)
    if kernels is None:
        n_set = _native.sketch_count_index(_bits(message), n_elements)
        return torch.tensor([n_set], dtype=torch.int32)
    n_blocks = DeviceIndex.n_blocks(n_elements)
    counts, ends = torch.empty((2, n_blocks), dtype=torch.int32, device=message.device)
    DeviceIndex(kernels).count(message, n_elements, counts, ends)
    return ends


def pack(values: Tensor, message: Tensor, ends: Tensor, packed: Tensor) -> None:
    """Write the values at the set bits, in order.

    Args:
        values: (n,) of 2 or 4 bytes each, contiguous.
        ends: as `count` gave it.
        packed: (the bits' number,) of the dtype of `values`; overwritten.
    Raises: InvalidArgument (sizes), CorruptMessage (bits past the end).
    Cost: one pass; multi-threaded; releases the GIL. The same bytes on every machine.
    """
    kernels = kernels_for(values.device)
    if kernels is not None:
        DeviceIndex(kernels).pack(values, message, ends, packed)
        return
    size = values.element_size()
    _native.pack_values(values.view(torch.uint8), size, _bits(message), packed.view(torch.uint8))


def unpack(packed: Tensor, message: Tensor, ends: Tensor, values: Tensor) -> None:
    """The inverse of `pack`: every one of `values` is written, those without a bit as 0. Raises and costs: as `pack`."""
    kernels = kernels_for(values.device)
    if kernels is not None:
        DeviceIndex(kernels).unpack(packed, message, ends, values)
        return
    size = values.element_size()
    _native.unpack_values(packed.view(torch.uint8), size, _bits(message), values.view(torch.uint8))


def _bits(message: Tensor) -> Tensor:
    return message[HEAD_WORDS:].view(torch.uint32)
