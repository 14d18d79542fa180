"""CRC32C of every instruction set against its table: lengths, offsets, joined pieces."""

from __future__ import annotations

import pytest
import torch

from float_messages import LEVELS, at_level
from gcomp_oracle import CRC_TABLE
from gradwire import _native

# Folding begins at 512 bytes and goes on in steps of 256, three lanes side by side at 3,072.
LENGTHS = [
    *range(301),
    *(edge + near for edge in (512, 768, 1024, 3072, 6144) for near in (-17, -8, -1, 0, 1, 7, 16, 255)),
    100_003,
]


def prefixes(data: bytes, crc: int) -> list[int]:
    """The checksum of each prefix of `data`, from none of it on."""
    state = crc ^ 0xFFFFFFFF
    found = [crc]
    for byte in data:
        state = state >> 8 ^ CRC_TABLE[(state ^ byte) & 0xFF]
        found.append(state ^ 0xFFFFFFFF)
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_checksum_is_the_table_s_at_all_lengths_and_offsets(level: str) -> None:
    data = torch.randint(0, 256, (101_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    with at_level(level):
        assert _native.crc32c(b"123456789") == 0xE3069283  # RFC 3720
        for offset in (0, 1, 2, 3, 5, 7, 8, 13, 31, 33, 63):
            length = LENGTHS[-1] if offset in (0, 13) else 7_000
            for crc in (0, 0xDEADBEEF):
                expected = prefixes(data[offset : offset + length].numpy().tobytes(), crc)
                for n in LENGTHS:
                    if n < len(expected):
                        assert _native.crc32c(data[offset : offset + n], crc) == expected[n], (offset, n)


@pytest.mark.parametrize("level", LEVELS)
def test_checksums_of_neighbours_join(level: str) -> None:
    data = torch.randint(0, 256, (5_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    whole = prefixes(data.numpy().tobytes(), 0)[-1]
    with at_level(level):
        for cut in (0, 1, 255, 511, 512, 513, 1_000, 3_071, 4_999, 5_000):
            assert _native.crc32c(data[cut:], _native.crc32c(data[:cut])) == whole, cut
