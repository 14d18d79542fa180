"""Messages that lie under right checksums, as an attacker would send them, are refused."""

import contextlib
import re
import zlib

import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from written_messages import GCOMP_1, GCOMP_2, N_CHUNKED, WRITTEN, Written, with_infinity

from float_messages import LEVELS, at_level, decode, encode, finite_gradient, planes, same_bits
from gcomp_gradients import make_gradient as gcomp_gradient
from gcomp_gradients import make_importance
from gradwire import _native
from gradwire.codecs.embedded_float import EmbeddedFloat
from gradwire.codecs.gcomp import GCompCodec, HuffmanTable
from gradwire.errors import CorruptMessage, RankMismatch
from sealing import CHUNK, get, put

# Where a field is, and values that it cannot have.
Lie = tuple[int, str, list[int]]
NO_SCALE = [0xBF800000, 0x7F800000, 0x7FC00001]  # negative, infinite, no number
QUANTISED_LIES: dict[str, Lie] = {
    "kind": (5, "<B", [5]),
    "flags": (6, "<B", [1, 2]),  # not finite, yet with values; unknown
    "levels": (7, "<B", [200]),
    "number of values": (8, "<Q", [0, 299, 301, 1 << 63]),
    "block": (16, "<B", [7]),
    "first scale": (20, "<I", NO_SCALE),
    "second scale": (24, "<I", NO_SCALE),
}
GROUP_LIES: dict[str, Lie] = {
    "version without groups": (4, "<B", [1]),
    "kind that has no groups": (5, "<B", [3]),
    "scales a group": (7, "<B", [2, 3]),  # too short for two; none has three
    "values a group": (16, "<B", [63]),
    "number of cuts": (32, "<I", [3, 0xFF0000FF]),
    "first cut": (36, "<B", [0, 200]),  # at 0; not before the second
    "second cut": (41, "<B", [2]),  # past the end
    "scale of a group": (44, "<H", [0x7F80]),
    "code": (-4, "<B", [0xFF]),
}
GENERAL_LIES: dict[str, Lie] = {"method": (5, "<B", [9]), "dtype": (6, "<B", [9]), "reserved": (7, "<B", [9])}
FLOAT_LIES: dict[str, Lie] = {
    "dtype": (5, "<B", [3]), "format or first bit": (6, "<B", [33]), "number of bits": (7, "<B", [0, 33]),
    "number of values": (8, "<Q", [1 << 63, (1 << 64) - 1]), "partition": (16, "<H", [0, 48, 2048]),
    "flags": (18, "<B", [2]), "reserved": (20, "<B", [1]), "length": (24, "<Q", [1 << 40]),
    "second reserved": (32, "<B", [1]),
}  # fmt: skip
RUN = 48 + 2 * 32  # where format 2's mantissas of the first chunk begin
SEGMENT = RUN + get(GCOMP_2.message, 64, "<I") // 8  # and its exponents, which in format 1 begin at RUN


def gcomp_lies(message: Tensor, segment: int) -> dict[str, Lie]:
    n_bytes, n_exponents = message.numel(), get(message, 56, "<I")
    return {
        "format": (4, "<B", [3 - int(message[4])]),
        "dtype": (5, "<B", [1, 3]),
        "mode": (6, "<B", [4]),
        "cap": (7, "<B", [24]),
        "table": (8, "<Q", [12345]),
        "number of values": (16, "<Q", [N_CHUNKED - 1, N_CHUNKED + 1, 2**64 - 1]),
        "length": (24, "<Q", [n_bytes + 1]),
        "number of chunks": (32, "<I", [0, 3, 2**32 - 1]),
        "flags": (36, "<I", [2]),
        "reserved": (40, "<I", [1]),
        "first chunk's place": (48, "<Q", [0, n_bytes, 2**64 - 8]),
        "second chunk's place": (80, "<Q", [RUN]),  # that of the first
        "bytes of exponents": (56, "<I", [0, n_exponents - 1, n_exponents + 1, 2**32 - 1]),
        "bits of mantissas": (64, "<I", [0, 2**32 - 32, 2**32 - 1]),
        "values of a chunk": (68, "<I", [0, 16385]),
        "values of the last chunk": (100, "<I", [899]),
        "chunk's flags": (72, "<I", [1, 4]),  # raw exponents that are coded; unknown
        "first stream": (segment, "<H", [1, 65535]),
        "second stream": (segment + 2, "<H", [0]),
        "escapes": (segment + 8, "<H", [65535]),
    }


