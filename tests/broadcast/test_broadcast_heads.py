"""Heads say exactly what docs/format.md says, and nothing that was altered passes for one. The peer is written here."""

import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from float_messages import planes
from gradwire import _native
from gradwire.codecs.embedded_float import EmbeddedFloat
from gradwire.errors import CorruptMessage, IncompatibleVersion, RankMismatch
from meshes import at_once, meshes

N_BLOCKS, WORLD, STREAM, STEP = 10, 3, 6, 7
CONFIGURATION, BLOCKS = 0xABCDEF01, 0x12345678
SIZES = [300 + index for index in range(N_BLOCKS)]
NO_BLOCK = 0xFFFF
FIXED = struct.Struct("<HBBHHBBHIIIII")
TAIL = struct.Struct(f"<2s{N_BLOCKS}i{WORLD}Q{WORLD}Q2Q")
HEAD_BYTES = FIXED.size + TAIL.size + 4
PADDED = -(-HEAD_BYTES // 64) * 64


def head(**changes: int | list[int]) -> bytearray:
    """A head of rank 2 as the document has it: alone, unless `changes` say otherwise."""
    fields: dict[str, Any] = {
        "magic": 0x4257, "version": 4, "flags": 0, "origin": 2, "block": NO_BLOCK, "first_bit": 0, "n_bits": 0,
        "ceiling_bits": 12, "body_bytes": 0, "sequence": 0, "step": STEP, "configuration": CONFIGURATION,
        "blocks": BLOCKS, "ended": 0, "remaining": [125_000 * index - 500_000 for index in range(N_BLOCKS)],
        "received": [0, 1 << 40, 7], "receiving": [3, 0, 1 << 33], "hidden": [5, 1 << 35],
    }  # fmt: skip
    fields |= changes
    ended, remaining, received, receiving, hidden = (
        fields.pop(name) for name in ("ended", "remaining", "received", "receiving", "hidden")
    )
    raw = FIXED.pack(*fields.values()) + TAIL.pack(
        ended.to_bytes(2, "little"), *remaining, *received, *receiving, *hidden
    )
    return bytearray(raw + struct.pack("<I", _native.crc32c(raw)))


class Peer:
    """Rank 2 as bytes, beside a `Broadcast` on rank 0."""

    def __init__(self, meshes: list[_native.Mesh], broadcast: _native.Broadcast) -> None:
        self.meshes, self.broadcast = meshes, broadcast

    def say(self, raw: bytes | bytearray, body: bytes = b"") -> None:
        padded = bytes(raw).ljust(PADDED, b"\0") + body
        self.meshes[2].send([0], STREAM, [torch.frombuffer(bytearray(padded), dtype=torch.uint8)])

    def told(self, raw: bytes | bytearray, body: bytes = b"") -> Any:
        self.say(raw, body)
        return self.broadcast.receive(STEP, 1)


@pytest.fixture
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    topology = getattr(request, "param", 0)
    shapes = [(f"part.{index}", n, 0) for index, n in enumerate(SIZES)]
    others = [[peer for peer in range(WORLD) if peer != rank] for rank in range(WORLD)]
    with meshes(WORLD, 20) as made:
        broadcast, *_ = at_once(
            lambda: _native.Broadcast(made[0], STREAM, topology, shapes, 256, 2, CONFIGURATION, BLOCKS),
            *[lambda r=r: made[r].open(STREAM, (0, 0, 0, 0), 100_000, others[r]) for r in (1, 2)],
        )
        broadcast.begin(STEP)
        yield Peer(made, broadcast)


def test_head_is_read_as_the_document_has_it(peer: Peer) -> None:
    origin, block, body_bytes, forwarded, received, receiving, remaining_s, ceiling, ended, *rest = peer.told(
        head(ended=0b1001001001)
    )
    assert (origin, block, body_bytes, forwarded, received, receiving, ceiling) == (2, None, 0, [], 1 << 40, 0, 12)
    assert remaining_s == pytest.approx([index / 8 - 0.5 for index in range(N_BLOCKS)], abs=0.01)
    assert ended == [0, 3, 6, 9]
    assert rest[-1] == [5, 1 << 35]
    assert peer.told(head(sequence=1, ended=0b1001001011))[8] == [1]
    unknown = peer.told(head(sequence=2, remaining=[-(1 << 31)] * N_BLOCKS, ended=0b1001001011))
    assert (unknown[6], unknown[8]) == (None, [])


def test_head_is_written_as_the_document_has_it(peer: Peer) -> None:
    gradient = torch.randn(SIZES[4], generator=torch.Generator().manual_seed(1))
    n_body = peer.broadcast.encode(4, gradient.view(torch.uint8), 0, 9)
    assert peer.broadcast.queued_bytes == 2 * [_native.MESSAGE_HEADER_BYTES + PADDED + n_body]
    peer.broadcast.send([4, 9], 17, [1e9, -1e9, *([0.25] * (N_BLOCKS - 2))], [8, 9])
    peer.broadcast.send([0], 32, None, [8, 9])
    for mesh in peer.meshes[1:]:
        source, message, _ = mesh.receive_any(STREAM, [0])
        assert (source, message.numel()) == (0, PADDED + n_body)
        most = (1 << 31) - 1
        remaining = [most, -most, *([250_000] * (N_BLOCKS - 2))]
        expected = head(
            origin=0, block=4, n_bits=9, ceiling_bits=17, body_bytes=n_body, ended=1 << 4 | 1 << 9, remaining=remaining,
            received=[0] * 3, receiving=[0] * 3, hidden=[8, 9],
        )  # fmt: skip
        assert bytes(message[:PADDED].tolist()) == bytes(expected).ljust(PADDED, b"\0")
        decoded, direct = torch.empty_like(gradient), torch.empty_like(gradient)
        codec = EmbeddedFloat()
        codec.decode(message[PADDED:].clone(), decoded)
        codec.quantise(gradient, 9, direct)
        assert torch.equal(decoded, direct)
        _, alone, _ = mesh.receive_any(STREAM, [0])
        expected = head(
            origin=0, ceiling_bits=32, sequence=1, ended=1 | 1 << 4 | 1 << 9, remaining=[-(1 << 31)] * N_BLOCKS,
            received=[0] * 3, receiving=[0] * 3, hidden=[8, 9],
        )  # fmt: skip
        assert bytes(alone.tolist()) == bytes(expected).ljust(PADDED, b"\0")


def test_every_flipped_bit_is_noticed(peer: Peer) -> None:
    whole = head()
    for bit in range(8 * len(whole)):
        altered = bytearray(whole)
        altered[bit // 8] ^= 1 << bit % 8
        with pytest.raises((CorruptMessage, IncompatibleVersion)):
            peer.told(altered)
    assert peer.told(whole)[0] == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"origin": 3},
        {"origin": 1},  # not what comes from rank 2
        {"origin": 0},
        {"block": 10, "n_bits": 4},
        {"block": 9},
        {"block": 9, "first_bit": 5, "n_bits": 28},
        {"body_bytes": 1},
        {"flags": 4},
        {"flags": 2, "block": 0, "n_bits": 4},  # an answer, where nobody owns a part
        {"ceiling_bits": 0},
        {"ceiling_bits": 33},
        {"sequence": 1},
        {"ended": 1 << N_BLOCKS},
        {"block": 0, "n_bits": 4, "body_bytes": 4 * SIZES[0]},  # more than these bits make
        {"block": 0, "n_bits": 4, "body_bytes": 10},
        {"block": 0, "n_bits": 32, "body_bytes": 4 * SIZES[0]},  # all bits, but not as words
        {"block": 0, "n_bits": 4, "flags": 1, "body_bytes": 4 * SIZES[0]},
        {"block": 0, "n_bits": 32, "flags": 1, "body_bytes": 4 * SIZES[0] - 4},
    ],
)
def test_head_out_of_range_is_corrupt(peer: Peer, changes: dict[str, int]) -> None:
    with pytest.raises(CorruptMessage):
        peer.told(head(**changes), bytes(changes.get("body_bytes", 0)))


