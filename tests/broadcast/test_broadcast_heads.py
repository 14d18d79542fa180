"""Heads say exactly what was put in, and nothing that was altered passes for one."""

from __future__ import annotations

import pytest
import torch

from gradwire.errors import CorruptMessage, IncompatibleVersion, RankMismatch
from gradwire.schemes.aqgb.heads import NO_BLOCK, Head, HeadFormat

FORMAT = HeadFormat(n_blocks=10, world_size=3, configuration=0xABCDEF01, blocks=0x12345678)


def head(**changes: object) -> Head:
    ended = [index % 3 == 0 for index in range(10)]
    told = {"remaining_s": [index / 8 - 0.5 for index in range(10)], "received_bytes": [0, 1 << 40, 7]}
    whole = {
        "origin": 2,
        "block": 9,
        "first_bit": 4,
        "n_bits": 28,
        "is_plain": False,
        "body_bytes": 1_000,
        "sequence": 5,
        "ceiling_bits": 12,
    }
    return Head(**{**whole, "ended": ended, **told, "receiving_us": [3, 0, 1 << 33], **changes})


def packed(of: Head, step: int = 7) -> torch.Tensor:
    message = torch.zeros(FORMAT.n_bytes, dtype=torch.uint8)
    FORMAT.pack(of, step, message)
    return message


@pytest.mark.parametrize(
    "of", [head(), head(block=NO_BLOCK, body_bytes=0, n_bits=0), head(remaining_s=None), head(is_plain=True)]
)
def test_a_head_is_read_as_it_was_written(of):
    assert FORMAT.unpack(packed(of), 7, peer=2) == of


def test_remaining_times_beyond_the_field_are_cut():
    read = FORMAT.unpack(packed(head(remaining_s=[1e9] * 5 + [-1e9] * 5)), 7, peer=2)
    assert read.remaining_s[0] > 2_000 > -2_000 > read.remaining_s[9]


def test_every_flipped_bit_is_noticed():
    message = packed(head())
    for bit in range(8 * message.numel()):
        altered = message.clone()
        altered[bit // 8] ^= 1 << bit % 8
        with pytest.raises((CorruptMessage, IncompatibleVersion)):
            FORMAT.unpack(altered, 7, peer=2)


@pytest.mark.parametrize(
    "changes",
    [
        {"origin": 3},
        {"block": 10},
        {"n_bits": 0},
        {"first_bit": 5},
        {"block": NO_BLOCK},
        {"is_plain": 2},
        {"ceiling_bits": 0},
        {"ceiling_bits": 33},
    ],
)
def test_a_head_out_of_range_is_corrupt(changes):
    with pytest.raises(CorruptMessage):
        FORMAT.unpack(packed(head(**changes)), 7, peer=2)


def test_ranks_that_disagree_are_told_on_what():
    with pytest.raises(RankMismatch, match="step: 8 here, 7 on rank 2"):
        FORMAT.unpack(packed(head()), 8, peer=2)
    other_blocks = HeadFormat(10, 3, 0xABCDEF01, 0x12345679)
    with pytest.raises(RankMismatch, match="blocks"):
        other_blocks.unpack(packed(head()), 7, peer=2)
    other_options = HeadFormat(10, 3, 0xABCDEF02, 0x12345678)
    with pytest.raises(RankMismatch, match="options"):
        other_options.unpack(packed(head()), 7, peer=2)
