"""Huffman tables: optimal under their limit, deterministic, and able to code any exponent."""

import heapq

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gcomp_oracle as oracle
from float_messages import there_and_back
from gradwire import _native
from gradwire.codecs.gcomp import GCompCodec, HuffmanTable
from gradwire.errors import CorruptMessage, IncompatibleVersion, InvalidArgument

counts_256 = st.lists(st.integers(0, 10**6), min_size=256, max_size=256).filter(any)
sparse_256 = st.dictionaries(st.integers(0, 255), st.integers(1, 10**9), min_size=1, max_size=40).map(
    lambda counts: [counts.get(symbol, 0) for symbol in range(256)]
)


def table_of(counts: list[int]) -> HuffmanTable:
    return HuffmanTable.from_histogram(torch.tensor(counts, dtype=torch.int64))


def bits_of(counts: list[int], lengths: tuple[int, ...]) -> int:
    return sum(n * (lengths[symbol] or lengths[-1] + 8) for symbol, n in enumerate(counts))


@given(st.one_of(counts_256, sparse_256))
def test_every_table_is_a_complete_code_with_an_escape_where_one_is_needed(counts: list[int]) -> None:
    lengths = table_of(counts).lengths
    assert max(lengths) <= 11
    assert sum(2.0**-length for length in lengths if length) == 1
    assert (lengths[-1] > 0) == (0 in lengths[:-1])


@given(sparse_256)
def test_table_costs_little_more_than_the_unlimited_huffman_code(counts: list[int]) -> None:
    """With an escape of weight 1 among them, at most 41 symbols under 11 bits lose less than 0.11 bits a value.

    The bound is Milidiu and Laber's: 1 / (phi^(L - log2(n + log2 n - L) - 1) - 1).
    """
    native = _native.huffman_native_lengths(torch.tensor([*counts, 1], dtype=torch.int64))
    best = sum(n * length for n, length in zip([*counts, 1], native, strict=True))
    assert bits_of(counts, table_of(counts).lengths) <= best + 0.11 * (sum(counts) + 1)


@given(sparse_256)
def test_native_lengths_are_those_of_huffmans_algorithm(counts: list[int]) -> None:
    heap = sorted(n for n in counts if n)
    cost = heap[0] if len(heap) == 1 else 0  # a lone symbol still takes a bit
    while len(heap) > 1:
        pair = heapq.heappop(heap) + heapq.heappop(heap)
        cost += pair
        heapq.heappush(heap, pair)
    native = _native.huffman_native_lengths(torch.tensor(counts, dtype=torch.int64))
    assert sum(n * length for n, length in zip(counts, native, strict=True)) == cost


def test_rare_exponents_are_escaped_when_that_is_shorter() -> None:
    """Seventy stray values take 70 of the 2,048 codes of 11 bits, and make a million others longer."""
    counts = [int(1e6 * 2 ** -abs(exponent - 113)) for exponent in range(256)]
    strays = range(20, 90)
    for exponent in strays:
        counts[exponent] = 1
    lengths = table_of(counts).lengths
    assert not any(lengths[exponent] for exponent in strays)
    assert all(lengths[105:122])


def test_a_table_for_one_exponent_still_codes_every_other() -> None:
    counts = [0] * 256
    counts[110] = 5
    gradient = torch.from_numpy((np.arange(1, 4000) * 0x101011).astype(np.uint32).view(np.int32)).view(torch.float32)
    decoded = there_and_back(GCompCodec("none", table=table_of(counts)), gradient)
    has_exponent = (gradient.view(torch.int32) >> 23 & 0xFF) != 0
    assert torch.equal(decoded.view(torch.int32), torch.where(has_exponent, gradient.view(torch.int32), 0))


@given(sparse_256)
def test_serialised_table_comes_back_with_the_same_id(counts: list[int]) -> None:
    table = table_of(counts)
    again = HuffmanTable.from_bytes(table.to_bytes())
    assert (again.id, again.lengths, again) == (table.id, table.lengths, table)
    assert table.to_bytes() == oracle.table_bytes(table.lengths)
    assert table.id == oracle.table_id(table.lengths)


def test_equal_counts_are_told_apart_by_their_exponent() -> None:
    counts = [7] * 256
    lengths = table_of(counts).lengths
    assert lengths == tuple(sorted(lengths[:-1], reverse=True)) + (lengths[-1],)


@pytest.mark.parametrize(
    ("dtype", "known_id"),
    [(torch.float32, 0x9B7B084588D8AFC4), (torch.bfloat16, 0x9B7B084588D8AFC4), (torch.float16, 0x3089F1DD15E1FD81)],
)
def test_prior_tables_never_change(dtype: torch.dtype, known_id: int) -> None:
    assert HuffmanTable.prior(dtype).id == known_id


@given(sparse_256, st.data())
def test_altered_or_cut_table_raises_a_typed_error(counts: list[int], data: st.DataObject) -> None:
    good = table_of(counts).to_bytes()
    position = data.draw(st.integers(0, len(good) - 1))
    flipped = bytearray(good)
    flipped[position] ^= data.draw(st.integers(1, 255))
    for bad in (bytes(flipped), good[:position], good + b"\0"):
        with pytest.raises((CorruptMessage, IncompatibleVersion)):
            HuffmanTable.from_bytes(bad)
    with pytest.raises(IncompatibleVersion, match="version 2"):
        HuffmanTable.from_bytes(good[:4] + b"\2" + good[5:])


@pytest.mark.parametrize(("code", "match"), [([1, 1, 1], "complete prefix code"), ([1, 1, 0], "escape")])
def test_table_that_is_no_code_is_refused_although_its_checksum_is_right(code: list[int], match: str) -> None:
    lengths = (0, 0, 0, *code, *[0] * 251)
    with pytest.raises(CorruptMessage, match=match):
        HuffmanTable.from_bytes(oracle.table_bytes(lengths))


ONES = torch.ones(256, dtype=torch.int64)


@pytest.mark.parametrize(
    "histogram",
    [0 * ONES, ONES.float(), ONES[:255].clone(), torch.tensor([-1] + [1] * 255), 2**50 * ONES],
    ids=["empty", "floats", "wrong size", "negative", "too large"],
)
def test_impossible_histogram_raises_invalid_argument(histogram: torch.Tensor) -> None:
    with pytest.raises(InvalidArgument):
        HuffmanTable.from_histogram(histogram)


@given(st.integers(0, 2**32 - 1), st.integers(1, 300))
def test_tree_and_table_decoders_agree(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    exponents = torch.from_numpy(rng.normal(110, 3, n).clip(0, 255).astype(np.uint8))
    counts = torch.bincount(exponents[: 1 + n // 2].long(), minlength=256)  # the rest may need escapes
    table = HuffmanTable.from_histogram(counts).native
    out = torch.empty(3 * n + 64, dtype=torch.uint8)
    n_bytes = _native.huffman_encode_segment(table, exponents, out)
    for decode in (_native.huffman_decode_table, _native.huffman_decode_tree):
        decoded = torch.empty_like(exponents)
        if n_bytes:
            decode(table, out[:n_bytes], decoded)
            assert torch.equal(decoded, exponents)
