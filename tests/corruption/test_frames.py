"""A frame or preamble that is not what the peer wrote raises a typed error; nothing hangs and nothing is read wrong."""

from __future__ import annotations

import struct
from collections import deque
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire import _native, errors
from gradwire.exchange.frames import HEADER_BYTES, FrameReceiver, FrameSender
from gradwire.telemetry.recorder import Recorder
from gradwire.wire.facts import Facts
from gradwire.wire.preamble import FORMAT_VERSION, Preamble, compare_preambles

FACTS = Facts(configuration=1, layout=2, step=3, bucket=4)
MAX_MESSAGE_BYTES = 2_000


class Wire:
    """Both ends of a stream in one process: what is sent lies in `frames`; receiving from an empty wire is the end."""

    rank, world_size = 0, 2

    def __init__(self) -> None:
        self.frames: deque[torch.Tensor] = deque()
        self.n_sends = self.n_receives = self.n_bytes = 0
        self._scratch: dict[str, torch.Tensor] = {}

    def scratch(self, name: str, n_bytes: int) -> torch.Tensor:
        return self._scratch.setdefault(name, torch.zeros(n_bytes, dtype=torch.uint8))[:n_bytes]

    def isend(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        self.n_sends += 1
        self.n_bytes += tensor.numel()
        self.frames.append(tensor.clone())

    def irecv(self, tensor: torch.Tensor, peer: int, tag: int) -> Any:
        self.n_receives += 1
        return tensor

    def wait(self, work: Any, peer: int) -> None:
        if work is None:
            return
        if not self.frames:
            raise errors.PeerLost("the wire is empty: a real receiver would wait here until its timeout")
        frame = self.frames.popleft()
        work[: frame.numel()].copy_(frame)  # Gloo fills the beginning of a receive that is longer


def messages() -> list[torch.Tensor]:
    return [torch.arange(n, dtype=torch.int64).to(torch.uint8) for n in (5, 0, 2_000, 700, 1)]


def send(wire: Wire, n_ahead: int) -> FrameSender:
    record = Recorder(0, 2).open_bucket(0, 0, 0)
    return FrameSender(wire, 1, 7, FACTS, MAX_MESSAGE_BYTES, n_ahead, record)  # type: ignore[arg-type]


def receive(wire: Wire, n_ahead: int, n_messages: int, facts: Facts = FACTS) -> FrameReceiver:
    record = Recorder(0, 2).open_bucket(0, 0, 0)
    return FrameReceiver(wire, 1, 7, facts, MAX_MESSAGE_BYTES, n_ahead, n_messages, record)  # type: ignore[arg-type]


def written() -> Wire:
    wire = Wire()
    sender = send(wire, 1)
    for message in messages():
        sender.write(message)
    return wire


def read_all(wire: Wire, facts: Facts = FACTS) -> list[torch.Tensor]:
    receiver = receive(wire, 1, len(messages()), facts)
    return [receiver.read().clone() for _ in messages()]


def test_messages_of_any_length_arrive_as_they_were() -> None:
    assert all(torch.equal(a, b) for a, b in zip(read_all(written()), messages(), strict=True))


@settings(max_examples=300, deadline=None)
@given(lengths=st.lists(st.integers(0, 2_000), min_size=1, max_size=30), ahead=st.integers(0, 5))
def test_every_posted_receive_is_answered_and_nothing_but_messages_and_headers_is_sent(
    lengths: list[int], ahead: int
) -> None:
    wire, n = Wire(), len(lengths)
    sender, receiver = send(wire, ahead), receive(wire, ahead, n)
    sent = [torch.full((length,), index, dtype=torch.uint8) for index, length in enumerate(lengths)]
    for number in range(n + ahead):
        if number < n:
            sender.write(sent[number])
        if number >= ahead:
            assert torch.equal(receiver.read(), sent[number - ahead])
    sender.finish()
    assert wire.n_receives == wire.n_sends == n, "a receive that nothing answers would hang"
    assert wire.n_bytes == sum(lengths) + n * HEADER_BYTES


# Offsets in the header: docs/format.md#frame.
@pytest.mark.parametrize(
    ("offset", "layout", "value", "error"),
    [
        (0, "<H", 0x1234, errors.CorruptMessage),  # foreign magic
        (2, "<B", 99, errors.IncompatibleVersion),
        (3, "<B", 1, errors.CorruptMessage),  # flags
        (4, "<I", 2_001, errors.CorruptMessage),  # a message longer than the longest
        (4, "<I", 0xFFFFFFFF, errors.CorruptMessage),
        (8, "<I", 9, errors.CorruptMessage),  # frame number
        (12, "<I", 9, errors.RankMismatch),  # configuration
        (16, "<I", 9, errors.RankMismatch),  # layout
        (20, "<I", 9, errors.RankMismatch),  # step
        (24, "<I", 9, errors.RankMismatch),  # bucket
    ],
)
def test_wrong_header_field_raises_its_error(offset: int, layout: str, value: int, error: type[Exception]) -> None:
    wire = written()
    header = bytearray(wire.frames[0][:28].tolist())
    struct.pack_into(layout, header, offset, value)
    header += struct.pack("<I", _native.crc32c(bytes(header)))  # written so on purpose, by a foreign sender
    wire.frames[0][:HEADER_BYTES] = torch.tensor(list(header), dtype=torch.uint8)
    with pytest.raises(error):
        read_all(wire)


@pytest.mark.parametrize("field", Facts._fields)
def test_disagreement_in_a_frame_is_named(field: str) -> None:
    with pytest.raises(errors.RankMismatch, match=f"disagree on {field}: 77 here, {getattr(FACTS, field)} there"):
        read_all(written(), FACTS._replace(**{field: 77}))


@settings(max_examples=200, deadline=None)
@given(frame=st.integers(0, 4), bit=st.integers(0, 8 * HEADER_BYTES - 1))
def test_flipped_bit_in_a_header_is_found_at_once(frame: int, bit: int) -> None:
    wire = written()
    wire.frames[frame][bit // 8] ^= 1 << bit % 8
    with pytest.raises((errors.CorruptMessage, errors.IncompatibleVersion)):
        read_all(wire)


@settings(max_examples=50, deadline=None)
@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES + MAX_MESSAGE_BYTES))
def test_random_bytes_are_no_frame(raw: bytes) -> None:
    wire = Wire()
    wire.frames.append(torch.tensor(list(raw), dtype=torch.uint8))
    with pytest.raises(errors.CorruptMessage):
        read_all(wire)


