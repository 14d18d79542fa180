"""The engine's exchanges, ring and direct, between devices: the bits of `mean_through_codec`.

Messages are made and added in the order of native/exchange/ring.cpp and owners.cpp; the last ones of all parts reach all
ranks by an all-gather. All is enqueued on the site's stream. Where a codec's messages have no fixed length, ranks tell each
other the lengths before each hop: only then does the host wait, on the lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.checks import choice as check_choice
from gradwire.codecs import DeviceCodec
from gradwire.codecs.gcomp import GCompCodec
from gradwire.codecs.truncated_float import draw_after, first_draw
from gradwire.core.bucket import Bucket
from gradwire.errors import CorruptMessage
from gradwire.exchange.parts import MESSAGES_AHEAD, count_chunks
from gradwire.telemetry.recorder import BucketRecord
from gradwire.wire.communicator import Communicator
from gradwire.wire.device_wire import DeviceWire

_ALIGNMENT_BYTES = 8  # of a message's first byte
_LENGTH_BYTES = 8


class _Chunk(NamedTuple):
    """What one message is about: `values` of the bucket, `own` of its part, `room` of its part's row."""

    values: slice
    own: slice
    room: slice


class _Part(NamedTuple):
    """What one rank sums up; `row_bytes`: of all its messages, at most."""

    values: slice
    chunks: list[_Chunk]
    row_bytes: int

    @property
    def n_elements(self) -> int:
        return self.values.stop - self.values.start


