"""Streams of variable-length messages between two ranks, in frames of one fixed size.

Point-to-point receives must know their size beforehand, compressed messages do not have one beforehand. So a stream
travels in frames of a size that both ends derive from what they share; each frame says how many of its bytes count and
how many more frames are certain to follow: so many receives may be posted ahead. Gloo sends nothing before the receive
is posted, so without that the wire rests while a receiver decodes; the sender therefore promises a few frames beyond what
it has written. A frame is closed early, and padded, only when the peer would otherwise wait for bytes that lie in it, or
to keep a promise.

Frame: a 40-byte header (docs/format.md#frame), then payload, then padding that is sent but not read.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradwire import _native
from gradwire.communicator import Communicator
from gradwire.errors import CorruptMessage, IncompatibleVersion, RankMismatch
from gradwire.telemetry.recorder import BucketRecord

FRAME_VERSION = 1
_MAGIC = 0x4757  # "WG"
_HEADER = struct.Struct("<HBBIIIIIIII")
_CHECKSUM = struct.Struct("<I")  # CRC32C of the header: a wrong length in it would make the receiver wait for nothing
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_LENGTH = struct.Struct("<I")  # every message in the stream is preceded by its length
# Receives posted ahead of the one being read: enough that the network never waits for this rank's lane to wake up.
_RECEIVES_AHEAD = 4

_MAX_FRAME_BYTES = 1 << 18


class Facts(NamedTuple):
    """What both ends of a stream must agree on; carried by every frame, compared on receipt."""

    configuration: int
    layout: int
    step: int
    bucket: int


_ADVICE = {
    "configuration": "pass the same scheme and options on every rank",
    "layout": "every rank must hold the same model",
    "step": "resume every rank from the same checkpoint and call backward equally often on all of them",
    "bucket": "every rank must run the same backward pass",
}


def promised_frames(n_messages: int) -> int:
    """How many frames the sender of a stream keeps promised ahead of what it has sent.

    Promises end up as frames that are closed early, each half padding: one for every eighth message stays at a few per
    cent of the stream.
    """
    return min(n_messages, _RECEIVES_AHEAD, max(1, n_messages // 8))


def frame_bytes_for(raw_part_bytes: int, max_message_bytes: int = _MAX_FRAME_BYTES) -> int:
    """The frame size for streams that carry parts of up to `raw_part_bytes` uncompressed bytes.

    No frame is larger than one message needs: messages of a quantiser are a thirtieth of their values, and a frame that
    waits for more of them would leave mostly empty.

    Padding is half a frame on average where a stream stops for its peer: a sixteenth of the part where it has one
    message, under 1 % of what a rank sends with 256 KiB frames and 6 MB parts. Each frame costs its sender and its
    receiver a call and a wake-up: with 64 KiB frames the ranks' CPU time for a 25 MB ring was twice as high.
    """
    wanted = min(raw_part_bytes // 8, max_message_bytes + _LENGTH.size)
    return HEADER_BYTES + min(_MAX_FRAME_BYTES, max(512, -(-wanted // 64) * 64))


class FrameSender:
    """The sending end of one stream."""

    def __init__(
        self,
        communicator: Communicator,
        peer: int,
        tag: int,
        facts: Facts,
        frame_bytes: int,
        unread_bytes: int,
        n_messages: int,
        record: BucketRecord,
        name: str = "",
    ) -> None:
        """
        Args:
            unread_bytes: what the peer may leave unread for now; as many bytes can be sent without waiting.
            n_messages: how many will be written; the last one leaves at once.
            name: tells streams to one peer apart that are under way at the same time.
        """
        self._communicator, self._peer, self._tag, self._facts, self._record = communicator, peer, tag, facts, record
        self._frame_bytes = frame_bytes
        self._payload_bytes = frame_bytes - HEADER_BYTES
        # Frames that are closed early to keep a promise come on top of those that the bytes fill.
        n_slots = unread_bytes // self._payload_bytes + 2 + promised_frames(n_messages)
        memory = communicator.scratch(f"frames to {peer} {name}", n_slots * frame_bytes)
        self._free = deque(memory[i * frame_bytes : (i + 1) * frame_bytes] for i in range(n_slots))
        self._in_flight: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._frame: torch.Tensor | None = None
        self._used = 0
        self._n_sent = 0
        self._unsent_messages: deque[int] = deque()  # how many bytes of each lie in the open frame, or 0
        # Never more frames are owed than there are messages whose end is not sent: each can be made to end a frame.
        self._n_unwritten = n_messages
        self._n_promised = promised_frames(n_messages)
        self._n_owed = self._n_promised

    def write(self, message: torch.Tensor, may_lag: int) -> None:
        """Append one message, (n,) uint8. Frames leave as they fill; of messages before the last `may_lag`, all leave.

        A peer that reads `may_lag` messages behind what this rank writes thus never waits for bytes that are held back.
        """
        self._n_unwritten -= 1
        self._append(message)
        self._unsent_messages.append(self._used)
        while len(self._unsent_messages) > may_lag:
            if self._unsent_messages.popleft():
                self._flush()
        if self._n_owed > self._n_unwritten:
            self._flush()

    def _append(self, message: torch.Tensor) -> None:
        length = torch.frombuffer(bytearray(_LENGTH.pack(message.numel())), dtype=torch.uint8)
        n_pending = _LENGTH.size + message.numel()
        for part in (length, message):
            start = 0
            while start < part.numel():
                frame = self._open_frame()
                n = min(part.numel() - start, self._payload_bytes - self._used)
                at = HEADER_BYTES + self._used
                frame[at : at + n].copy_(part[start : start + n])
                start += n
                n_pending -= n
                self._used += n
                if self._used == self._payload_bytes:
                    self._send(n_pending)

    def _flush(self) -> None:
        if self._used:
            self._send(0)

    def finish(self) -> None:
        """Wait until the peer has taken everything. Raises: PeerLost."""
        while self._in_flight:
            self._reclaim()

    def _open_frame(self) -> torch.Tensor:
        if self._frame is None:
            if not self._free:
                self._reclaim()
            self._frame = self._free.popleft()
        return self._frame

    def _reclaim(self) -> None:
        work, frame = self._in_flight.popleft()
        started = time.perf_counter_ns()
        self._communicator.wait(work, self._peer)
        self._record.add("communicate", started, time.perf_counter_ns())
        self._free.append(frame)

    def _send(self, n_pending: int) -> None:
        """Send the open frame; `n_pending` bytes of the message being written will follow in further frames."""
        frame, self._frame = self._frame, None
        assert frame is not None
        promise = min(self._n_promised, self._n_unwritten + (n_pending > 0))
        n_following = max(-(-n_pending // self._payload_bytes), promise)
        self._n_owed = max(self._n_owed - 1, n_following)
        header = _HEADER.pack(
            _MAGIC, FRAME_VERSION, 0, self._used, n_following, self._n_sent, *self._facts, self._frame_bytes
        )
        header += _CHECKSUM.pack(_native.crc32c(header))
        frame[:HEADER_BYTES].copy_(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        self._in_flight.append((self._communicator.isend(frame, self._peer, self._tag), frame))
        self._record.count_sent(self._frame_bytes)
        self._n_sent += 1
        self._used = 0
        self._unsent_messages = deque(0 for _ in self._unsent_messages)


class FrameReceiver:
    """The receiving end of one stream."""

    def __init__(
        self,
        communicator: Communicator,
        peer: int,
        tag: int,
        facts: Facts,
        frame_bytes: int,
        max_message_bytes: int,
        n_messages: int,
        record: BucketRecord,
        name: str = "",
    ) -> None:
        self._communicator, self._peer, self._tag, self._facts, self._record = communicator, peer, tag, facts, record
        self._frame_bytes = frame_bytes
        memory = communicator.scratch(f"frames from {peer} {name}", _RECEIVES_AHEAD * frame_bytes)
        self._free = deque(memory[i * frame_bytes : (i + 1) * frame_bytes] for i in range(_RECEIVES_AHEAD))
        # One for all streams of the communicator: a message is used up before the next one is read.
        self._message = communicator.scratch("message", max(max_message_bytes, _LENGTH.size))
        needed = -(-(max_message_bytes + _LENGTH.size) // (frame_bytes - HEADER_BYTES))
        self._max_following = max(needed, promised_frames(n_messages))
        self._posted: deque[tuple[dist.Work, torch.Tensor]] = deque()
        # Frames that are certain to come and have no receive posted yet.
        self._n_certain = promised_frames(n_messages)
        self._unread: torch.Tensor | None = None  # payload of the last frame, from where reading goes on
        self._n_received = 0
        self._frame: torch.Tensor | None = None
        self._post()

    def read(self) -> torch.Tensor:
        """The next message, (n,) uint8, valid until the next read of any stream of this communicator.

        Raises: CorruptMessage, IncompatibleVersion, RankMismatch, PeerLost.
        """
        n_bytes = _LENGTH.unpack(bytes(self._take(_LENGTH.size).tolist()))[0]
        if n_bytes > self._message.numel():
            raise CorruptMessage(
                f"rank {self._peer} announced a message of {n_bytes} bytes; none can exceed {self._message.numel()} "
                f"(bucket {self._facts.bucket}, step {self._facts.step}); {_CORRUPTION_ADVICE}"
            )
        return self._take(n_bytes)

    def _take(self, n_bytes: int) -> torch.Tensor:
        """The next `n_bytes` of the stream, gathered in the message buffer."""
        n_taken = 0
        while n_taken < n_bytes:
            unread = self._unread if self._unread is not None else self._receive()
            n = min(n_bytes - n_taken, unread.numel())
            self._message[n_taken : n_taken + n].copy_(unread[:n])
            n_taken += n
            if n < unread.numel():
                self._unread = unread[n:]
            else:
                self._unread = None
                assert self._frame is not None
                self._free.append(self._frame)
                self._post()
        return self._message[:n_bytes]

    def _post(self) -> None:
        """Post receives for frames that are certain to come, as far as there is room."""
        while self._n_certain and self._free:
            frame = self._free.popleft()
            self._posted.append((self._communicator.irecv(frame, self._peer, self._tag), frame))
            self._n_certain -= 1

    def _receive(self) -> torch.Tensor:
        """Wait for the next frame; its payload."""
        work, frame = self._posted.popleft()
        started = time.perf_counter_ns()
        self._communicator.wait(work, self._peer)
        self._record.add("communicate", started, time.perf_counter_ns())
        self._record.count_received(self._frame_bytes)
        used, n_following = self._check_header(bytes(frame[:HEADER_BYTES].tolist()))
        self._n_received += 1
        # Frames announced by earlier headers are posted already, or counted in _n_certain.
        self._n_certain = max(self._n_certain, n_following - len(self._posted))
        self._frame = frame
        self._post()
        return frame[HEADER_BYTES : HEADER_BYTES + used]

    def _check_header(self, header: bytes) -> tuple[int, int]:
        """Payload bytes of the frame, and how many frames are certain to follow."""
        magic, version, flags, used, n_following, number, *facts, frame_bytes = _HEADER.unpack_from(header)
        (checksum,) = _CHECKSUM.unpack_from(header, _HEADER.size)
        if magic == _MAGIC and version != FRAME_VERSION:
            raise IncompatibleVersion(
                f"rank {self._peer} sends frames of version {version}, this build reads {FRAME_VERSION}; "
                "install the same gradwire on every host"
            )
        if (
            (magic, flags, frame_bytes, number) != (_MAGIC, 0, self._frame_bytes, self._n_received)
            or checksum != _native.crc32c(header[: _HEADER.size])
            or not 0 < used <= self._frame_bytes - HEADER_BYTES
            or n_following > self._max_following
        ):
            raise CorruptMessage(
                f"frame {self._n_received} from rank {self._peer} has a header that gradwire did not write "
                f"(bucket {self._facts.bucket}, step {self._facts.step}); {_CORRUPTION_ADVICE}"
            )
        self._check_facts(Facts(*facts))
        return used, n_following

    def _check_facts(self, theirs: Facts) -> None:
        for field, mine, got in zip(Facts._fields, self._facts, theirs, strict=True):
            if mine != got:
                raise RankMismatch(
                    f"ranks {self._communicator.rank} and {self._peer} disagree on {field}: {mine} here, {got} there "
                    f"(bucket {self._facts.bucket}, step {self._facts.step}). What to do: {_ADVICE[field]}."
                )


_CORRUPTION_ADVICE = "check that all ranks run the same gradwire, and the host's memory and network"
