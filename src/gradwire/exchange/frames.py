"""Streams of variable-length messages between two ranks: each message travels in a frame of its own.

Point-to-point receives must state a size beforehand, compressed messages do not have one beforehand. So a receiver posts
room for the largest message, and the frame's header says how much of it came: Gloo takes a message that is shorter than
the receive that waits for it (and ends the process for a longer one, so both ends must know the same largest size).

Gloo sends nothing before the receive is posted, so a receiver that posted one at a time would leave the wire idle while
it decodes. Both ends know how many messages a stream has: receives are posted as far ahead as there is room.

Frame: a 32-byte header (docs/format.md#frame), then the message.
"""

from __future__ import annotations

import struct
import time
from collections import deque

import torch
import torch.distributed as dist

from gradwire import _native
from gradwire.errors import CorruptMessage, IncompatibleVersion, RankMismatch
from gradwire.telemetry.recorder import BucketRecord
from gradwire.wire.communicator import Communicator
from gradwire.wire.facts import Facts

FRAME_VERSION = 2
_MAGIC = 0x4757  # "WG"
_HEADER = struct.Struct("<HBBIIIIII")
_CHECKSUM = struct.Struct("<I")  # CRC32C of the header: a wrong length in it would be read from a stale buffer
HEADER_BYTES = _HEADER.size + _CHECKSUM.size


_ADVICE = {
    "configuration": "pass the same scheme and options on every rank",
    "layout": "every rank must hold the same model",
    "step": "resume every rank from the same checkpoint and call backward equally often on all of them",
    "bucket": "every rank must run the same backward pass",
}


class FrameSender:
    """The sending end of one stream.

    Where ranks write `n_ahead` messages before they read the first, `n_ahead` + 1 slots are enough: the peer takes the
    oldest one before it waits for a newer one.
    """

    def __init__(
        self,
        communicator: Communicator,
        peer: int,
        tag: int,
        facts: Facts,
        max_message_bytes: int,
        n_ahead: int,
        record: BucketRecord,
        name: str = "",
    ) -> None:
        """
        Args:
            n_ahead: how many messages are written before the peer's first one is read.
            name: tells streams to one peer apart that are under way at the same time.
        """
        self._communicator, self._peer, self._tag, self._facts, self._record = communicator, peer, tag, facts, record
        self._free = _slots(communicator, f"frames to {peer} {name}", max_message_bytes, n_ahead + 1)
        self._in_flight: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._n_sent = 0

    def write(self, message: torch.Tensor) -> None:
        """Send one message, (n,) uint8; it is copied. Raises: PeerLost."""
        if not self._free:
            self._reclaim()
        slot = self._free.popleft()
        n_bytes = message.numel()
        header = _HEADER.pack(_MAGIC, FRAME_VERSION, 0, n_bytes, self._n_sent, *self._facts)
        header += _CHECKSUM.pack(_native.crc32c(header))
        slot[:HEADER_BYTES].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        frame = slot[: HEADER_BYTES + n_bytes]
        frame[HEADER_BYTES:].copy_(message)
        self._in_flight.append((self._communicator.isend(frame, self._peer, self._tag), slot))
        self._record.count_sent(frame.numel())
        self._n_sent += 1

    def finish(self) -> None:
        """Wait until the peer has taken everything. Raises: PeerLost."""
        while self._in_flight:
            self._reclaim()

    def _reclaim(self) -> None:
        work, slot = self._in_flight.popleft()
        started = time.perf_counter_ns()
        self._communicator.wait(work, self._peer)
        self._record.add("communicate", started, time.perf_counter_ns())
        self._free.append(slot)


class FrameReceiver:
    """The receiving end of one stream."""

    def __init__(
        self,
        communicator: Communicator,
        peer: int,
        tag: int,
        facts: Facts,
        max_message_bytes: int,
        n_ahead: int,
        n_messages: int,
        record: BucketRecord,
        name: str = "",
    ) -> None:
        """
        Args:
            n_ahead, name: as for the sender.
            n_messages: how many will come, and be read.
        """
        self._communicator, self._peer, self._tag, self._facts, self._record = communicator, peer, tag, facts, record
        self._max_message_bytes = max_message_bytes
        # While one is read, at least one more can come.
        n_slots = min(n_messages, max(2, n_ahead + 1))
        self._free = _slots(communicator, f"frames from {peer} {name}", max_message_bytes, n_slots)
        self._posted: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._n_unposted = n_messages
        self._n_received = 0
        self._being_read: torch.Tensor | None = None
        self._post()

    def read(self) -> torch.Tensor:
        """The next message, (n,) uint8, valid until the next read. Raises: CorruptMessage, IncompatibleVersion,
        RankMismatch, PeerLost.
        """
        if self._being_read is not None:
            self._free.append(self._being_read)
            self._post()
        work, slot = self._posted.popleft()
        started = time.perf_counter_ns()
        self._communicator.wait(work, self._peer)
        self._record.add("communicate", started, time.perf_counter_ns())
        n_bytes = self._check_header(bytes(slot[:HEADER_BYTES].tolist()))
        self._record.count_received(HEADER_BYTES + n_bytes)
        self._n_received += 1
        self._being_read = slot
        return slot[HEADER_BYTES : HEADER_BYTES + n_bytes]

    def _post(self) -> None:
        """Post receives for messages to come, as far as there is room."""
        while self._n_unposted and self._free:
            slot = self._free.popleft()
            self._posted.append((self._communicator.irecv(slot, self._peer, self._tag), slot))
            self._n_unposted -= 1

    def _check_header(self, header: bytes) -> int:
        """The bytes of the message behind the header."""
        magic, version, flags, n_bytes, number, *facts = _HEADER.unpack_from(header)
        (checksum,) = _CHECKSUM.unpack_from(header, _HEADER.size)
        if magic == _MAGIC and version != FRAME_VERSION:
            raise IncompatibleVersion(
                f"rank {self._peer} sends frames of version {version}, this build reads {FRAME_VERSION}; "
                "install the same gradwire on every host"
            )
        if (
            (magic, flags, number) != (_MAGIC, 0, self._n_received)
            or checksum != _native.crc32c(header[: _HEADER.size])
            or n_bytes > self._max_message_bytes
        ):
            raise CorruptMessage(
                f"frame {self._n_received} from rank {self._peer} has a header that gradwire did not write "
                f"(bucket {self._facts.bucket}, step {self._facts.step}); "
                "check that all ranks run the same gradwire, and the host's memory and network"
            )
        self._check_facts(Facts(*facts))
        return n_bytes

    def _check_facts(self, theirs: Facts) -> None:
        for field, mine, got in zip(Facts._fields, self._facts, theirs, strict=True):
            if mine != got:
                raise RankMismatch(
                    f"ranks {self._communicator.rank} and {self._peer} disagree on {field}: {mine} here, {got} there "
                    f"(bucket {self._facts.bucket}, step {self._facts.step}). What to do: {_ADVICE[field]}."
                )


def _slots(communicator: Communicator, name: str, max_message_bytes: int, n: int) -> deque[torch.Tensor]:
    slot_bytes = -(-(HEADER_BYTES + max_message_bytes) // 64) * 64  # messages of 2- and 4-byte values stay aligned
    memory = communicator.scratch(name, n * slot_bytes)
    return deque(memory[i * slot_bytes : (i + 1) * slot_bytes] for i in range(n))
