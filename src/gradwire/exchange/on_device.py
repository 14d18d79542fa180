"""The exchange through owners for messages that are made and read on devices: the bits of `owners.Owners`.

Each rank encodes its share of every part, an all-to-all brings the shares to the parts' owners, who add them in rank order
and encode the sum (or leave it as it is), and an all-gather brings that to all. Messages have a fixed room, so both
collectives have equal rows. Everything is enqueued on the site's stream and nothing is read by the host: what is not finite
or not whole becomes NaN on all ranks and is noted in the site's flags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.quantised import Quantised
from gradwire.core.bucket import Bucket
from gradwire.exchange.parts import QUANTISED_MIN_CHUNKS, count_chunks
from gradwire.gpu.launching import raise_error
from gradwire.wire.communicator import Communicator
from gradwire.wire.device_wire import DeviceWire

_FLAGS_AT = 6  # in a message's header: 1 says that a value was not finite (docs/format.md)


class Chunk(NamedTuple):
    """What one message is about: `values` of the bucket, `room` of its part's row; `cuts` where tensors begin in it."""

    values: slice
    room: slice
    cuts: tuple[int, ...]


_Parts = list[list[Chunk]]  # for each rank, the chunks of the part that it owns
_Encode = Callable[[Tensor, int, int, Tensor], None]


class Left(NamedTuple):
    """What earlier messages left out and what these do, (n,) float32 in units of the gradient / `scale`; None: nothing."""

    residual: Tensor | None
    unsent: Tensor | None
    scale: float


