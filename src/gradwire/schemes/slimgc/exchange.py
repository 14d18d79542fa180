"""How a fused buffer of tensors becomes its mean over the ranks, compressed: by push and pull, or round a ring.

Both write what this rank's encodings lost into `left_out`. Every value is encoded once by every rank: what it pushes to
an owner, or, at the owner, the sum; in the ring, the partial sum that it hands on.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gradwire.codecs import Codec
from gradwire.codecs.quantised import Quantised
from gradwire.collectives.chunk_codec import Importance
from gradwire.collectives.frames import Facts
from gradwire.collectives.push_pull import Cut, Group, push_pull
from gradwire.collectives.ring import ring_mean
from gradwire.communicator import Communicator
from gradwire.errors import CorruptMessage
from gradwire.telemetry.recorder import BucketRecord

_LENGTH = struct.Struct("<I")  # before every message of a group


@dataclass(frozen=True)
class Exchange:
    """The means of transport: `mean(values, left_out, ...)` for one topology.

    Attributes:
        codec: what tensors are compressed with.
        pull_codec: what an owner's result is encoded with; a raw one sends it in full precision.
        topology: "server" or "all-reduce".
        group_elements: values encoded and sent at a time.
    """

    communicator: Communicator
    codec: Codec
    pull_codec: Codec
    topology: str
    group_elements: int

    def mean(
        self,
        values: torch.Tensor,
        left_out: torch.Tensor,
        cut: Cut,
        facts: Facts,
        record: BucketRecord,
        importance: Importance | None = None,
    ) -> None:
        """Replace `values` (n,) float32 by the mean over the ranks; `left_out` (n,) float32 by what this rank lost.

        N x mean + the sum of all ranks' left_out = the sum of their values, to rounding.
        """
        if self.topology == "server":
            ends = _ServerEnds(self, values, left_out, cut, record, importance)
            push_pull(self.communicator, cut, ends, facts, record)
        else:
            left_out.zero_()
            ring_mean(self.communicator, self.codec, values, facts, record, importance, self.group_elements, left_out)

    def push(
        self,
        values: torch.Tensor,
        left_out: torch.Tensor,
        cut: Cut,
        facts: Facts,
        record: BucketRecord,
        importance: Importance | None = None,
    ) -> None:
        """Replace this rank's part of `values` (n,) float32 by its mean over the ranks, and leave the other parts alone.

        `left_out` is as in `mean`: nothing is lost of the own part. The mean has the bits that `mean` gives with a raw
        pull.
        """
        ends = _ServerEnds(self, values, left_out, cut, record, importance, has_pull=False)
        push_pull(self.communicator, cut, ends, facts, record, has_pull=False)


class _ServerEnds:
    """A rank as a worker, which pushes and pulls, and as the server of its own part."""

    def __init__(
        self,
        exchange: Exchange,
        values: torch.Tensor,
        left_out: torch.Tensor,
        cut: Cut,
        record: BucketRecord,
        importance: Importance | None,
        has_pull: bool = True,
    ) -> None:
        self._has_pull = has_pull
        self._codec, self._pull_codec = exchange.codec, exchange.pull_codec
        self._values, self._left_out, self._cut = values, left_out, cut
        self._record, self._importance = record, importance
        communicator = exchange.communicator
        self._rank, self._world_size = communicator.rank, communicator.world_size
        self.max_push_bytes = _max_group_bytes(self._codec, cut)
        self.max_pull_bytes = _max_group_bytes(self._pull_codec, cut)
        n_bytes = 4 * cut.max_group_elements
        self._draw = _first_draw(communicator, record)
        # The sums are taken already; a codec that keeps what it leaves out takes them as gradients without a residual.
        self._nothing = communicator.scratch("server nothing", n_bytes).view(torch.float32).zero_()
        self._total = communicator.scratch("server total", n_bytes).view(torch.float32)
        self._decoded = communicator.scratch("server decoded", n_bytes).view(torch.float32)

    # ---- as a worker

    def encode_push(self, part: int, group: int, out: torch.Tensor) -> int:
        pieces = self._cut.groups[part][group]
        return self._encode(self._codec, pieces, lambda start, end: self._values[start:end], out)

    def adopt(self, part: int, group: int, message: torch.Tensor) -> None:
        pieces = self._cut.groups[part][group]
        started = time.perf_counter_ns()
        self._decode(self._pull_codec, pieces, message, self._values, at=0)
        self._values[pieces[0].start : pieces[-1].end].div_(self._world_size)
        self._record.add("decode", started, time.perf_counter_ns())

    # ---- as the server of its own part

    def add_pushed(self, source: int, group: int, message: torch.Tensor | None) -> None:
        pieces = self._cut.groups[self._rank][group]
        start, end = pieces[0].start, pieces[-1].end
        total = self._total[: end - start]
        started = time.perf_counter_ns()
        if message is None:
            # Its own values never leave this rank, so they stay exact; what was left out of them is in the sum.
            own = self._values[start:end]
            total.copy_(own) if source == 0 else total.add_(own)
        elif source == 0:
            self._decode(self._codec, pieces, message, total, at=start)
        else:
            decoded = self._decoded[: end - start]
            self._decode(self._codec, pieces, message, decoded, at=start)
            total.add_(decoded)
        self._record.add("decode", started, time.perf_counter_ns())

    def encode_pull(self, group: int, out: torch.Tensor) -> int:
        pieces = self._cut.groups[self._rank][group]
        first, end = pieces[0].start, pieces[-1].end
        total = self._total
        if not self._has_pull:
            self._left_out[first:end].zero_()
            torch.div(total[: end - first], self._world_size, out=self._values[first:end])
            return 0
        n_bytes = self._encode(self._pull_codec, pieces, lambda start, end: total[start - first : end - first], out)
        # It adopts the very values that the others decode: sum - what the encoding lost would round differently.
        started = time.perf_counter_ns()
        self._decode(self._pull_codec, pieces, out[:n_bytes], self._values, at=0)
        self._values[first:end].div_(self._world_size)
        self._record.add("decode", started, time.perf_counter_ns())
        return n_bytes

    # ---- messages of a group: each piece's length and message

    def _encode(
        self, codec: Codec, pieces: Group, values_of: Callable[[int, int], torch.Tensor], out: torch.Tensor
    ) -> int:
        at = 0
        for start, end in pieces:
            importance = None if self._importance is None else self._importance(start, end)
            values = values_of(start, end)
            left_out = self._left_out[start:end]
            started = time.perf_counter_ns()
            n_bytes = self._encode_piece(codec, start, values, out[at + _LENGTH.size :], importance, left_out)
            out[at : at + _LENGTH.size] = torch.frombuffer(bytearray(_LENGTH.pack(n_bytes)), dtype=torch.uint8)
            at += _LENGTH.size + n_bytes
            self._record.add("encode", started, time.perf_counter_ns())
        return at

    def _encode_piece(
        self,
        codec: Codec,
        start: int,
        values: torch.Tensor,
        out: torch.Tensor,
        importance: torch.Tensor | None,
        left_out: torch.Tensor,
    ) -> int:
        if isinstance(codec, Quantised):
            nothing = self._nothing[: values.numel()]
            return codec.encode_with_residual(values, nothing, out, self._draw + start, new_residual=left_out)
        n_bytes = codec.encode(values, out, importance)
        codec.decode(out[:n_bytes], left_out)
        torch.sub(values, left_out, out=left_out)
        return n_bytes

    def _decode(self, codec: Codec, pieces: Group, message: torch.Tensor, out: torch.Tensor, at: int) -> None:
        """Decode a group's messages into `out`, whose first value is number `at` of the fused buffer."""
        read = 0
        for start, end in pieces:
            length = message[read : read + _LENGTH.size]
            n_bytes = _LENGTH.unpack(bytes(length.tolist()))[0] if length.numel() == _LENGTH.size else -1
            read += _LENGTH.size
            if not 0 <= n_bytes <= message.numel() - read:
                raise CorruptMessage(
                    f"a group of {len(pieces)} pieces ends after {message.numel()} bytes, before the piece of values "
                    f"{start} to {end}; check that all ranks run the same gradwire, and the host's memory and network"
                )
            codec.decode(message[read : read + n_bytes], out[start - at : end - at])
            read += n_bytes
        if read != message.numel():
            raise CorruptMessage(
                f"a group of {len(pieces)} pieces has {message.numel() - read} bytes too many; check that all ranks run "
                "the same gradwire, and the host's memory and network"
            )


