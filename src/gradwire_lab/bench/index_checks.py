"""The kernels of indices and packed values beside the codecs for CPUs, byte for byte."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from gradwire.codecs import packed_values
from gradwire.codecs.count_sketch import index_words
from gradwire.codecs.packed_values import FLAGS_AT, HEAD_WORDS, PAST_THE_END
from gradwire.gpu.kernels import Kernels, using
from gradwire_lab.bench.device_checks import CheckFailed

KERNELS = tuple(f"gw_index_{name}" for name in ("write", "head", "count", "pack", "unpack"))
CONTENTS = ("sparse", "dense", "zeros", "specials", "subnormal", "infinity", "one")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 31, 32, 33, 1023, 1024, 1025, 9_000)
_FACTS = 0x12345678


def values_of(content: str, n: int, dtype: torch.dtype) -> Tensor:
    """(n,) of `dtype` on the CPU."""
    generator = torch.Generator().manual_seed(n)
    values = torch.randn(n, generator=generator) * torch.exp(torch.randn(n, generator=generator) * 2 - 6)
    share = {"dense": 0.9, "zeros": 0.0}.get(content, 0.05)
    values[torch.rand(n, generator=generator) >= share] = 0
    if content == "subnormal":
        values *= 1e-38 if dtype != torch.float16 else 1e-5
    elif content == "specials":  # -0 is a zero; NaN, and what a rank sends with it, is none
        values[::3] = -0.0
        values[n // 2] = float("nan")
    elif content in ("infinity", "one"):
        values[n - 1] = float("-inf") if content == "infinity" else -1.0
    return values.to(dtype)


def compare(kernels: Kernels, values: Tensor) -> None:
    """Head, bits, counts, packed values and values again are the CPU's; nothing beside them is written.

    Raises: CheckFailed.
    """
    n, place, there = values.numel(), kernels.device, values.to(kernels.device)
    n_words = HEAD_WORDS + index_words(n)
    message, fenced = (
        torch.full((n_words + extra,), -7, dtype=torch.int32, device=on) for extra, on in ((0, "cpu"), (2, place))
    )
    found, head, found_index = fenced[:n_words], fenced[:HEAD_WORDS], fenced[HEAD_WORDS:n_words]
    packed_values.write_index(values, message, _FACTS)
    with using(kernels):
        packed_values.write_index(there, found, _FACTS)
    _require(torch.equal(head.cpu(), message[:HEAD_WORDS]), "another head")
    _require(torch.equal(found.cpu(), message), "other bits")
    _require(bool((fenced[n_words:].cpu() == -7).all()), "words past the index were written")

    index = message[HEAD_WORDS:]
    index |= index.roll(1) & (index.roll(7) | 0x10101)  # other ranks have other non-zeros
    if n % 32:
        index[-1] &= (1 << n % 32) - 1
    found.copy_(message)
    count = int(packed_values.count(index, n))
    packed, rest = torch.empty(count, dtype=values.dtype), torch.full((4,), 7.0, dtype=values.dtype)
    packed_values.pack(values, index, packed)
    again = torch.empty(n, dtype=values.dtype)
    packed_values.unpack(packed, index, again)
    room, unpacked = torch.cat([torch.zeros_like(packed), rest]).to(place), torch.cat([values, rest]).to(place)
    with using(kernels):
        ends = packed_values.count(found_index, n, head)
        packed_values.pack(there, found_index, room[:count], ends)
        packed_values.unpack(room[:count], found_index, unpacked[:n], ends)
    _require(int(ends[-1]) == count, "other counts")
    _require(_same(room.cpu(), torch.cat([packed, rest])), "other packed values")
    _require(_same(unpacked.cpu(), torch.cat([again, rest])), "other values")

    if n % 32:
        found[-1] |= torch.iinfo(torch.int32).min
        with using(kernels):
            _require(int(packed_values.count(found_index, n, head)[-1]) == count, "a bit past the end was counted")
        _require(bool(int(found[FLAGS_AT]) & PAST_THE_END), "a bit past the end was not told")


def run(kernels: Kernels, sizes: Iterable[int] = SIZES, contents: Iterable[str] = CONTENTS) -> int:
    """How many cases there were. Raises: CheckFailed (the first case that differs)."""
    n_cases = 0
    for n, content, dtype in itertools.product(sizes, contents, DTYPES):
        try:
            compare(kernels, values_of(content, n, dtype))
        except CheckFailed as error:
            raise CheckFailed(f"index, {n} x {dtype}, {content}: {error}") from error
        n_cases += 1
    return n_cases


def _same(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def _require(is_right: bool, what: str) -> None:
    if not is_right:
        raise CheckFailed(what)