def test_frames_out_of_order_are_refused() -> None:
    wire = written()
    wire.frames.rotate(1)
    with pytest.raises(errors.CorruptMessage):
        read_all(wire)


PREAMBLE = Preamble(FORMAT_VERSION, 0, "gcomp", 11, 12, 13, 14)


class Gathering:
    """A communicator whose all_gather returns what the ranks of this test sent."""

    def __init__(self, preambles: list[Preamble]) -> None:
        self.world_size = len(preambles)
        self._rows = torch.stack([torch.tensor(list(p.pack()), dtype=torch.uint8) for p in preambles])

    def all_gather(self, mine: torch.Tensor) -> torch.Tensor:
        return self._rows


@pytest.mark.parametrize("field", Preamble._fields)
def test_preamble_names_the_field_and_the_rank_that_differ(field: str) -> None:
    record = Recorder(0, 4).open_bucket(0, 0, 0)
    odd = PREAMBLE._replace(**{field: "zlib" if field == "scheme" else 3})
    for mine in (PREAMBLE, odd):
        with pytest.raises(errors.RankMismatch) as caught:
            compare_preambles(Gathering([PREAMBLE, PREAMBLE, odd, PREAMBLE]), mine, record)  # type: ignore[arg-type]
        message = str(caught.value)
        assert f"disagree on {field}" in message
        assert f"rank 2: {getattr(odd, field)}; the others: {getattr(PREAMBLE, field)}" in message
        assert "What to do:" in message
    compare_preambles(Gathering([PREAMBLE, PREAMBLE]), PREAMBLE, record)  # type: ignore[arg-type]


def test_preamble_comes_back_as_it_was_in_at_most_64_bytes() -> None:
    longest = Preamble(0xFFFF, 0xFFFF, "a-name-of-16-let", *[0xFFFFFFFF] * 3, 2**64 - 1)
    for preamble in (PREAMBLE, longest):
        assert Preamble.unpack(preamble.pack()) == preamble
    assert len(longest.pack()) <= 64
