"""The mean through owners: each rank's messages go to every part's owner, which adds them, and its sum goes to all.

In host memory one call of the native core (native/exchange/means.hpp). Between devices the same messages and bits: an
all-to-all brings each rank's shares of a part to its owner, who adds them in rank order and encodes the sum (or leaves it as
it is), and an all-gather brings that to all. Messages there have a fixed room, so both collectives have equal rows.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradwire import _native
from gradwire.checks import choice as check_choice
from gradwire.checks import count as check_count
from gradwire.codecs.quantised import Qsgd, Quantised
from gradwire.codecs.tensors import bytes_of, dtype_code
from gradwire.core.bucket import Bucket
from gradwire.core.feedback import Part
from gradwire.errors import InvalidArgument
from gradwire.exchange.parts import QUANTISED_CHUNK_ELEMENTS, QUANTISED_MIN_CHUNKS, Chunk, count_chunks, cut_into_chunks
from gradwire.wire.device_wire import DeviceWire
from gradwire.wire.wire import Wire

_PULLS = ("compressed", "raw", "8-bit")
_MOST_LEVELS = 127  # of qsgd, in 8 bits
_FLAGS_AT = 6  # in a message's header: 1 says that a value was not finite (docs/format.md)

_Parts = list[list[Chunk]]  # by owner
_Encode = Callable[[Tensor, int, int, Tensor], None]


class Owners:
    """Each rank owns a part of the bucket, and adds what the others pushed of it to its own, unquantised share.

    Args:
        codec: the quantiser; another may take its place before `bind`.
        pull: how sums travel back: "compressed", quantised again, where what the message leaves out goes into the owner's
            residual; "raw", in the bucket's dtype; or "8-bit", of qsgd, whose levels are then so many that what many ranks'
            errors come to is not drowned in that of their sum.
        chunk_elements: values to a message; each message has its own scales.
    """

    def __init__(
        self, codec: Quantised, pull: str = "compressed", chunk_elements: int = QUANTISED_CHUNK_ELEMENTS
    ) -> None:
        self.codec, self.pull = codec, check_choice("pull", pull, _PULLS)
        if pull == "8-bit" and not isinstance(codec, Qsgd):
            raise InvalidArgument(f'pull="8-bit" is for qsgd, not for {codec.name}: use "compressed" or "raw"')
        self.chunk_elements = check_count("chunk_elements", chunk_elements)

    @property
    def configuration(self) -> dict[str, Any]:
        """Options that ranks must share."""
        return {"pull": self.pull, "chunk_elements": self.chunk_elements}

    @property
    def answering(self) -> Quantised:
        """The codec of sums on their way back."""
        codec = self.codec
        if self.pull == "8-bit" and isinstance(codec, Qsgd):
            return Qsgd(_MOST_LEVELS, codec.block, codec.seed)
        return codec

    def bind(self, wire: Wire) -> None:
        """Take the wire; on a device the codec needs kernels."""
        codec, self._answering = self.codec, self.answering
        self._on_device = DeviceOwners(wire, codec, self._answering) if isinstance(wire, DeviceWire) else None
        self._options, self._pull_levels = codec.native_options, self._answering.native_options[3]
        self._cuts: dict[int, tuple[int, int, _Parts, _Parts]] = {}  # by layout, as ranks compare them

    def mean(self, part: Part, wire: Wire) -> None:
        """Replace `part.values` by their mean, on the lane. Cost: sends 2 (N-1)/N of the encoded bucket, to N-1 peers;
        every element is encoded once."""
        bucket, rank, world = part.bucket, wire.rank, wire.world_size
        n_chunks, dtype, pushed, pulled = self._cuts.get(bucket.layout_hash) or self._cut(bucket, world)
        if self._on_device is not None:
            self._on_device.mean(part, pushed, pulled, self.pull == "raw")
            return
        draws = [
            bucket.draw(rank, owner, chunk, owner == rank) if self.codec.draws else 0
            for owner, chunk in itertools.product(range(world), range(n_chunks))
        ]
        part.used_by_any, is_finite, account = _native.quantised_mean(
            *wire.communicator.open_exchange(),
            wire.facts,
            self._options,
            bytes_of(bucket.buffer),
            dtype,
            part.residual,
            part.unsent,
            part.loss_scale,
            bucket.spans,
            part.is_used,
            n_chunks,
            draws,
            self.pull == "raw",
            self._pull_levels,
        )
        n = bucket.n_elements
        part.counted = n * rank // world, n * (rank + 1) // world
        wire.record.add_account(*account)
        wire.note(is_finite)

    def _cut(self, bucket: Bucket, world: int) -> tuple[int, int, _Parts, _Parts]:
        """Chunks to a part, the dtype's code, and for kernels the chunks there and back; found once for a layout."""
        n = bucket.n_elements
        n_chunks = count_chunks(-(-n // world), self.chunk_elements, QUANTISED_MIN_CHUNKS)
        there, back = _Parts(), _Parts()
        if self._on_device is not None:
            starts = sorted({start for start, _ in bucket.spans}) if self.codec.scale_values else []
            cut = functools.partial(cut_into_chunks, n, world, n_chunks, starts=starts)
            there, back = cut(room_of=self.codec.message_room), cut(room_of=self._answering.message_room)
        found = self._cuts[bucket.layout_hash] = n_chunks, dtype_code(bucket.buffer.dtype), there, back
        return found


class DeviceOwners:
    """The exchange between devices: all of it is enqueued on the wire's stream, which is current, and the host reads nothing.

    What is not finite or not whole becomes NaN on all ranks and is noted in the wire's flags. `answering`: the codec of sums,
    where it is another.
    """

    def __init__(self, wire: DeviceWire, codec: Quantised, answering: Quantised | None = None) -> None:
        codec.check_device(wire.device)
        self._wire, self._codec, self._rank, self._world = wire, codec, wire.rank, wire.world_size
        self._answering = answering or codec

    def mean(self, part: Part, parts: _Parts, answers: _Parts, pulls_raw: bool) -> None:
        """Replace `part.values`, cut into `parts`, sums into `answers`, by their mean. `pulls_raw`: sums in their dtype."""
        bucket, values = part.bucket, part.values

        def encode(values: Tensor, owner: int, index: int, row: Tensor) -> None:
            codec, cut = (self._answering, answers) if owner == self._rank else (self._codec, parts)
            draw = bucket.draw(self._rank, owner, index, owner == self._rank)
            self._encode(codec, values, cut[owner][index], row, draw, part.residual, part.unsent, part.loss_scale)

        if pulls_raw:
            received = self._push(values, parts, encode)
            n_bytes = (self._world - 1) * (received.shape[1] + self._pull_raw(part, parts, received))
        else:
            n_bytes = self._through_owners(values, parts, answers, encode, lambda chunk: values[chunk.values])
        bucket.record.count_exchanged(n_bytes)

    def _through_owners(
        self, values: Tensor, parts: _Parts, answers: _Parts, encode: _Encode, own: Callable[[Chunk], Tensor]
    ) -> int:
        """Replace `values` (n,), as far as chunks are about them, by their mean, which travels as messages both ways.

        `encode` writes (values, owner, index of the chunk) into a row: what goes to the part's owner, or, of the own part, to
        all. `own`: what this rank adds of its own part's chunk, unencoded. Returns: bytes sent, which are those received.
        """
        rank, world, wire = self._rank, self._world, self._wire
        received = self._push(values, parts, encode)
        row_bytes = _row_bytes(answers)
        results = self._rows("results", row_bytes, torch.uint8)
        with wire.timing("decode"):
            for index, chunk in enumerate(parts[rank]):
                encode(self._sum(chunk, received, own(chunk)), rank, index, results[rank])
            mine = wire.scratch("own", row_bytes, torch.uint8).copy_(results[rank])
        with wire.timing("communicate"):
            wire.group.all_gather(results, mine)
        with wire.timing("decode"):
            for row, chunks in zip(results, answers, strict=True):
                for chunk in chunks:
                    message = row[chunk.room]
                    wire.flags[1:].bitwise_or_(message[_FLAGS_AT : _FLAGS_AT + 1])
                    self._answering.decode(
                        message, values[chunk.values], divisor=world, cuts=chunk.cuts, error=wire.flags[:1]
                    )
        return (world - 1) * (received.shape[1] + row_bytes)

    def _push(self, values: Tensor, parts: _Parts, encode: _Encode) -> Tensor:
        """(world, bytes): what each rank has sent of this one's part."""
        sent, received = (self._rows(name, _row_bytes(parts), torch.uint8) for name in ("sent", "received"))
        with self._wire.timing("encode"):
            for owner in (owner for owner in range(self._world) if owner != self._rank):
                for index, chunk in enumerate(parts[owner]):
                    encode(values[chunk.values], owner, index, sent[owner])
        with self._wire.timing("communicate"):
            self._wire.group.all_to_all(received, sent)
        return received

    def _sum(self, chunk: Chunk, received: Tensor, own: Tensor) -> Tensor:
        """(n,) float32 until the next one: the shares of a chunk of this rank's part, in rank order, its own as it is."""
        total = self._wire.scratch("total", chunk.values.stop - chunk.values.start, torch.float32).zero_()
        for source in range(self._world):
            if source == self._rank:
                total.add_(own)
            else:
                message = received[source][chunk.room]
                self._codec.decode(message, total, adds=True, cuts=chunk.cuts, error=self._wire.flags[:1])
        return total

    def _pull_raw(self, part: Part, parts: _Parts, received: Tensor) -> int:
        """Replace the values by sums in their dtype; what these were rounded by is left. Returns: the bytes of a part's."""
        wire, values = self._wire, part.values
        bounds = [(chunks[0].values.start, chunks[-1].values.stop) for chunks in parts]
        n_row = max(end - start for start, end in bounds)
        mine, sums = wire.scratch("own", n_row, values.dtype), self._rows("results", n_row, values.dtype)
        # As the CPU does: float16 may not hold the sum of values whose mean it holds.
        n_summed = self._world if values.dtype == torch.float16 else 1
        for chunk in parts[self._rank]:
            total = self._sum(chunk, received, values[chunk.values])
            raw = mine[chunk.within(bounds[self._rank][0])]
            if part.residual is not None:  # a product of its own: nothing may fuse it with the sum
                total.add_(part.residual[chunk.values] * part.loss_scale)
            raw.copy_(total if n_summed == 1 else wire.divide(total.clone(), n_summed))
            if part.unsent is not None:
                sent = raw.float().mul_(n_summed)
                wire.divide(part.unsent[chunk.values].copy_(total.sub_(sent)), part.loss_scale)
        wire.group.all_gather(sums, mine)
        for (start, end), row in zip(bounds, sums, strict=True):
            values[start:end].copy_(row[: end - start])
        wire.note(wire.all_finite(values))
        if n_summed == 1:  # in float32, as the CPU divides
            means = values if values.dtype == torch.float32 else wire.scratch("means", values.numel(), torch.float32)
            wire.divide(means.copy_(values), self._world)
            values.copy_(means)
        return n_row * values.element_size()

    def _rows(self, name: str, n_row: int, dtype: torch.dtype) -> Tensor:
        """(world, n_row) of work space."""
        return self._wire.scratch(name, self._world * n_row, dtype).view(self._world, n_row)

    def _encode(
        self,
        codec: Quantised,
        values: Tensor,
        chunk: Chunk,
        row: Tensor,
        draw: int,
        residual: Tensor | None,
        unsent: Tensor | None,
        scale: float,
    ) -> None:
        """Write a chunk's message into its row, and what it leaves out into `unsent` (n,) of the bucket."""
        before, after = (None if kept is None else kept[chunk.values] for kept in (residual, unsent))
        codec.encode(
            values,
            row[chunk.room],
            step=draw,
            cuts=chunk.cuts,
            residual=before,
            new_residual=after,
            residual_scale=scale,
        )


def _row_bytes(parts: _Parts) -> int:
    """Bytes of the longest part's messages."""
    return max(chunks[-1].room.stop for chunks in parts if chunks)
