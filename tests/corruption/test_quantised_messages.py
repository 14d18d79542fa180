"""Damaged, foreign and malicious messages of the quantisers give a typed error, never a crash or a wrong tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire import _native, codecs
from gradwire.codecs.quantised import describe
from gradwire.errors import CorruptMessage, IncompatibleVersion
from quantiser_oracles import encode, make_gradient

CODECS: list[tuple[str, dict[str, Any]]] = [
    ("one-bit", {}),
    ("two-bit", {}),
    ("ternary", {}),
    ("qsgd", {"block": 128}),
    ("qsgd", {"levels": 100, "block": 128}),
    ("thc", {}),
]
N_ELEMENTS, HEADER_BYTES, CHECKSUM_AT = 300, 32, 28

each_codec = pytest.mark.parametrize(("name", "options"), CODECS, ids=str)


def message_of(name: str, options: dict[str, Any]) -> Tensor:
    return encode(codecs.by_name(name, **options), make_gradient(N_ELEMENTS))


def decode(name: str, message: Tensor, n_elements: int = N_ELEMENTS, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.zeros(n_elements, dtype=dtype)
    codecs.by_name(name).decode(message, out)
    return out


def sealed(message: Tensor) -> Tensor:
    """`message` with its checksum put right: what an attacker would send."""
    checksum = _native.crc32c(message[HEADER_BYTES:].clone(), _native.crc32c(message[:CHECKSUM_AT].clone()))
    message[CHECKSUM_AT:HEADER_BYTES] = torch.tensor(list(checksum.to_bytes(4, "little")), dtype=torch.uint8)
    return message


def altered(message: Tensor, at: int, *values: int) -> Tensor:
    damaged = message.clone()
    damaged[at : at + len(values)] = torch.tensor(values, dtype=torch.uint8)
    return sealed(damaged)


@each_codec
def test_every_truncation_and_every_flipped_bit_is_noticed(name: str, options: dict[str, Any]) -> None:
    message = message_of(name, options)
    for n_bytes in range(message.numel()):
        with pytest.raises(CorruptMessage):
            decode(name, message[:n_bytes])
    with pytest.raises(CorruptMessage):
        decode(name, torch.cat([message, torch.zeros(1, dtype=torch.uint8)]))
    for position in range(message.numel()):
        for bit in range(8) if position < HEADER_BYTES else [position % 8]:
            damaged = message.clone()
            damaged[position] ^= 1 << bit
            with pytest.raises((CorruptMessage, IncompatibleVersion)):
                decode(name, damaged)


@each_codec
def test_random_bytes_are_noticed_and_sealed_ones_never_crash(name: str, options: dict[str, Any]) -> None:
    random = torch.Generator().manual_seed(1)
    for n_bytes in [0, 1, 31, 32, 33, 1_000] * 20:
        with pytest.raises(CorruptMessage):
            decode(name, torch.randint(0, 256, (n_bytes,), generator=random, dtype=torch.uint8))
    message = message_of(name, options)
    for _ in range(500):
        damaged = message.clone()
        places = torch.randint(0, message.numel(), (4,), generator=random)
        damaged[places] = torch.randint(0, 256, (4,), generator=random, dtype=torch.uint8)
        n_bytes = int(torch.randint(HEADER_BYTES, message.numel() + 1, (1,), generator=random))
        for hostile in (sealed(damaged), sealed(damaged[:n_bytes].clone())):
            try:
                values = decode(name, hostile)
            except (CorruptMessage, IncompatibleVersion):
                continue
            assert values.isfinite().all() or values.isnan().all()


@each_codec
def test_lies_in_the_header_are_noticed(name: str, options: dict[str, Any]) -> None:
    message = message_of(name, options)
    huge = (1 << 63).to_bytes(8, "little")
    lies = {
        "magic": altered(message, 0, 0x46),
        "kind": altered(message, 5, 5),
        "other kind": altered(message, 5, (int(message[5]) + 1) % 5),
        "flags": altered(message, 6, 2),
        "not finite, yet with values": altered(message, 6, 1),
        "levels": altered(message, 7, 200),
        "fewer values": altered(message, 8, 43, 1),
        "countless values": altered(message, 8, *huge),
        "block": altered(message, 16, 7),
        "negative scale": altered(message, 23, 0xBF),
        "infinite scale": altered(message, 20, 0, 0, 0x80, 0x7F),
        "scale that is no number": altered(message, 24, 1, 0, 0xC0, 0x7F),
    }
    for lie in lies.values():
        with pytest.raises(CorruptMessage):
            decode(name, lie)
    with pytest.raises(IncompatibleVersion, match="version 3"):
        decode(name, altered(message, 4, 3))
    with pytest.raises(CorruptMessage):
        decode(name, message, N_ELEMENTS + 1)
    with pytest.raises(CorruptMessage):
        decode(name, message, 0)
    assert describe(message)["codec"] == name
    with pytest.raises(CorruptMessage):
        describe(message[:-1])


def test_codes_that_no_encoder_writes_are_noticed() -> None:
    for at in (HEADER_BYTES, HEADER_BYTES + 74):  # within a vector, and in the rest
        for name in ("two-bit", "ternary"):
            with pytest.raises(CorruptMessage, match="code"):
                decode(name, altered(message_of(name, {}), at, 0xFF))
    for levels in (5, 100):
        message = message_of("qsgd", {"levels": levels, "block": 128})
        for at in (HEADER_BYTES + 12, message.numel() - 64 if levels == 100 else message.numel() - 32):
            with pytest.raises(CorruptMessage, match="code"):
                decode("qsgd", altered(message, at, 0x7F))
    for name, at in (("qsgd", HEADER_BYTES), ("thc", HEADER_BYTES + 16)):
        for norm in ((0, 0, 0xC0, 0x7F), (0, 0, 0x80, 0xBF)):
            with pytest.raises(CorruptMessage):
                decode(name, altered(message_of(name, {}), at, *norm))