LIES: dict[str, dict[str, Lie]] = {
    **{
        name: QUANTISED_LIES | {"other kind": (5, "<B", [(int(WRITTEN[name].message[5]) + 1) % 5])}
        for name in ("one-bit", "two-bit", "ternary", "qsgd", "qsgd wide", "thc")
    },
    "two-bit by groups": GROUP_LIES,
    "raw": GENERAL_LIES,
    **dict.fromkeys((name for name in WRITTEN if "float" in name and "gcomp" not in name), FLOAT_LIES),
    "gcomp 1": gcomp_lies(GCOMP_1.message, RUN) | {"bits of levels": (60, "<I", [8, 2**32 - 1])},
    "gcomp 2": gcomp_lies(GCOMP_2.message, SEGMENT)
    | {
        "mode of no importance": (6, "<B", [0, 2, 3]),
        "other cap": (7, "<B", [3]),
        "words of mantissas": (64, "<I", [8 * 60, *(8 * (SEGMENT - RUN) + bits for bits in (-32, 16, 32))]),
        "first lane's end": (SEGMENT - 64, "<I", [0, 1]),
        "last lane's end": (SEGMENT - 4, "<I", [2**31]),
    },
}


@pytest.mark.parametrize(
    ("name", "lie"),
    [pytest.param(name, lie, id=f"{name}: {what}") for name, lies in LIES.items() for what, lie in lies.items()],
)
def test_a_lie_under_right_checksums_is_refused(name: str, lie: Lie) -> None:
    at, layout, values = lie
    for value in values:
        for level in LEVELS:
            with at_level(level), pytest.raises(CorruptMessage):
                WRITTEN[name].read(WRITTEN[name].with_lie(at, layout, value))


def test_sealed_messages_without_their_end_are_refused() -> None:
    written = WRITTEN["two-bit by groups"]
    for end in (-4, 34):
        with pytest.raises(CorruptMessage):
            written.read(written.sealed(written.message[:end].clone()))


FLOATS = finite_gradient(2_000, torch.float32)[:1_000]
OF_FLOATS = {"embedded": Written("embedded-float", FLOATS, bits=8), "truncated": Written("truncated-float", FLOATS)}


@pytest.mark.parametrize(
    ("name", "at", "layout", "value", "match"),
    [
        # within a vector, and in the rest
        *((name, at, "<B", 0xFF, "code") for name in ("two-bit", "ternary") for at in (32, 32 + 74)),
        *(("qsgd wide", at, "<B", 0x7F, "code") for at in (32 + 12, -64)),
        *(("qsgd of 5 levels", at, "<B", 0x7F, "code") for at in (32 + 12, -32)),
        *((name, at, "<I", norm, "") for name, at in (("qsgd", 32), ("thc", 48)) for norm in (0x7FC00000, 0xBF800000)),
        # after header and table: the exponents of four partitions, the planes, the escapes' places and values
        ("embedded", 48, "<B", 30, "exponent"),
        ("embedded", 49, "<B", 255, "denies"),
        ("embedded-float whole", 48 + 4 + 4_000 + 2, "<H", 500, "escape"),  # as the first, or past those that follow
        ("embedded-float whole", 48 + 4 + 4_000 + 1, "<B", 0x7F, "escape"),  # past the values
        ("embedded-float whole", -2, "<H", 0x7F80, "escape"),  # not finite
        *(("truncated", 44, "<H", scale, "scale") for scale in (0x0000, 0x0D7F, 0x7F80, 0x7FC0, 0xBF80)),
    ],
)
def test_codes_norms_and_scales_that_no_encoder_writes_are_refused(
    name: str, at: int, layout: str, value: int, match: str
) -> None:
    written = (WRITTEN | OF_FLOATS)[name]
    with pytest.raises(CorruptMessage, match=match or None):
        written.read(written.with_lie(at, layout, value))
    written.read(written.sealed(written.message.clone()))


BYTES = 4 * 300
PAYLOADS = {
    **{f"zlib of {n} bytes": ("zlib", zlib.compress(bytes(n))) for n in (0, 1, BYTES - 1, BYTES + 1, 10_000_000)},
    **{f"zstd of {n} bytes": ("zstd", zstandard.compress(bytes(n))) for n in (0, 1, BYTES - 1, BYTES + 1, 10_000_000)},
    "zlib that ends early": ("zlib", zlib.compress(bytes(BYTES)) + b"\0"),
    "zstd that ends early": ("zstd", zstandard.compress(bytes(BYTES)) + b"\0"),
    "zstd without its size": ("zstd", zstandard.ZstdCompressor(write_content_size=False).compress(bytes(BYTES))),
    "zstd that claims terabytes": ("zstd", b"\x28\xb5\x2f\xfd\xe0" + (1 << 45).to_bytes(8, "little") + b"\1\0\0"),
}


@pytest.mark.parametrize(("name", "payload"), PAYLOADS.values(), ids=PAYLOADS)
def test_a_payload_of_other_bytes_is_refused_and_none_are_allocated(name: str, payload: bytes) -> None:
    written = WRITTEN[name]
    message = torch.cat([written.message[:28], torch.frombuffer(bytearray(payload), dtype=torch.uint8)])
    with pytest.raises(CorruptMessage, match="expected 1200" if payload[-3:] == b"\1\0\0" else None):
        written.read(written.sealed(message))


