"""The mean through a codec: round a ring, or directly through the owners of all parts.

In host memory one call of the native core (native/exchange/means.hpp) without the GIL, which calls a codec in Python back.
Between devices the same messages, in the same order of sums; the last ones of all parts reach all ranks by an all-gather.
Every rank gets the same bits: the decoding of the bytes that each part's owner sent, divided by N. Float16 values, whose sum
may overflow, are divided before they are encoded. What is not finite travels as the codec has it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire import _native
from gradwire.checks import choice as check_choice
from gradwire.checks import count as check_count
from gradwire.codecs import Codec, DeviceCodec
from gradwire.codecs.floats import Floats, Messages
from gradwire.codecs.gcomp import GCompCodec
from gradwire.codecs.quantised import Quantised
from gradwire.codecs.tensors import bytes_of, dtype_code
from gradwire.codecs.truncated_float import TruncatedFloat, draw_after, first_draw
from gradwire.core.bucket import Bucket
from gradwire.core.feedback import Part
from gradwire.errors import CorruptMessage, Unsupported
from gradwire.exchange.parts import CHUNK_ELEMENTS, MESSAGES_AHEAD, Chunk, count_chunks, cut_into_chunks
from gradwire.telemetry.recorder import BucketRecord
from gradwire.wire.device_wire import DeviceWire
from gradwire.wire.wire import Wire

# Of the values of a bucket, how large each may be before its low bits matter: `write(first, out)` puts the importance
# bytes of elements [first, first + n) into `out` (n,) uint8.
Importance = _native.BucketImportance

_Chunks = list[Chunk]
_ALIGNMENT_BYTES = 8  # of a message's first byte on a device
_LENGTH_BYTES = 8

# "ring": N-1 hops of partial sums, each encoded anew, then N-1 hops that forward bytes verbatim. "direct": every part to its
# owner, which adds them in rank order, itself unencoded, and answers: a lossy codec rounds a value twice instead of N times,
# and every rank talks to every other. Both send 2 (N-1)/N of the encoded buffer; every element is encoded once.
_RUN: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "ring": (_native.ring_mean, (MESSAGES_AHEAD,)),
    "direct": (_native.direct_mean, ()),
}


class Ring:
    """Means in which every message goes through one codec, in host memory or between devices.

    Args:
        topology: "ring" (each value passes N-1 times through the codec before it is final) or "direct" (twice).
        chunk_elements: values encoded, sent and decoded at a time.
    """

    def __init__(self, codec: Codec, topology: str = "ring", chunk_elements: int = CHUNK_ELEMENTS) -> None:
        self.codec, self.topology = codec, check_choice("topology", topology, tuple(_RUN))
        self.chunk_elements = check_count("chunk_elements", chunk_elements)
        self._on_device: DeviceRing | None = None

    @property
    def configuration(self) -> dict[str, Any]:
        """Options that ranks must share."""
        return {"topology": self.topology, "chunk_elements": self.chunk_elements}

    def bind(self, wire: Wire) -> None:
        """Take the wire; on a device the codec needs kernels."""
        self._on_device = None
        if isinstance(wire, DeviceWire):
            if not isinstance(self.codec, DeviceCodec):
                raise Unsupported(
                    f"codec {self.codec.name!r} works on host memory: leave placement out, and gradients travel through it"
                )
            self._on_device = DeviceRing(wire, self.codec, self.topology == "ring", self.chunk_elements)

    def mean(
        self, part: Part, wire: Wire, importance: Any = None, counts: Tensor | None = None, mean_room: int = 0
    ) -> None:
        """Replace `part.values` by their mean, on the lane; without error feedback.

        Args:
            importance: of the bucket's values, for codecs that weigh them: an `Importance`, or on a device (n,) uint8.
            counts: (256,) int64: gets the exponents of all that GComp's codec encodes; None: they are not counted.
            mean_room: what is added to the bytes of means, where `importance` does not say so itself.
        """
        bucket = part.bucket
        if self._on_device is not None:
            self._on_device.mean(bucket, importance, counts, mean_room)
            return
        mean_through_codec(
            wire, self.codec, bucket.buffer, importance, topology=self.topology, chunk_elements=self.chunk_elements,
            **options_for(self.codec, wire, bucket, counts),
        )  # fmt: skip


def options_for(codec: Codec, wire: Wire, bucket: Bucket, counts: Tensor | None) -> dict[str, Any]:
    """What `exchange_codec` is told of a bucket: by which numbers its messages draw; where exponents are counted."""
    if isinstance(codec, TruncatedFloat | Quantised):
        return {"first_step": first_draw(wire.rank, bucket.step, bucket.index)}
    return {"counts": counts} if isinstance(codec, GCompCodec) else {}


def mean_through_codec(
    wire: Wire,
    codec: Codec,
    buffer: Tensor,
    importance: Importance | None = None,
    *,
    topology: str = "ring",
    chunk_elements: int = CHUNK_ELEMENTS,
    left_out: Tensor | None = None,
    **options: Any,
) -> None:
    """Replace `buffer` (n,), in host memory, by the mean over the ranks; on the lane. `options`: of `exchange_codec`.
    `left_out` (n,) gets what this rank's encodings lost: N x result + the sum of all ranks' left_out = the sum of their
    gradients."""
    if wire.world_size == 1 or buffer.numel() == 0:
        return
    run, ahead = _RUN[topology]
    account = run(
        *wire.communicator.open_exchange(),
        wire.facts,
        engine_codec(codec, buffer.dtype, importance, **options),
        bytes_of(buffer),
        dtype_code(buffer.dtype),
        None if left_out is None else bytes_of(left_out),
        count_chunks(-(-buffer.numel() // wire.world_size), chunk_elements),
        *ahead,
    )
    wire.record.add_account(*account)


def engine_codec(
    codec: Codec, dtype: torch.dtype, importance: Importance | None, **options: Any
) -> _native.ExchangeCodec:
    """The codec as the engine calls it, for one bucket: native where it can say how, else called back."""
    native: Callable[..., _native.ExchangeCodec] | None = getattr(codec, "exchange_codec", None)
    if native is None:
        return _native.python_exchange_codec(codec, dtype, importance)
    return native(dtype, importance, **options)


class DeviceRing:
    """The exchange between devices: all of it is enqueued on the wire's stream, which is current.

    Where a codec's messages have no fixed length, ranks tell each other the lengths before each hop: only then does the host
    wait, on the lane.
    """

    def __init__(self, wire: DeviceWire, codec: DeviceCodec, is_ring: bool, chunk_elements: int) -> None:
        codec.check_device(wire.device)
        self._wire, self._codec, self._is_ring, self._chunk_elements = wire, codec, is_ring, chunk_elements
        self._floats = codec if isinstance(codec, Floats) else None  # which take the messages of a part in one launch
        # Messages take all of their room, and where they begin and end matters to the values. Of GComp, whose lengths only
        # the device knows, a part is one message.
        self._is_fixed = not isinstance(codec, GCompCodec)
        self._messages: dict[tuple[tuple[int, int, int, int], ...], Messages] = {}
        self._rank, self._world = wire.rank, wire.world_size
        self._cuts: dict[tuple[int, torch.dtype], list[_Chunks]] = {}
        # Of the bucket that is under way.
        self._first_draw = 0
        self._importance: Tensor | None = None
        self._of_means: Tensor | None = None
        self._counts: Tensor | None = None
        with wire.stream:
            self._n_bytes = torch.empty(self._world, dtype=torch.int64, device=wire.device)

    def mean(
        self, bucket: Bucket, importance: Tensor | None = None, counts: Tensor | None = None, mean_room: int = 0
    ) -> None:
        """Replace the bucket by its mean, as `Ring.mean`; `importance`: (n,) uint8."""
        divisor = self._world
        if bucket.buffer.dtype == torch.float16:  # whose sum may overflow where the mean does not
            self._wire.divide(bucket.buffer, self._world)
            divisor = 1
        self._first_draw = first_draw(self._rank, bucket.step, bucket.index)
        self._importance, self._of_means, self._counts = importance, importance, counts
        if importance is not None and mean_room:
            self._of_means = self._wire.scratch("importance of means", importance.numel(), torch.uint8)
            self._of_means.copy_(((importance.short() + mean_room) * (importance != 0)).clamp_(max=255))
        parts = self._parts(bucket)
        reduce = self._reduce_in_ring if self._is_ring else self._reduce_directly
        self._spread(bucket, parts, *reduce(bucket, parts), divisor)

    # ---- sums, each of which ends on one rank: its last message, and whose part each rank has

    def _reduce_in_ring(self, bucket: Bucket, parts: list[_Chunks]) -> tuple[Tensor, list[int]]:
        """Every part goes round, and each rank adds its share to it."""
        rank, world, buffer = self._rank, self._world, bucket.buffer
        left, right = (rank - 1) % world, (rank + 1) % world
        numbers = _numbers_in_ring(world, len(parts[0]))
        sent, received = (self._row(name, parts) for name in ("sent", "received"))
        self._encode(buffer[_values_of(parts[rank])], parts[rank], sent, 0, [number[0] for number in numbers])
        for hop in range(world - 1):
            going = [[parts[(source - hop) % world]] for source in range(world)]
            lengths = self._tell(going, bucket.record)
            part, n_sent, n_received = going[left][0], lengths[rank][0], lengths[left][0]
            came, gone = ([row[:0]] * world for row in (received, sent))
            came[left], gone[right] = received[:n_received], sent[:n_sent]
            self._exchange(came, gone, bucket.record)
            share = buffer[_values_of(part)]
            total = self._wire.scratch("total", share.numel(), buffer.dtype).copy_(share)
            self._decode(came[left], part, total, adds=True)
            self._encode(total, part, sent, 0, [number[hop + 1] for number in numbers], hop == world - 2)
        return sent, [(owner + 1) % world for owner in range(world)]

    def _reduce_directly(self, bucket: Bucket, parts: list[_Chunks]) -> tuple[Tensor, list[int]]:
        """Every part goes to its owner, which adds all shares in the order of ranks, its own as it is."""
        rank, world, buffer = self._rank, self._world, bucket.buffer
        numbers = _numbers_of_owners(rank, world, len(parts[0]))
        sent, received = (self._row(name, parts, world) for name in ("sent", "received"))
        if self._floats is not None:
            others = [
                (chunk, part * sent.shape[1], 0, number[part])
                for part in _others(rank, world)
                for chunk, number in zip(parts[part], numbers, strict=True)
            ]
            self._floats.encode_messages(buffer, sent, self._laid_out(others), step=self._first_draw)
        for place, part in enumerate(_others(rank, world) if self._floats is None else ()):
            values = buffer[_values_of(parts[part])]
            self._encode(values, parts[part], sent[part], place, [number[part] for number in numbers])
        lengths = self._tell(
            [[parts[part] for part in _others(source, world)] for source in range(world)], bucket.record
        )
        came, gone = ([row[:0] for row in rows] for rows in (received, sent))
        for place, peer in enumerate(_others(rank, world)):
            n_received = lengths[peer][_others(peer, world).index(rank)]
            came[peer], gone[peer] = received[peer][:n_received], sent[peer][: lengths[rank][place]]
        self._exchange(came, gone, bucket.record)
        own = buffer[_values_of(parts[rank])]
        total = self._wire.scratch("total", own.numel(), buffer.dtype).zero_()
        before, after = came[:rank], came[rank + 1 :]
        if self._floats is not None:  # all of them in one launch
            before, after = [received[:rank]], [received[rank + 1 :]]
        for row in before:
            self._decode(row, parts[rank], total, adds=True)
        total.add_(own)
        for row in after:
            self._decode(row, parts[rank], total, adds=True)
        result = self._row("result", parts)
        self._encode(total, parts[rank], result, 0, [number[rank] for number in numbers], True)
        return result, list(range(world))

    def _laid_out(self, chunks: Sequence[tuple[Chunk, int, int, int]]) -> Messages:
        """Messages of one launch: the chunk, where its row begins, the value from which values are counted, its number."""
        assert self._floats is not None, "one message a launch"
        rows = tuple(
            (chunk.values.start - start, row + chunk.room.start, chunk.values.stop - chunk.values.start, number)
            for chunk, row, start, number in chunks
        )
        if rows not in self._messages:
            self._messages[rows] = self._floats.lay_out(rows, self._wire.device)
        return self._messages[rows]

    def _spread(self, bucket: Bucket, parts: list[_Chunks], result: Tensor, owned: list[int], divisor: int) -> None:
        """Every rank reads the last message of every part."""
        lengths = self._tell([[parts[part]] for part in owned], bucket.record)
        row_bytes = _aligned(max(length for (length,) in lengths))
        results = self._wire.scratch("results", self._world * row_bytes, torch.uint8).view(self._world, row_bytes)
        self._wire.group.all_gather(results, result[:row_bytes])
        bucket.record.count_exchanged((self._world - 1) * row_bytes)
        if self._floats is not None:
            every = [(chunk, i * row_bytes, 0, 0) for i, part in enumerate(owned) for chunk in parts[part]]
            self._floats.decode_messages(
                results, bucket.buffer, self._laid_out(every), divisor=divisor, error=self._wire.flags[:1]
            )
            return
        for row, part, (length,) in zip(results, owned, lengths, strict=True):
            out = bucket.buffer[_values_of(parts[part])]
            self._decode(row[:length], parts[part], out, divisor=divisor, is_mean=True)

    # ---- rows of messages

    def _encode(
        self, values: Tensor, part: _Chunks, row: Tensor, place: int, numbers: Sequence[int], is_mean: bool = False
    ) -> None:
        """`place`: of the row among those of this hop. `numbers`: of the messages, chunk by chunk."""
        if self._floats is not None:
            chunks = [(chunk, 0, part[0].values.start, number) for chunk, number in zip(part, numbers, strict=True)]
            self._floats.encode_messages(values, row, self._laid_out(chunks), step=self._first_draw)
            return
        for chunk, number in zip(part, numbers, strict=True):
            own, step = values[chunk.within(part[0].values.start)], draw_after(self._first_draw, number)
            if self._counts is not None and isinstance(self._codec, GCompCodec):
                self._codec.histogram(own, self._counts)
            n_bytes = self._codec.encode(own, row[chunk.room], self._importance_of(chunk, is_mean), step=step)
            if not self._is_fixed:
                self._n_bytes[place] = n_bytes

    def _decode(
        self, row: Tensor, part: _Chunks, out: Tensor, divisor: float = 1.0, adds: bool = False, is_mean: bool = False
    ) -> None:
        """`row`: (bytes,); or (n, bytes) of so many ranks' floats, which are added in their order."""
        if self._floats is not None:
            if row.numel():
                n_sources, source_bytes = row.view(-1, row.shape[-1]).shape
                messages = self._laid_out([(chunk, 0, part[0].values.start, 0) for chunk in part])
                self._floats.decode_messages(
                    row, out, messages, n_sources=n_sources, source_bytes=source_bytes, divisor=divisor, adds=adds,
                    error=self._wire.flags[:1],
                )  # fmt: skip
            return
        for chunk in part:
            self._codec.decode(
                row[chunk.room], out[chunk.within(part[0].values.start)], self._importance_of(chunk, is_mean),
                divisor=divisor, adds=adds, error=self._wire.flags[:1],
            )  # fmt: skip

    def _importance_of(self, chunk: Chunk, is_mean: bool) -> Tensor | None:
        importance = self._of_means if is_mean else self._importance
        return None if importance is None else importance[chunk.values]

    def _tell(self, rows: Sequence[Sequence[_Chunks]], record: BucketRecord) -> list[list[int]]:
        """By rank, the bytes of the rows that it has just encoded. `rows`: by rank, whose they are."""
        if self._is_fixed:
            return [[part[-1].room.stop for part in own] for own in rows]
        own = self._wire.read(self._n_bytes[: len(rows[self._rank])])
        with record.timing("communicate"):
            told_here = torch.tensor(own, dtype=torch.int64, device="cpu")
            by_rank: list[list[int]] = self._wire.communicator.all_gather(told_here).tolist()
        record.count_exchanged((self._world - 1) * _LENGTH_BYTES * len(own))
        for rank, (told, parts) in enumerate(zip(by_rank, rows, strict=True)):
            for length, part in zip(told, parts, strict=True):
                if not 0 < length <= part[-1].room.stop:
                    raise CorruptMessage(
                        f"rank {rank} has a message of {length} bytes, of at most {part[-1].room.stop}"
                    )
        return by_rank

    def _exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor], record: BucketRecord) -> None:
        self._wire.group.exchange(received, sent)
        record.count_sent(sum(message.numel() for message in sent))
        record.count_received(sum(message.numel() for message in received))

    def _row(self, name: str, parts: list[_Chunks], n_rows: int | None = None) -> Tensor:
        """Room for the messages of any part, or of `n_rows`."""
        row_bytes = max(_aligned(part[-1].room.stop) for part in parts)
        row = self._wire.scratch(name, (n_rows or 1) * row_bytes, torch.uint8)
        return row if n_rows is None else row.view(n_rows, row_bytes)

    def _parts(self, bucket: Bucket) -> list[_Chunks]:
        """By rank, the chunks of what it sums up."""
        n, dtype = bucket.n_elements, bucket.buffer.dtype
        if (n, dtype) not in self._cuts:
            n_chunks = count_chunks(-(-n // self._world), self._chunk_elements) if self._is_fixed else 1

            def room_of(n_elements: int, _: object) -> int:
                return self._codec.max_encoded_bytes(n_elements, dtype)

            self._cuts[n, dtype] = cut_into_chunks(n, self._world, n_chunks, room_of, alignment=_ALIGNMENT_BYTES)
        return self._cuts[n, dtype]


def _values_of(part: _Chunks) -> slice:
    return slice(part[0].values.start, part[-1].values.stop)


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
