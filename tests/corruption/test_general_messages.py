"""Damaged, foreign and malicious messages of raw, zlib and zstd give a typed error."""

from __future__ import annotations

import zlib

import pytest
import torch
import zstandard
from torch import Tensor

from gradwire import _native, codecs
from gradwire.errors import CorruptMessage, IncompatibleVersion

NAMES = ["raw", "zlib", "zstd"]
N_ELEMENTS = 300
HEADER_BYTES = 28

each_codec = pytest.mark.parametrize("name", NAMES)


def message_of(name: str) -> Tensor:
    codec = codecs.by_name(name)
    gradient = torch.randn(N_ELEMENTS, generator=torch.Generator().manual_seed(3)).round(decimals=1)
    out = torch.empty(codec.max_encoded_bytes(N_ELEMENTS, torch.float32), dtype=torch.uint8)
    return out[: codec.encode(gradient, out)].clone()


def decode(name: str, message: Tensor, n_elements: int = N_ELEMENTS, dtype: torch.dtype = torch.float32) -> None:
    codecs.by_name(name).decode(message, torch.empty(n_elements, dtype=dtype))


def sealed(message: Tensor) -> Tensor:
    """`message` with its length and checksum put right: what an attacker would send."""
    message[16:24] = torch.tensor(list((message.numel() - HEADER_BYTES).to_bytes(8, "little")), dtype=torch.uint8)
    checksum = _native.crc32c(message[HEADER_BYTES:].clone(), _native.crc32c(message[:24].clone()))
    message[24:28] = torch.tensor(list(checksum.to_bytes(4, "little")), dtype=torch.uint8)
    return message


def with_payload(name: str, payload: bytes) -> Tensor:
    return sealed(torch.cat([message_of(name)[:HEADER_BYTES], torch.tensor(list(payload), dtype=torch.uint8)]))


@each_codec
def test_every_truncation_is_noticed(name: str) -> None:
    message = message_of(name)
    for n_bytes in range(message.numel()):
        with pytest.raises(CorruptMessage):
            decode(name, message[:n_bytes])


@each_codec
def test_bytes_after_the_message_are_noticed(name: str) -> None:
    with pytest.raises(CorruptMessage):
        decode(name, torch.cat([message_of(name), torch.zeros(1, dtype=torch.uint8)]))


@each_codec
def test_every_flipped_bit_is_noticed(name: str) -> None:
    message = message_of(name)
    for position in range(message.numel()):
        for bit in range(8) if position < HEADER_BYTES else [position % 8]:
            damaged = message.clone()
            damaged[position] ^= 1 << bit
            with pytest.raises((CorruptMessage, IncompatibleVersion)):
                decode(name, damaged)


@each_codec
def test_random_bytes_are_noticed(name: str) -> None:
    random = torch.Generator().manual_seed(1)
    for n_bytes in [0, 1, 27, 28, 29, 1000] * 20:
        with pytest.raises(CorruptMessage):
            decode(name, torch.randint(0, 256, (n_bytes,), generator=random, dtype=torch.uint8))


@each_codec
def test_sealed_random_payloads_and_flips_never_crash(name: str) -> None:
    random = torch.Generator().manual_seed(2)
    message = message_of(name)
    for _ in range(500):
        damaged = message.clone()
        at = torch.randint(HEADER_BYTES, message.numel(), (3,), generator=random)
        damaged[at] = torch.randint(0, 256, (3,), generator=random, dtype=torch.uint8)
        try:
            decode(name, sealed(damaged))  # raw, or bits that the format does not use: the values are what was sealed
        except CorruptMessage:
            continue


@each_codec
def test_another_version_is_named(name: str) -> None:
    message = message_of(name)
    message[4] = 2
    with pytest.raises(IncompatibleVersion, match="version 2"):
        decode(name, sealed(message))


@each_codec
def test_another_dtype_or_length_is_noticed(name: str) -> None:
    with pytest.raises(CorruptMessage, match="dtype"):
        decode(name, message_of(name), 2 * N_ELEMENTS, torch.bfloat16)
    with pytest.raises(CorruptMessage, match="expected 301"):
        decode(name, message_of(name), N_ELEMENTS + 1)


@pytest.mark.parametrize(("written", "read"), [("zlib", "zstd"), ("zstd", "zlib"), ("zlib", "raw"), ("zstd", "raw")])
def test_a_message_of_another_method_is_named(written: str, read: str) -> None:
    with pytest.raises(CorruptMessage, match=f"method {written}"):
        decode(read, message_of(written))


@pytest.mark.parametrize("field", [5, 6, 7])
def test_unknown_codes_in_the_header_are_noticed(field: int) -> None:
    message = message_of("raw")
    message[field] = 9
    with pytest.raises(CorruptMessage):
        decode("raw", sealed(message))


@pytest.mark.parametrize("n_bytes", [0, 1, 4 * N_ELEMENTS - 1, 4 * N_ELEMENTS + 1, 10_000_000])
@pytest.mark.parametrize(("name", "compress"), [("zlib", zlib.compress), ("zstd", zstandard.compress)])
def test_a_payload_that_holds_another_number_of_bytes_is_noticed(name: str, compress, n_bytes: int) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CorruptMessage):
        decode(name, with_payload(name, compress(bytes(n_bytes))))


def test_a_zstd_frame_that_claims_terabytes_allocates_none() -> None:
    frame = bytes.fromhex("28b52ffd") + b"\xe0" + (1 << 45).to_bytes(8, "little") + b"\x01\x00\x00"
    with pytest.raises(CorruptMessage, match="expected 1200"):
        decode("zstd", with_payload("zstd", frame))


@pytest.mark.parametrize(("name", "compress"), [("zlib", zlib.compress), ("zstd", zstandard.compress)])
def test_a_stream_that_ends_before_its_payload_is_noticed(name: str, compress) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CorruptMessage):
        decode(name, with_payload(name, compress(bytes(4 * N_ELEMENTS)) + b"\0"))


def test_a_zstd_frame_without_its_content_size_is_noticed() -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(4 * N_ELEMENTS))
    with pytest.raises(CorruptMessage):
        decode("zstd", with_payload("zstd", frame))