class DeviceOwners:
    """Means over the ranks of one site.

    Args:
        codec: what makes the messages.
        chunk_elements: values to a message, at most.
        pulls_raw: sums come back in the bucket's dtype, not quantised.
    Raises: Unsupported (a codec without kernels, or no kernels here).
    """

    def __init__(
        self,
        site: DeviceWire,
        codec: Quantised,
        communicator: Communicator,
        chunk_elements: int,
        pulls_raw: bool = False,
    ) -> None:
        codec.check_device(site.device)
        self._site, self._codec, self._rank, self._world = site, codec, communicator.rank, communicator.world_size
        self._chunk_elements, self._pulls_raw = chunk_elements, pulls_raw
        self._cuts: dict[tuple[int, ...], _Parts] = {}

    def mean(self, bucket: Bucket, residual: Tensor | None, unsent: Tensor | None, loss_scale: float) -> int:
        """Replace the bucket by its mean; on the lane, with the site's stream current.

        Args:
            residual, unsent: (n,) float32 on the device, of which the second is written; None: no error feedback.
        Returns: bytes sent, which are those received.
        """
        parts, left = self._parts(bucket), Left(residual, unsent, loss_scale)

        def encode(values: Tensor, part: int, index: int, row: Tensor) -> None:
            draw = bucket.draw(self._rank, part, index, part == self._rank)
            self._encode(values, parts[part][index], row, draw, left)

        def own(chunk: Chunk) -> Tensor:
            return bucket.buffer[chunk.values]

        if not self._pulls_raw:
            return self._through_owners(bucket.buffer, parts, encode, own)
        received = self._push(bucket.buffer, parts, encode)
        totals = (self._sum(chunk, index, received, own) for index, chunk in enumerate(parts[self._rank]))
        return (self._world - 1) * (received.shape[1] + self._pull_raw(bucket.buffer, parts, totals, left))

    def _through_owners(self, values: Tensor, parts: _Parts, encode: _Encode, own: Callable[[Chunk], Tensor]) -> int:
        """Replace `values` (n,), as far as chunks are about them, by their mean, which travels as messages both ways.

        Args:
            encode: (values, part, index of the chunk, row) writes what goes to the part's owner, or, of the own part, to
                all, into the row.
            own: what this rank adds of its own part's chunk, unencoded.
        Returns: bytes sent, which are those received.
        """
        rank, world = self._rank, self._world
        received = self._push(values, parts, encode)
        row_bytes = received.shape[1]
        results = self._rows("results", row_bytes, torch.uint8)
        with self._site.timing("decode"):
            for index, chunk in enumerate(parts[rank]):
                encode(self._sum(chunk, index, received, own), rank, index, results[rank])
            mine = self._site.scratch("own", row_bytes, torch.uint8).copy_(results[rank])
        with self._site.timing("communicate"):
            self._site.group.all_gather(results, mine)
        with self._site.timing("decode"):
            for part, chunks in enumerate(parts):
                for chunk in chunks:
                    message = results[part][chunk.room]
                    self._site.flags[1:].bitwise_or_(message[_FLAGS_AT : _FLAGS_AT + 1])
                    self._decode(message, values[chunk.values], chunk.cuts, divisor=world)
        return 2 * (world - 1) * row_bytes

    def _push(self, values: Tensor, parts: _Parts, encode: _Encode) -> Tensor:
        """(world, bytes): what each rank has sent of this one's part."""
        row_bytes = max(chunks[-1].room.stop for chunks in parts if chunks)
        sent, received = (self._rows(name, row_bytes, torch.uint8) for name in ("sent", "received"))
        with self._site.timing("encode"):
            for part in (part for part in range(self._world) if part != self._rank):
                for index, chunk in enumerate(parts[part]):
                    encode(values[chunk.values], part, index, sent[part])
        with self._site.timing("communicate"):
            self._site.group.all_to_all(received, sent)
        return received

    def _sum(self, chunk: Chunk, index: int, received: Tensor, own: Callable[[Chunk], Tensor]) -> Tensor:
        """(n,) float32 until the next one: the shares of a chunk of this rank's part, in rank order, its own as it is."""
        total = self._site.scratch("total", chunk.values.stop - chunk.values.start, torch.float32).zero_()
        for source in range(self._world):
            if source == self._rank:
                total.add_(own(chunk))
            else:
                self._decode(received[source][chunk.room], total, chunk.cuts, adds=True)
        return total

    def _pull_raw(self, buffer: Tensor, parts: _Parts, totals: Iterable[Tensor], left: Left) -> int:
        """Sums in the bucket's dtype; what they were rounded by is left. Returns: the bytes of a part's."""
        site = self._site
        bounds = [(chunks[0].values.start, chunks[-1].values.stop) for chunks in parts]
        first, _ = bounds[self._rank]
        n_row = max(end - start for start, end in bounds)
        own, sums = site.scratch("own", n_row, buffer.dtype), self._rows("results", n_row, buffer.dtype)
        # As the CPU does: float16 may not hold the sum of values whose mean it holds.
        n_summed = self._world if buffer.dtype == torch.float16 else 1
        for chunk, total in zip(parts[self._rank], totals, strict=True):
            raw = own[chunk.values.start - first : chunk.values.stop - first]
            if left.residual is not None:  # a product of its own: nothing may fuse it with the sum
                total.add_(left.residual[chunk.values] * left.scale)
            raw.copy_(total if n_summed == 1 else site.divide(total.clone(), n_summed))
            if left.unsent is not None:
                sent = raw.float().mul_(n_summed)
                site.divide(left.unsent[chunk.values].copy_(total.sub_(sent)), left.scale)
        site.group.all_gather(sums, own)
        for (start, end), row in zip(bounds, sums, strict=True):
            buffer[start:end].copy_(row[: end - start])
        site.note(site.all_finite(buffer))
        if n_summed > 1:
            return n_row * buffer.element_size()
        # In float32, as the CPU divides.
        means = buffer if buffer.dtype == torch.float32 else site.scratch("means", buffer.numel(), torch.float32)
        site.divide(means.copy_(buffer), self._world)
        buffer.copy_(means)
        return n_row * buffer.element_size()

    def _rows(self, name: str, n_row: int, dtype: torch.dtype) -> Tensor:
        """(world, n_row) of work space."""
        return self._site.scratch(name, self._world * n_row, dtype).view(self._world, n_row)

    def raise_error(self, code: int) -> None:
        """Raise what an error word says, if anything. Raises: CorruptMessage, IncompatibleVersion."""
        raise_error(code, f"{self._codec.name} message", self._site.device)

    def _encode(self, values: Tensor, chunk: Chunk, row: Tensor, draw: int, left: Left) -> None:
        """Write a chunk's message into its row, and what it leaves out into `left`."""
        room, cuts = row[chunk.room], chunk.cuts
        if left.unsent is None:
            self._codec.encode(values, room, step=draw, cuts=cuts)
            return
        residual, unsent = (None if part is None else part[chunk.values] for part in (left.residual, left.unsent))
        self._codec.encode_with_residual(
            values, residual, room, draw, new_residual=unsent, residual_scale=left.scale, cuts=cuts
        )

    def _decode(
        self, message: Tensor, out: Tensor, cuts: tuple[int, ...], *, divisor: float = 1.0, adds: bool = False
    ) -> None:
        self._codec.decode(message, out, divisor=divisor, adds=adds, cuts=cuts, error=self._site.flags[:1])

    def _parts(self, bucket: Bucket) -> _Parts:
        """For each rank, the chunks of the part that it owns."""
        n = bucket.n_elements
        starts = sorted({start for start, _ in bucket.spans}) if self._codec.scale_values else []
        key = n, *starts
        if key not in self._cuts:
            n_chunks = count_chunks(-(-n // self._world), self._chunk_elements, QUANTISED_MIN_CHUNKS)
            self._cuts[key] = [self._chunks(n, part, n_chunks, starts) for part in range(self._world)]
        return self._cuts[key]

    def _chunks(self, n: int, part: int, n_chunks: int, starts: list[int]) -> list[Chunk]:
        begin, end = n * part // self._world, n * (part + 1) // self._world
        chunks, at = [], 0
        for index in range(n_chunks):
            first, last = (begin + (end - begin) * bound // n_chunks for bound in (index, index + 1))
            cuts = tuple(start - first for start in starts if first < start < last)
            room = self._codec.message_room(last - first, cuts)
            chunks.append(Chunk(slice(first, last), slice(at, at + room), cuts))
            at += room
        return chunks