class DeviceMeans:
    """Means over the ranks of one site, by messages of one codec.

    Args:
        topology: "ring" or "direct".
        chunk_elements: values to a message, at most, of a codec whose messages take all of their room: where these begin and
            end matters to the values. Of GComp, whose lengths only the device knows, a part is one message.
    Raises: Unsupported (no kernels of the codec here).
    """

    def __init__(
        self,
        site: DeviceWire,
        codec: DeviceCodec,
        communicator: Communicator,
        topology: str,
        chunk_elements: int,
    ) -> None:
        codec.check_device(site.device)
        self._site, self._codec, self._communicator = site, codec, communicator
        self._is_fixed = not isinstance(codec, GCompCodec)
        self._rank, self._world = communicator.rank, communicator.world_size
        self._is_ring = check_choice("topology", topology, ("ring", "direct")) == "ring"
        self._chunk_elements = chunk_elements
        self._cuts: dict[tuple[int, torch.dtype], list[_Part]] = {}
        # Of the bucket that is under way.
        self._first_draw = 0
        self._importance: Tensor | None = None
        self._counts: Tensor | None = None
        with site.stream:
            self._n_bytes = torch.empty(self._world, dtype=torch.int64, device=site.device)
            # A quotient by a number of the host's is a product with its inverse on some devices.
            self._n_ranks = torch.full((1,), self._world, dtype=torch.float16, device=site.device)

    def mean(self, bucket: Bucket, importance: Tensor | None = None, counts: Tensor | None = None) -> None:
        """Replace the bucket by its mean; on the lane, with the site's stream current.

        Args:
            importance: (n,) uint8 of the bucket's values, for GComp with importance="paper".
            counts: (256,) int64: gets the exponents of all that GComp encodes; None: they are not counted.
        Raises: CorruptMessage, PeerLost (of lengths that ranks tell each other).
        """
        divisor = self._world
        if bucket.buffer.dtype == torch.float16:  # whose sum may overflow where the mean does not
            bucket.buffer.div_(self._n_ranks)
            divisor = 1
        self._first_draw = first_draw(self._rank, bucket.step, bucket.index)
        self._importance, self._counts = importance, counts
        parts = self._parts(bucket)
        reduce = self._reduce_in_ring if self._is_ring else self._reduce_directly
        self._spread(bucket, parts, *reduce(bucket, parts), divisor)

    # ---- sums, each of which ends on one rank: its last message, and whose part each rank has

    def _reduce_in_ring(self, bucket: Bucket, parts: list[_Part]) -> tuple[Tensor, list[int]]:
        """Every part goes round, and each rank adds its share to it."""
        rank, world, buffer = self._rank, self._world, bucket.buffer
        left, right = (rank - 1) % world, (rank + 1) % world
        numbers = _numbers_in_ring(world, len(parts[0].chunks))
        sent, received = (self._row(name, parts) for name in ("sent", "received"))
        self._encode(buffer[parts[rank].values], parts[rank], sent, 0, [number[0] for number in numbers])
        for hop in range(world - 1):
            going = [[parts[(source - hop) % world]] for source in range(world)]
            lengths = self._tell(going, bucket.record)
            part, n_sent, n_received = going[left][0], lengths[rank][0], lengths[left][0]
            came, gone = ([row[:0]] * world for row in (received, sent))
            came[left], gone[right] = received[:n_received], sent[:n_sent]
            self._exchange(came, gone, bucket.record)
            total = self._site.scratch("total", part.n_elements, buffer.dtype).copy_(buffer[part.values])
            self._decode(came[left], part, total, adds=True)
            self._encode(total, part, sent, 0, [number[hop + 1] for number in numbers])
        return sent, [(owner + 1) % world for owner in range(world)]

    def _reduce_directly(self, bucket: Bucket, parts: list[_Part]) -> tuple[Tensor, list[int]]:
        """Every part goes to its owner, which adds all shares in the order of ranks, its own as it is."""
        rank, world, buffer = self._rank, self._world, bucket.buffer
        numbers = _numbers_of_owners(rank, world, len(parts[0].chunks))
        sent, received = (self._row(name, parts, world) for name in ("sent", "received"))
        for place, part in enumerate(_others(rank, world)):
            values = buffer[parts[part].values]
            self._encode(values, parts[part], sent[part], place, [number[part] for number in numbers])
        lengths = self._tell(
            [[parts[part] for part in _others(source, world)] for source in range(world)], bucket.record
        )
        came, gone = ([row[:0] for row in rows] for rows in (received, sent))
        for place, peer in enumerate(_others(rank, world)):
            n_received = lengths[peer][_others(peer, world).index(rank)]
            came[peer], gone[peer] = received[peer][:n_received], sent[peer][: lengths[rank][place]]
        self._exchange(came, gone, bucket.record)
        total = self._site.scratch("total", parts[rank].n_elements, buffer.dtype).zero_()
        for source in range(world):
            if source == rank:
                total.add_(buffer[parts[rank].values])
            else:
                self._decode(came[source], parts[rank], total, adds=True)
        result = self._row("result", parts)
        self._encode(total, parts[rank], result, 0, [number[rank] for number in numbers])
        return result, list(range(world))

    # ---- means

    def _spread(self, bucket: Bucket, parts: list[_Part], result: Tensor, owned: list[int], divisor: int) -> None:
        """Every rank reads the last message of every part."""
        lengths = self._tell([[parts[part]] for part in owned], bucket.record)
        row_bytes = _aligned(max(length for (length,) in lengths))
        results = self._site.scratch("results", self._world * row_bytes, torch.uint8).view(self._world, row_bytes)
        self._site.group.all_gather(results, result[:row_bytes])
        bucket.record.count_exchanged((self._world - 1) * row_bytes)
        for row, part, (length,) in zip(results, owned, lengths, strict=True):
            self._decode(row[:length], parts[part], bucket.buffer[parts[part].values], divisor=divisor)

    # ---- rows of messages

    def _encode(self, values: Tensor, part: _Part, row: Tensor, place: int, numbers: Sequence[int]) -> None:
        """`place`: of the row among those of this hop. `numbers`: of the messages, chunk by chunk."""
        for chunk, number in zip(part.chunks, numbers, strict=True):
            own, step = values[chunk.own], draw_after(self._first_draw, number)
            if self._counts is not None and isinstance(self._codec, GCompCodec):
                self._codec.histogram(own, self._counts)
            n_bytes = self._codec.encode(own, row[chunk.room], self._importance_of(chunk), step=step)
            if not self._is_fixed:
                self._n_bytes[place] = n_bytes

    def _decode(self, row: Tensor, part: _Part, out: Tensor, *, divisor: float = 1.0, adds: bool = False) -> None:
        for chunk in part.chunks:
            self._codec.decode(
                row[chunk.room], out[chunk.own], self._importance_of(chunk),
                divisor=divisor, adds=adds, error=self._site.flags[:1],
            )  # fmt: skip

    def _importance_of(self, chunk: _Chunk) -> Tensor | None:
        return None if self._importance is None else self._importance[chunk.values]

    def _tell(self, rows: Sequence[Sequence[_Part]], record: BucketRecord) -> list[list[int]]:
        """By rank, the bytes of the rows that it has just encoded. `rows`: by rank, whose they are."""
        if self._is_fixed:
            return [[part.row_bytes for part in own] for own in rows]
        own = self._site.read(self._n_bytes[: len(rows[self._rank])])
        with record.timing("communicate"):
            by_rank: list[list[int]] = self._communicator.all_gather(
                torch.tensor(own, dtype=torch.int64, device="cpu")
            ).tolist()
        record.count_exchanged((self._world - 1) * _LENGTH_BYTES * len(own))
        for rank, (told, parts) in enumerate(zip(by_rank, rows, strict=True)):
            for length, part in zip(told, parts, strict=True):
                if not 0 < length <= part.row_bytes:
                    raise CorruptMessage(f"rank {rank} has a message of {length} bytes, of at most {part.row_bytes}")
        return by_rank

    def _exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor], record: BucketRecord) -> None:
        self._site.group.exchange(received, sent)
        record.count_sent(sum(message.numel() for message in sent))
        record.count_received(sum(message.numel() for message in received))

    def _row(self, name: str, parts: list[_Part], n_rows: int | None = None) -> Tensor:
        """Room for the messages of any part, or of `n_rows`."""
        row_bytes = max(_aligned(part.row_bytes) for part in parts)
        row = self._site.scratch(name, (n_rows or 1) * row_bytes, torch.uint8)
        return row if n_rows is None else row.view(n_rows, row_bytes)

    # ---- how a bucket is cut

    def _parts(self, bucket: Bucket) -> list[_Part]:
        """By rank."""
        n, dtype = bucket.n_elements, bucket.buffer.dtype
        if (n, dtype) not in self._cuts:
            largest = -(-n // self._world)
            n_chunks = count_chunks(largest, self._chunk_elements) if self._is_fixed else 1
            self._cuts[n, dtype] = [self._part(n, part, n_chunks, dtype) for part in range(self._world)]
        return self._cuts[n, dtype]

    def _part(self, n: int, part: int, n_chunks: int, dtype: torch.dtype) -> _Part:
        begin, end = n * part // self._world, n * (part + 1) // self._world
        chunks, at, stop = [], 0, 0
        for index in range(n_chunks):
            first, last = ((end - begin) * bound // n_chunks for bound in (index, index + 1))
            stop = at + self._codec.max_encoded_bytes(last - first, dtype)
            chunks.append(_Chunk(slice(begin + first, begin + last), slice(first, last), slice(at, stop)))
            at = _aligned(stop)
        return _Part(slice(begin, end), chunks, stop)


def _others(rank: int, world: int) -> list[int]:
    return [peer for peer in range(world) if peer != rank]


def _aligned(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _numbers_in_ring(world: int, n_chunks: int) -> list[list[int]]:
    """By chunk and hop (the last: of the whole sum), the how many-th message that the CPU's ring encodes."""
    ahead, n_received = min(MESSAGES_AHEAD, n_chunks - 1), (world - 1) * n_chunks
    numbers = [[0] * world for _ in range(n_chunks)]
    number = 0
    for turn in range(n_received + ahead):
        for message in (turn if turn < n_chunks else -1, turn - ahead + n_chunks if turn >= ahead else -1):
            if message >= 0:
                numbers[message % n_chunks][message // n_chunks] = number
                number += 1
    return numbers


def _numbers_of_owners(rank: int, world: int, n_chunks: int) -> list[list[int]]:
    """By chunk and part (this rank's own: of the whole sum), the how many-th message that the CPU's owners encode."""
    ahead = min(MESSAGES_AHEAD, n_chunks - 1)
    numbers = [[0] * world for _ in range(n_chunks)]
    number = 0
    for turn in range(n_chunks + ahead):
        pushed = [(turn, (rank + distance) % world) for distance in range(1, world)] if turn < n_chunks else []
        for chunk, part in [*pushed, *([(turn - ahead, rank)] if turn >= ahead else [])]:
            numbers[chunk][part] = number
            number += 1
    return numbers