class _Drawing:
    """A quantiser in a ring, each of whose messages rounds by random numbers of its own."""

    def __init__(self, codec: Quantised, first_draw: int) -> None:
        self.name = codec.name
        self.max_encoded_bytes = codec.max_encoded_bytes
        self.decode = codec.decode
        self._codec, self._draw = codec, first_draw

    def encode(self, gradient: torch.Tensor, out: torch.Tensor, importance: torch.Tensor | None = None) -> int:
        self._draw += 1
        return self._codec.encode(gradient, out, step=self._draw)


def _first_draw(communicator: Communicator, record: BucketRecord) -> int:
    """Where this rank's random numbers of this bucket and step begin: no other rank's, step's or bucket's are the same."""
    of_step = (record.step * communicator.world_size + communicator.rank) & 0xFFFFFF
    return (of_step << 40) | ((record.bucket & 0x3F) << 34)  # below that, 2^34 pieces or values of one bucket


def _max_group_bytes(codec: Codec, cut: Cut) -> int:
    """Bytes that no group's message exceeds."""
    most = 0
    sizes: dict[int, int] = {}
    for groups in cut.groups:
        for group in groups:
            n_bytes = 0
            for start, end in group:
                if end - start not in sizes:
                    sizes[end - start] = codec.max_encoded_bytes(end - start, torch.float32)
                n_bytes += _LENGTH.size + sizes[end - start]
            most = max(most, n_bytes)
    return most
