"""A GComp message that is not what it says gives a typed error: never a crash, a hang or a write outside the output."""

from __future__ import annotations

import contextlib
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gcomp_oracle as oracle
from gcomp_gradients import KINDS, make_gradient, make_importance
from gradwire import _native
from gradwire.codecs.gcomp import GCompCodec, HuffmanTable, describe, message_holds_nonfinite
from gradwire.errors import CorruptMessage, IncompatibleVersion, InvalidArgument, RankMismatch

N_VALUES = 16384 + 900
TYPED = (CorruptMessage, IncompatibleVersion, RankMismatch)
LEVELS = st.sampled_from([(False, False), (True, False), (True, True)])


def make_message(
    dtype: torch.dtype = torch.float32, mode: str = "paper", n: int = N_VALUES, kind: str = "sparse", format: int = 1
) -> bytes:
    codec = GCompCodec(mode, bits=4 if mode in ("uniform", "truncate") else None, format=format)
    out = torch.empty(codec.max_encoded_bytes(n, dtype), dtype=torch.uint8)
    return out[: codec.encode(make_gradient(kind, n, dtype), out, make_importance(n))].numpy().tobytes()


class Guarded:
    """(n,) values in the middle of a larger buffer, whose other values have to stay as they are."""

    def __init__(self, n: int, dtype: torch.dtype) -> None:
        self.around = torch.full((n + 512,), 3.0, dtype=dtype)
        self.values = self.around[256 : 256 + n]

    def are_neighbours_untouched(self) -> bool:
        n = self.values.numel()
        return bool((self.around[:256] == 3).all() and (self.around[256 + n :] == 3).all())

    def decode(self, message: bytes | bytearray, level: tuple[bool, bool]) -> None:
        _native.limit_simd_level(*level)
        try:
            importance = make_importance(self.values.numel())
            GCompCodec("none").decode(torch.tensor(list(message), dtype=torch.uint8), self.values, importance)
        finally:
            _native.limit_simd_level(True, True)


def decode(
    message: bytes | bytearray,
    dtype: torch.dtype = torch.float32,
    n: int = N_VALUES,
    level: tuple[bool, bool] = (True, True),
) -> torch.Tensor:
    """The values; whatever becomes of the message, nothing is written beside them."""
    guarded = Guarded(n, dtype)
    try:
        guarded.decode(message, level)
    finally:
        assert guarded.are_neighbours_untouched()
    return guarded.values