def test_message_that_is_not_its_head_s_is_corrupt(peer: Peer) -> None:
    peer.meshes[2].send([0], STREAM, [torch.zeros(HEAD_BYTES - 1, dtype=torch.uint8)])
    with pytest.raises(CorruptMessage, match="fewer than a head has"):
        peer.broadcast.receive(STEP, 1)
    with pytest.raises(CorruptMessage, match="announced a body of 0 bytes and sent"):
        peer.told(head(), b"1234")


def body(n_bits: int, first_bit: int = 0, block: int = 0) -> bytes:
    gradient = torch.randn(SIZES[block], generator=torch.Generator().manual_seed(2))
    return bytes(planes(EmbeddedFloat(), gradient, first_bit, n_bits).tolist())


def test_bits_that_are_not_the_next_ones_are_corrupt(peer: Peer) -> None:
    first = body(4)
    assert peer.told(head(block=0, n_bits=4, body_bytes=len(first)), first)[1] == 0
    with pytest.raises(CorruptMessage, match=r"announced bits 0 to 4 of block 'part.0' and sent others"):
        peer.told(head(block=0, n_bits=4, body_bytes=len(first), sequence=1), first)
    later = body(3, first_bit=5)
    with pytest.raises(CorruptMessage, match="announced bits 5 to 8"):
        peer.told(head(block=0, first_bit=5, n_bits=3, body_bytes=len(later), sequence=2), later)
    with pytest.raises(CorruptMessage):  # the head says what is due, the body is another
        peer.told(head(block=0, first_bit=4, n_bits=3, body_bytes=len(later), sequence=3), later)
    damaged = bytearray(body(4, block=1))
    damaged[-1] ^= 1
    with pytest.raises(CorruptMessage):
        peer.told(head(block=1, n_bits=4, body_bytes=len(damaged), sequence=4), bytes(damaged))


