"""The index of non-zeros, and the values at its set bits, one after the other: what ranks that hold the same index can sum.

In host memory, or on a device, enqueued by nobody who waits. An index is (ceil(n / 32),) int32: bit i % 32 of word i / 32
stands for value i. A head goes before it, which may be ORed over the ranks as the bits may (docs/format.md#count-sketch):
facts, their complement, flags, then a bit for each exponent up to that of the largest value.
"""

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire import _native
from gradwire.codecs import count_sketch
from gradwire.codecs.count_sketch import IndexFacts, index_words
from gradwire.codecs.tensors import dtype_code
from gradwire.gpu.kernels import kernels_for
from gradwire.gpu.launching import THREADS, fill_struct, grid, parts

HEAD_WORDS = 12
FLAGS_AT = 2
NOT_FINITE, PAST_THE_END = 1, 2
_HEAD = struct.Struct("<III")
_FACTS_MASK = 0x7FFFFFFF
_SMALLEST_EXPONENT = -148  # a float32 that is not zero is below 2^e for an e from here to 128
_BLOCK = 1024  # values that a device counts together


class Head(NamedTuple):
    exponent: int | None  # every value of every rank is below 2^exponent; None if all are zero
    flags: int  # of any rank
    ranks_agree: bool  # on their facts

    @property
    def is_finite(self) -> bool:
        """No rank holds Inf or NaN."""
        return not self.flags & NOT_FINITE


def head_of(facts: int, found: IndexFacts) -> Tensor:
    """(HEAD_WORDS,) int32: the head of an index of which `found` is known. facts: 31 bits that ranks have to share."""
    is_finite = math.isfinite(found.max_magnitude)
    run = 0
    if is_finite and found.max_magnitude > 0:
        run = (1 << (math.frexp(found.max_magnitude)[1] - _SMALLEST_EXPONENT + 1)) - 1
    head = bytearray(_HEAD.pack(facts, ~facts & _FACTS_MASK, 0 if is_finite else NOT_FINITE))
    head += run.to_bytes(4 * HEAD_WORDS - _HEAD.size, "little")
    return torch.frombuffer(head, dtype=torch.int32)


def read_head(words: Sequence[int]) -> Head:
    """Read HEAD_WORDS int32 that were ORed over the ranks."""
    head = struct.pack(f"<{HEAD_WORDS}i", *words)
    facts, complement, flags = _HEAD.unpack_from(head)
    run = int.from_bytes(head[_HEAD.size :], "little")
    return Head(run.bit_length() - 1 + _SMALLEST_EXPONENT if run else None, flags, facts & complement == 0)


def write_index(values: Tensor, message: Tensor, facts: int) -> None:
    """Write head and index of `values` (n,) into `message` (HEAD_WORDS + index_words(n),) int32; -0.0 is a zero."""
    head, index = message[:HEAD_WORDS], message[HEAD_WORDS:]
    kernels = kernels_for(values.device)
    if kernels is None:
        head.copy_(head_of(facts, count_sketch.write_index(values, index)))
        return
    largest = torch.zeros(1, dtype=torch.int32, device=values.device)
    n, code = values.numel(), dtype_code(values.dtype)
    parameters = fill_struct(
        "Index", values=values, words=index, head=head, largest=largest, n=n, dtype=code, facts=facts
    )
    kernels.launch("gw_index_write", grid(32 * index_words(n)), THREADS, 0, parameters)
    kernels.launch("gw_index_head", 1, 32, 0, parameters)


def count(index: Tensor, n_elements: int, head: Tensor | None = None) -> Tensor:
    """Count the bits that are set: the last of (m,) integers; on a device, up to the end of each 1,024 values. Of bits
    past the end `head` is told on a device, where they do not count. Raises: CorruptMessage, in host memory."""
    kernels = kernels_for(index.device)
    if kernels is None:
        n_set = _native.sketch_count_index(index.view(torch.uint32), n_elements)
        return torch.tensor([n_set], dtype=torch.int64, device="cpu")
    n_blocks = parts(n_elements, _BLOCK)
    counts = torch.empty(n_blocks, dtype=torch.int32, device=index.device)
    parameters = fill_struct("Index", words=index, head=head, counts=counts, n=n_elements, n_blocks=n_blocks)
    kernels.launch("gw_index_count", grid(32 * n_blocks), THREADS, 0, parameters)
    return counts.cumsum(0, dtype=torch.int32)


def pack(values: Tensor, index: Tensor, packed: Tensor, ends: Tensor | None = None) -> None:
    """Write into `packed` the values, of 2 or 4 bytes, at the set bits, in order. `ends`: on a device, what `count`
    gave. Raises: InvalidArgument (sizes), CorruptMessage (bits past the end), in host memory."""
    _copy("pack", values, packed, index, ends)


def unpack(packed: Tensor, index: Tensor, values: Tensor, ends: Tensor | None = None) -> None:
    """The inverse of `pack`: every one of `values` is written, those without a bit as 0."""
    _copy("unpack", packed, values, index, ends)


def _copy(name: str, source: Tensor, target: Tensor, index: Tensor, ends: Tensor | None) -> None:
    kernels = kernels_for(source.device)
    if kernels is None:
        copy = _native.pack_values if name == "pack" else _native.unpack_values
        copy(source.view(torch.uint8), source.element_size(), index.view(torch.uint32), target.view(torch.uint8))
        return
    values, packed = (source, target) if name == "pack" else (target, source)
    n_blocks = parts(values.numel(), _BLOCK)
    parameters = fill_struct(
        "Index", values=values, packed=packed, words=index, ends=ends, n=values.numel(), n_blocks=n_blocks,
        n_packed=packed.numel(), dtype=dtype_code(values.dtype),
    )  # fmt: skip
    kernels.launch(f"gw_index_{name}", grid(32 * n_blocks), THREADS, 0, parameters)