def seal(message: bytearray) -> bytes:
    """Makes every checksum right again, as a liar would."""
    n_chunks = min(struct.unpack_from("<I", message, 32)[0], (len(message) - 48) // 32)
    for chunk in range(n_chunks):
        at = 48 + 32 * chunk
        offset, n_bytes, n_levels, n_mantissas = struct.unpack_from("<Q3I", message, at)
        n_levels = n_levels if message[4] == 1 else 0
        end = offset + n_bytes + -(-n_levels // 8) + -(-n_mantissas // 8)
        struct.pack_into(
            "<I", message, at + 28, oracle.crc32c(bytes(message[offset:end])) if end <= len(message) else 0
        )
    headers = bytes(message[:44]) + bytes(message[48 : 48 + 32 * n_chunks])
    struct.pack_into("<I", message, 44, oracle.crc32c(headers))
    return bytes(message)


SMALL = {
    (dtype, mode, kind, format): make_message(dtype, mode, 700, kind, format)
    for format in (1, 2)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for mode in ("none", "paper", "uniform", "truncate")
    for kind in KINDS
}
LARGE = make_message()
LARGE_2 = make_message(format=2)


@given(st.sampled_from(sorted(SMALL, key=str)), st.data(), LEVELS)
def test_flipped_byte_raises_a_typed_error(
    key: tuple[torch.dtype, str, str, int], data: st.DataObject, level: tuple[bool, bool]
) -> None:
    message = bytearray(SMALL[key])
    message[data.draw(st.integers(0, len(message) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(TYPED):
        decode(message, key[0], 700, level)


@given(st.sampled_from(sorted(SMALL, key=str)), st.data())
def test_truncated_or_extended_message_raises_corrupt_message(
    key: tuple[torch.dtype, str, str, int], data: st.DataObject
) -> None:
    message = SMALL[key]
    for bad in (message[: data.draw(st.integers(0, len(message) - 1))], message + b"\0"):
        with pytest.raises(CorruptMessage):
            decode(bad, key[0], 700)


@given(st.binary(max_size=300), st.booleans())
def test_random_bytes_raise_a_typed_error(data: bytes, begins_right: bool) -> None:
    with pytest.raises(TYPED):
        decode(LARGE[:48] + data if begins_right else data)


@given(st.sampled_from(sorted(SMALL, key=str)), st.data(), LEVELS)
def test_lies_under_right_checksums_never_leave_the_buffers(
    key: tuple[torch.dtype, str, str, int], data: st.DataObject, level: tuple[bool, bool]
) -> None:
    """Several bytes anywhere are changed and the checksums made right: other values, or a typed error."""
    message = bytearray(SMALL[key])
    for _ in range(data.draw(st.integers(1, 8))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    guarded = Guarded(700, key[0])
    with contextlib.suppress(*TYPED):
        guarded.decode(seal(message), level)
    assert guarded.are_neighbours_untouched()


HEADER_LIES = {
    "more values": (16, "<Q", N_VALUES + 1),
    "fewer values": (16, "<Q", N_VALUES - 1),
    "overflowing number of values": (16, "<Q", 2**64 - 1),
    "longer message": (24, "<Q", len(LARGE) + 1),
    "more chunks": (32, "<I", 3),
    "no chunks": (32, "<I", 0),
    "overflowing number of chunks": (32, "<I", 2**32 - 1),
    "unknown flag": (36, "<I", 2),
    "unknown dtype": (5, "<B", 3),
    "another dtype": (5, "<B", 1),
    "unknown mode": (6, "<B", 4),
    "mantissa bits that are not there": (7, "<B", 24),
    "unknown table": (8, "<Q", 12345),
    "chunk at the headers": (48, "<Q", 0),
    "chunk beyond the end": (48, "<Q", len(LARGE)),
    "chunk at a wrapping offset": (48, "<Q", 2**64 - 8),
    "chunk inside another": (80, "<Q", 48 + 64),
    "endless exponents": (56, "<I", 2**32 - 1),
    "no exponents": (56, "<I", 0),
    "endless levels": (60, "<I", 2**32 - 1),
    "fewer levels": (60, "<I", 8),
    "endless mantissas": (64, "<I", 2**32 - 1),
    "no mantissas": (64, "<I", 0),
    "chunk of too many values": (68, "<I", 16385),
    "chunk of no values": (68, "<I", 0),
    "unknown chunk flag": (72, "<I", 4),
    "raw exponents that are coded": (72, "<I", 1),
}


@pytest.mark.parametrize("lie", HEADER_LIES)
def test_lie_in_a_header_raises_corrupt_message(lie: str) -> None:
    offset, layout, value = HEADER_LIES[lie]
    message = bytearray(LARGE)
    struct.pack_into(layout, message, offset, value)
    with pytest.raises(CorruptMessage):
        decode(seal(message))


AT_MANTISSAS = 48 + 2 * 32
N_RUN = struct.unpack_from("<I", LARGE_2, 64)[0] // 8
LIES_2 = {
    **{
        lie: HEADER_LIES[lie]
        for lie in (
            "more values",
            "fewer values",
            "overflowing number of values",
            "more chunks",
            "no chunks",
            "overflowing number of chunks",
            "unknown flag",
            "unknown dtype",
            "another dtype",
            "unknown mode",
            "unknown table",
            "chunk at the headers",
            "chunk of no values",
        )
    },
    "longer message": (24, "<Q", len(LARGE_2) + 1),
    "reserved field": (40, "<I", 1),
    "chunk beyond the end": (48, "<Q", len(LARGE_2)),
    "second chunk where the first is": (80, "<Q", 48 + 2 * 32),
    "one byte of exponents more": (56, "<I", struct.unpack_from("<I", LARGE_2, 56)[0] + 1),
    "one byte of exponents less": (56, "<I", struct.unpack_from("<I", LARGE_2, 56)[0] - 1),
    "a word of mantissas more": (64, "<I", 8 * (N_RUN + 4)),
    "a word of mantissas less": (64, "<I", 8 * (N_RUN - 4)),
    "another number of values in the last chunk": (80 + 20, "<I", 899),
    "mode of no importance": (6, "<B", 2),
    "mode of no importance that truncates": (6, "<B", 3),
    "chunk at a wrapping offset": (48, "<Q", 2**64 - 8),
    "chunk inside another": (80, "<Q", 48 + 64),
    "endless exponents": (56, "<I", 2**32 - 1),
    "no exponents": (56, "<I", 0),
    "endless mantissas": (64, "<I", 2**32 - 32),
    "half a word of mantissas": (64, "<I", 8 * N_RUN + 16),
    "mantissas without ends": (64, "<I", 8 * 60),
    "no mantissas": (64, "<I", 0),
    "chunk of too many values": (68, "<I", 16385),
    "unknown chunk flag": (72, "<I", 4),
    "raw exponents that are coded": (72, "<I", 1),
    "mode without importance": (6, "<B", 0),
    "other cap": (7, "<B", 3),
    "cap that is no mantissa": (7, "<B", 24),
    "lane without an end": (AT_MANTISSAS + N_RUN - 64, "<I", 0),
    "lane with other bits left": (AT_MANTISSAS + N_RUN - 64, "<I", 1),
    "last lane with other bits left": (AT_MANTISSAS + N_RUN - 4, "<I", 2**31),
    "stream longer than the segment": (AT_MANTISSAS + N_RUN, "<H", 65535),
    "more escapes than bytes": (AT_MANTISSAS + N_RUN + 8, "<H", 65535),
    "format 1": (4, "<B", 1),
}


@pytest.mark.parametrize("level", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("lie", LIES_2)
def test_lie_in_a_message_of_format_2_raises_corrupt_message(lie: str, level: tuple[bool, bool]) -> None:
    offset, layout, value = LIES_2[lie]
    message = bytearray(LARGE_2)
    struct.pack_into(layout, message, offset, value)
    with pytest.raises(CorruptMessage):
        decode(seal(message), level=level)


@pytest.mark.parametrize("chunk", [0, 1])
def test_checksum_of_importance_that_is_not_the_receivers_raises_rank_mismatch(chunk: int) -> None:
    message = bytearray(LARGE_2)
    message[48 + 32 * chunk + 12] ^= 1
    with pytest.raises(RankMismatch, match=f"chunk {chunk}: the sender derives other importance bytes"):
        decode(seal(message))


@pytest.mark.parametrize("mode", ["none", "uniform", "truncate"])
def test_checksum_of_importance_where_no_mode_asks_for_it_raises_corrupt_message(mode: str) -> None:
    message = bytearray(SMALL[torch.float32, mode, "gaussian", 2])
    message[48 + 12] = 1
    with pytest.raises(CorruptMessage, match="importance"):
        decode(seal(message), n=700)


def test_words_of_mantissas_that_nobody_asks_for_raise_corrupt_message() -> None:
    """A whole word more or less, everything else in order: the lanes then do not end where they began."""
    for change in (-4, 4):
        run = LARGE_2[AT_MANTISSAS : AT_MANTISSAS + N_RUN]
        first = run[:-64] + b"\1\2\3\4" if change > 0 else run[:-68]
        message = bytearray(LARGE_2[:AT_MANTISSAS] + first + run[-64:] + LARGE_2[AT_MANTISSAS + N_RUN :])
        struct.pack_into("<Q", message, 24, len(message))
        struct.pack_into("<I", message, 64, 8 * (N_RUN + change))
        struct.pack_into("<Q", message, 80, struct.unpack_from("<Q", LARGE_2, 80)[0] + change)
        for level in ((False, False), (True, False), (True, True)):
            with pytest.raises(CorruptMessage, match="mantissas"):
                decode(seal(message), level=level)


def test_exponent_that_float16_does_not_have_raises_corrupt_message() -> None:
    message = bytearray(SMALL[torch.float16, "none", "random bits", 2])
    n_run = struct.unpack_from("<I", message, 64)[0] // 8
    assert struct.unpack_from("<I", message, 72)[0] == 1, "raw exponents: one byte a value"
    for exponent in (1, 102, 143, 254):
        message[80 + n_run] = exponent
        with pytest.raises(CorruptMessage, match="out of range"):
            decode(seal(message), torch.float16, 700)


def test_other_importance_bytes_than_the_senders_raise_rank_mismatch_before_a_value_is_decoded() -> None:
    gradient, importance = make_gradient("gaussian", N_VALUES, torch.float32), make_importance(N_VALUES)
    codec = GCompCodec()
    out = torch.empty(codec.max_encoded_bytes(N_VALUES, torch.float32), dtype=torch.uint8)
    message = out[: codec.encode(gradient, out, importance)]
    for position in (0, 16383, 16384, N_VALUES - 1):
        others = importance.clone()
        others[position] ^= 1
        decoded = torch.full((N_VALUES,), 3.0)
        with pytest.raises(RankMismatch, match="hyper-parameters"):
            codec.decode(message, decoded, others)
        chunk = position // 16384
        assert (decoded[16384 * chunk : 16384 * (chunk + 1)] == 3).all()


STREAM_LIES = {
    "stream longer than the segment": (0, 65535),
    "stream shorter than its codes": (0, 1),
    "empty stream": (2, 0),
    "more escapes than bytes": (8, 65535),
}


@pytest.mark.parametrize("lie", STREAM_LIES)
def test_lie_in_an_exponent_segment_raises_corrupt_message(lie: str) -> None:
    position, value = STREAM_LIES[lie]
    message = bytearray(LARGE)
    struct.pack_into("<H", message, 48 + 2 * 32 + position, value)
    with pytest.raises(CorruptMessage):
        decode(seal(message))


@given(st.sampled_from(["huffman_decode_table", "huffman_decode_tree"]), st.binary(max_size=200), st.integers(0, 300))
def test_random_exponent_segment_raises_corrupt_message_or_gives_exponents(decoder: str, data: bytes, n: int) -> None:
    table, exponents = HuffmanTable.prior(torch.float32).native, torch.empty(n, dtype=torch.uint8)
    with contextlib.suppress(CorruptMessage):
        getattr(_native, decoder)(table, torch.tensor(list(data), dtype=torch.uint8), exponents)


def test_newer_format_version_raises_incompatible_version_and_says_which() -> None:
    message = bytearray(LARGE)
    message[4] = 3
    with pytest.raises(IncompatibleVersion, match="version 3"):
        decode(seal(message))


def test_unknown_table_is_named_together_with_the_known_ones() -> None:
    table = HuffmanTable.from_histogram(torch.arange(256))
    codec = GCompCodec("none", table=table)
    gradient = make_gradient("gaussian", 100, torch.float32)
    out = torch.empty(codec.max_encoded_bytes(100, torch.float32), dtype=torch.uint8)
    message = out[: codec.encode(gradient, out)].clone()
    reader = GCompCodec("none")
    with pytest.raises(CorruptMessage) as raised:
        reader.decode(message, torch.empty(100))
    assert f"{table.id:#018x}" in str(raised.value)
    assert f"{HuffmanTable.prior(torch.float32).id:#018x}" in str(raised.value)
    reader.add_table(table)
    reader.decode(message, torch.empty(100))


@pytest.mark.parametrize("n", [0, 1, N_VALUES - 1, N_VALUES + 1])
def test_output_of_another_size_raises_corrupt_message_with_both_sizes(n: int) -> None:
    with pytest.raises(CorruptMessage, match=f"expected {n}, got {N_VALUES}"):
        decode(LARGE, n=n)


def test_output_of_another_dtype_raises_corrupt_message() -> None:
    with pytest.raises(CorruptMessage, match="bfloat16"):
        decode(LARGE, torch.bfloat16)


@pytest.mark.parametrize("read", [describe, message_holds_nonfinite])
def test_reading_the_headers_alone_checks_them(read: object) -> None:
    assert callable(read)
    for bad in (LARGE[:47], LARGE[:-1], b"GWGE" + LARGE[4:], LARGE[:40] + b"\1" + LARGE[41:]):
        with pytest.raises(TYPED):
            read(torch.tensor(list(bad), dtype=torch.uint8))
    with pytest.raises(InvalidArgument):
        read(torch.zeros(10))