def test_block_that_was_ended_unsent_is_corrupt(peer: Peer) -> None:
    gradient = torch.ones(SIZES[0])
    peer.broadcast.encode(0, gradient.view(torch.uint8), 0, 4)
    with pytest.raises(CorruptMessage, match=r"rank 1 said that block 'part.0' is complete before it sent any of it"):
        peer.broadcast.mean(0, gradient.view(torch.uint8), 0, None)


@pytest.mark.parametrize("peer", [2], indirect=True)
def test_an_answer_is_taken_once_the_part_was_sent_and_until_the_last_one(peer: Peer) -> None:
    answer, sums = {"block": 0, "n_bits": 32, "flags": 3, "body_bytes": 400}, torch.ones(100).numpy().tobytes()
    with pytest.raises(CorruptMessage, match="before it had anything of it"):
        peer.told(head(**answer), sums)
    peer.broadcast.encode(0, torch.zeros(SIZES[0]).view(torch.uint8), 0, 4)
    with pytest.raises(CorruptMessage, match="bytes for 32 bits"):
        peer.told(head(**answer | {"sequence": 1, "body_bytes": 404}), sums + bytes(4))
    assert peer.told(head(**answer, sequence=2, ended=1), sums)[8] == [0]
    with pytest.raises(CorruptMessage, match="after its last answer"):
        peer.told(head(**answer, sequence=3, ended=1), sums)


def test_ranks_that_disagree_are_told_on_what(peer: Peer) -> None:
    with pytest.raises(RankMismatch, match="step: 7 here, 8 on rank 2"):
        peer.told(head(step=8))
    with pytest.raises(RankMismatch, match="blocks: 305419896 here, 305419897 on rank 2"):
        peer.told(head(blocks=BLOCKS + 1))
    with pytest.raises(RankMismatch, match="options"):
        peer.told(head(configuration=CONFIGURATION + 1))
    with pytest.raises(IncompatibleVersion, match="version 3"):
        peer.told(head(version=3))
