"""Damaged, cut and made-up messages of the float codecs give a typed error, and never change a receiver."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
import torch

from float_messages import encode, finite_gradient, same_bits
from gradwire import _native
from gradwire.codecs import Codec
from gradwire.codecs.embedded_float import EmbeddedFloat
from gradwire.codecs.truncated_float import TruncatedFloat
from gradwire.errors import CorruptMessage, IncompatibleVersion

N = 20_000
CODECS: dict[str, Codec] = {
    "embedded 8": EmbeddedFloat(8),
    "embedded 32": EmbeddedFloat(32),
    "truncated 12": TruncatedFloat(12),
    "truncated native 9": TruncatedFloat(9, "native"),
}
each_codec = pytest.mark.parametrize("name", CODECS)


def gradient() -> torch.Tensor:
    values = finite_gradient(2 * N, torch.float32)[:N]
    values[777] = float("inf")
    return values


def seal(message: torch.Tensor, codec: Codec, n_elements: int = N) -> torch.Tensor:
    """The message with checksums of header and chunk table made right."""
    message = message.clone()
    entry_bytes = 8 if codec.name == "embedded-float" else 4
    table = slice(40, 40 + entry_bytes * -(-n_elements // 16384))
    crc = _native.crc32c(message[table], _native.crc32c(message[:36]))
    if codec.name == "truncated-float" and message[18]:
        n_marks = ((n_elements + 255) // 256 + 7) // 8
        crc = _native.crc32c(message[-n_marks:], crc)
    message[36:40] = torch.tensor(list(struct.pack("<I", crc)), dtype=torch.uint8)
    return message


@each_codec
def test_every_flipped_byte_is_noticed(name: str) -> None:
    codec, out = CODECS[name], torch.empty(N)
    message = encode(codec, gradient())
    for place in [*range(60), *range(60, message.numel(), 611), message.numel() - 1]:
        damaged = message.clone()
        damaged[place] ^= 1 << (place % 8)
        with pytest.raises((CorruptMessage, IncompatibleVersion)):
            codec.decode(damaged, out)


@each_codec
def test_every_cut_message_is_noticed(name: str) -> None:
    codec, out = CODECS[name], torch.empty(N)
    message = encode(codec, gradient())
    for n_bytes in [*range(60), *range(60, message.numel(), 997), message.numel() - 1]:
        with pytest.raises(CorruptMessage):
            codec.decode(message[:n_bytes].clone(), out)
    with pytest.raises(CorruptMessage):
        codec.decode(torch.cat([message, torch.zeros(1, dtype=torch.uint8)]), out)


@each_codec
def test_random_bytes_are_no_message(name: str) -> None:
    codec, out = CODECS[name], torch.empty(100)
    generator = torch.Generator().manual_seed(3)
    start = encode(codec, torch.ones(100))[:8]
    for n_bytes in range(0, 300, 7):
        noise = torch.randint(0, 256, (n_bytes,), generator=generator).to(torch.uint8)
        noise[: min(8, n_bytes)] = start[: min(8, n_bytes)]
        with pytest.raises(CorruptMessage):
            codec.decode(noise, out)


@each_codec
def test_another_size_dtype_codec_or_version_is_noticed(name: str) -> None:
    codec = CODECS[name]
    message = encode(codec, gradient())
    for out in (torch.empty(N - 1), torch.empty(N + 1), torch.empty(N, dtype=torch.bfloat16), torch.empty(0)):
        with pytest.raises(CorruptMessage):
            codec.decode(message, out)
    for other in CODECS.values():
        if other.name != codec.name:
            with pytest.raises(CorruptMessage, match="does not begin with"):
                other.decode(message, torch.empty(N))
    newer = message.clone()
    newer[4] = 2
    with pytest.raises(IncompatibleVersion):
        codec.decode(newer, torch.empty(N))


@each_codec
@pytest.mark.parametrize(
    ("offset", "content"),
    [
        (5, b"\x03"),
        (6, b"\x21"),
        (7, b"\x00"),
        (7, b"\x21"),
        (8, struct.pack("<Q", 1 << 63)),
        (8, struct.pack("<Q", (1 << 64) - 1)),
        (16, struct.pack("<H", 0)),
        (16, struct.pack("<H", 48)),
        (16, struct.pack("<H", 2048)),
        (18, b"\x02"),
        (20, b"\x01"),
        (24, struct.pack("<Q", 1 << 40)),
        (32, b"\x01"),
    ],
)
def test_a_header_that_lies_with_right_checksums_is_noticed(name: str, offset: int, content: bytes) -> None:
    codec = CODECS[name]
    message = encode(codec, gradient())
    message[offset : offset + len(content)] = torch.tensor(list(content), dtype=torch.uint8)
    with pytest.raises(CorruptMessage):
        codec.decode(seal(message, codec), torch.empty(N))


def resealed(change: Callable[[torch.Tensor], None], codec: Codec, n_escapes: int = 0) -> torch.Tensor:
    """A message of one chunk, changed, with all checksums right."""
    values = finite_gradient(2000, torch.float32)[:1000]
    message = encode(codec, values)
    change(message)
    entry_bytes = 8 if codec.name == "embedded-float" else 4
    crc = _native.crc32c(message[40 + entry_bytes :])
    message[40:44] = torch.tensor(list(struct.pack("<I", crc)), dtype=torch.uint8)
    return seal(message, codec, 1000)


def test_a_shared_exponent_out_of_range_is_noticed() -> None:
    codec = EmbeddedFloat(8)

    def lower(message: torch.Tensor) -> None:
        message[48] = 30

    def deny_nan(message: torch.Tensor) -> None:
        message[49] = 255

    for change in (lower, deny_nan):
        with pytest.raises(CorruptMessage, match=r"exponent|denies"):
            codec.decode(resealed(change, codec), torch.empty(1000))


def test_escapes_out_of_order_or_range_are_noticed() -> None:
    codec = EmbeddedFloat(32)
    first = 48 + 4 + 4000  # header and table, exponents, planes

    def same_twice(message: torch.Tensor) -> None:
        message[first + 2 : first + 4] = message[first : first + 2]

    def outside(message: torch.Tensor) -> None:
        n_escapes = struct.unpack_from("<I", bytes(message[44:48].tolist()))[0]
        message[first + 2 * n_escapes - 1] = 0x7F

    def infinite(message: torch.Tensor) -> None:
        message[-2:] = torch.tensor([0x80, 0x7F], dtype=torch.uint8)

    for change in (same_twice, outside, infinite):
        with pytest.raises(CorruptMessage, match="escape"):
            codec.decode(resealed(change, codec), torch.empty(1000))
    codec.decode(resealed(lambda message: None, codec), torch.empty(1000))


def test_a_scale_out_of_range_is_noticed() -> None:
    codec = TruncatedFloat(8)
    for scale in (0x0000, 0x0D7F, 0x7F80, 0x7FC0, 0xBF80):

        def change(message: torch.Tensor, scale: int = scale) -> None:
            message[44:46] = torch.tensor(list(struct.pack("<H", scale)), dtype=torch.uint8)

        with pytest.raises(CorruptMessage, match="scale"):
            codec.decode(resealed(change, codec), torch.empty(1000))


def test_a_message_that_does_not_follow_leaves_the_receiver_as_it_was() -> None:
    codec, values = EmbeddedFloat(), gradient()

    def planes(first_bit: int, n_bits: int, partition: int = 256) -> torch.Tensor:
        sender = EmbeddedFloat(partition=partition)
        out = torch.empty(sender.max_plane_bytes(N, torch.float32, first_bit, n_bits), dtype=torch.uint8)
        return out[: sender.encode_planes(values, first_bit, n_bits, out)]

    receiver = codec.receive(N, torch.float32)
    with pytest.raises(CorruptMessage, match="next one to come is 0"):
        receiver.add_planes(planes(4, 4))
    receiver.add_planes(planes(0, 6))
    before, after = torch.empty(N), torch.empty(N)
    receiver.write(before)
    damaged = planes(6, 26).clone()
    damaged[-1] ^= 1
    short = encode(EmbeddedFloat(6), values[:100])
    for message in (planes(0, 6), planes(5, 2), planes(7, 3), planes(6, 2, partition=128), damaged, short):
        with pytest.raises(CorruptMessage):
            receiver.add_planes(message)
        assert receiver.n_bits == 6
        receiver.write(after)
        assert same_bits(after, before)
    receiver.add_planes(planes(6, 26))
    receiver.write(after)
    assert same_bits(after, values)
    with pytest.raises(CorruptMessage):
        receiver.add_planes(planes(31, 1))
    with pytest.raises(CorruptMessage, match="nothing by itself"):
        codec.decode(planes(6, 2), after)