def test_a_message_that_does_not_follow_leaves_the_receiver_as_it_was() -> None:
    codec, values = EmbeddedFloat(), with_infinity(N_CHUNKED)

    def bits(first_bit: int, n_bits: int, partition: int = 256, format: int = 2) -> Tensor:
        return planes(EmbeddedFloat(partition=partition, format=format), values, first_bit, n_bits)

    receiver = codec.receive(N_CHUNKED, torch.float32)
    with pytest.raises(CorruptMessage, match="next one to come is 0"):
        receiver.add_planes(bits(4, 4))
    receiver.add_planes(bits(0, 6))
    before, after = torch.empty(N_CHUNKED), torch.empty(N_CHUNKED)
    receiver.write(before)
    damaged = bits(6, 26)
    damaged[-1] ^= 1
    others = [bits(*one) for one in ((0, 6), (5, 2), (7, 3), (6, 2, 128), (6, 2, 256, 1))]  # other bits or settings
    for message in (*others, damaged, encode(EmbeddedFloat(6), values[:100])):
        with pytest.raises(CorruptMessage):
            receiver.add_planes(message)
        assert receiver.n_bits == 6
        receiver.write(after)
        assert same_bits(after, before)
    receiver.add_planes(bits(6, 26))
    receiver.write(after)
    assert same_bits(after, values)
    with pytest.raises(CorruptMessage):
        receiver.add_planes(bits(31, 1))
    with pytest.raises(CorruptMessage, match="nothing by itself"):
        codec.decode(bits(6, 2), after)


def test_importance_bytes_that_are_not_the_senders_raise_rank_mismatch_before_a_value_is_decoded() -> None:
    for place in (0, CHUNK - 1, CHUNK, N_CHUNKED - 1):
        others, decoded = make_importance(N_CHUNKED), torch.full((N_CHUNKED,), 3.0)
        others[place] ^= 1
        with pytest.raises(RankMismatch, match="hyper-parameters"):
            GCOMP_2.codec.decode(GCOMP_2.message, decoded, others)
        chunk = place // CHUNK
        assert (decoded[CHUNK * chunk : CHUNK * (chunk + 1)] == 3).all()
        with pytest.raises(RankMismatch, match=f"chunk {chunk}: the sender derives other importance bytes"):
            GCOMP_2.read(GCOMP_2.with_lie(60 + 32 * chunk, "<B", int(GCOMP_2.message[60 + 32 * chunk]) ^ 1))


@pytest.mark.parametrize("mode", ["none", "uniform", "truncate"])
def test_a_checksum_of_importance_where_no_mode_asks_for_it_is_refused(mode: str) -> None:
    written = next(one for name, one in WRITTEN.items() if name.startswith(f"gcomp 2 {mode} torch.float32"))
    with pytest.raises(CorruptMessage, match="importance"):
        written.read(written.with_lie(60, "<B", 1))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("change", [-4, 4])
def test_words_of_mantissas_that_nobody_asks_for_are_refused(change: int, level: str) -> None:
    """A whole word more or less, everything else in order: the lanes then do not end where they began."""
    first, ends = GCOMP_2.message[RUN : SEGMENT - 64], GCOMP_2.message[SEGMENT - 64 : SEGMENT]
    first = torch.cat([first, torch.arange(4, dtype=torch.uint8)]) if change > 0 else first[:-4]
    message = torch.cat([GCOMP_2.message[:RUN], first, ends, GCOMP_2.message[SEGMENT:]])
    put(message, 24, "<Q", message.numel())
    put(message, 64, "<I", 8 * (SEGMENT - RUN + change))
    put(message, 80, "<Q", get(message, 80, "<Q") + change)
    with at_level(level), pytest.raises(CorruptMessage, match="mantissas"):
        GCOMP_2.read(GCOMP_2.sealed(message))


def test_exponents_that_float16_does_not_have_are_refused() -> None:
    written = Written("gcomp", gcomp_gradient("random bits", 700, torch.float16), importance="none")
    assert get(written.message, 72, "<I") == 1, "raw exponents: one byte a value"
    for exponent in (1, 102, 143, 254):
        with pytest.raises(CorruptMessage, match="out of range"):
            written.read(written.with_lie(80 + get(written.message, 64, "<I") // 8, "<B", exponent))


@given(st.sampled_from(["huffman_decode_table", "huffman_decode_tree"]), st.binary(max_size=200), st.integers(0, 300))
def test_random_exponent_segment_raises_corrupt_message_or_gives_exponents(decoder: str, data: bytes, n: int) -> None:
    table, exponents = HuffmanTable.prior(torch.float32).native, torch.empty(n, dtype=torch.uint8)
    with contextlib.suppress(CorruptMessage):
        getattr(_native, decoder)(table, torch.tensor(list(data), dtype=torch.uint8), exponents)


def test_an_unknown_table_is_named_together_with_the_known_ones() -> None:
    table, reader = HuffmanTable.from_histogram(torch.arange(256)), GCompCodec("none")
    message = encode(GCompCodec("none", table=table), gcomp_gradient("gaussian", 100, torch.float32))
    with pytest.raises(CorruptMessage, match=f"{table.id:#018x}") as raised:
        decode(reader, message, 100)
    assert re.search(f"{HuffmanTable.prior(torch.float32).id:#018x}", str(raised.value))
    reader.add_table(table)
    decode(reader, message, 100)
