"""The mean over the ranks of tensors in one buffer, compressed: by push and pull, or round a ring.

Both write what this rank's encodings lost into `left_out`. Every value is encoded once by every rank: what it pushes to an
owner, or, at the owner, the sum; in the ring, the partial sum that it hands on. What is not finite travels as the codec has it.
"""

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire import _native
from gradwire.codecs import Codec
from gradwire.codecs.general import RawCodec
from gradwire.codecs.quantised import Quantised
from gradwire.core.bucket import Bucket, Layout
from gradwire.exchange.owners import DeviceOwners
from gradwire.exchange.parts import Chunk, Cut
from gradwire.exchange.ring import Importance, engine_codec, mean_through_codec
from gradwire.schemes.selection import Selection
from gradwire.schemes.slimgc.threshold import Choice
from gradwire.wire.device_wire import DeviceWire
from gradwire.wire.wire import Wire

# How much of its results an owner may send a peer before that peer adopts the first of them.
_PULL_BYTES_AHEAD = 2 << 20


class CutSelection(Selection):
    """The tensors of one bucket layout that one codec takes, and how their values are cut over the ranks.

    Attributes:
        keeps_places: bit_buf is laid out as the bucket, with gaps where raw tensors lie, so that it can be the bucket.
        firsts: of each message, whose mean is NaN altogether if any of it was not finite; None: its values may differ in that.
        part_layout: of the compressed tensors as a bucket of their own; None: not made yet.
        n_bit_buf: values that bit_buf extends over: the compressed ones, and the gaps.
    """

    def __init__(self, bucket: Bucket, choice: Choice, codec: int, world_size: int, exchange: "FusedExchange") -> None:
        codecs = iter(choice)
        super().__init__(bucket, lambda *_: next(codecs) == codec, exchange.adds_residual)
        self.codec, self.keeps_places, self.dtype = codec, exchange.adds_residual, bucket.buffer.dtype
        self.n_bit_buf = bucket.n_elements if self.keeps_places else self.n_compressed
        spans = [(span.fused, span.fused + span.n_elements) for span in self.compressed]
        self.cut = Cut(spans, world_size, exchange.group_elements)
        self.firsts = _firsts_of(self.cut) if exchange.is_flagged and self.dtype == torch.float32 else None
        self.part_layout: Layout | None = None


def _firsts_of(cut: Cut) -> Tensor:
    """(pieces,) int64: where each piece begins."""
    groups = [group for part in cut.groups for group in part]
    starts = [np.cumsum([group.start, *map(abs, group.sizes[:-1])])[np.array(group.sizes) > 0] for group in groups]
    return torch.from_numpy(np.concatenate(starts))


class FusedExchange:
    """Means through one codec. Raises: Unsupported (a codec without kernels, or no kernels here).

    Args:
        wire: where the values lie. On a device the codec is a quantiser, and all goes through owners.
        topology, pull, group_elements: as of the scheme.

    Attributes:
        adds_residual: whether a residual is added as the values are encoded.
        is_flagged: whether a message in host memory that was not finite is NaN altogether.
    """

    def __init__(self, wire: Wire, codec: Codec, topology: str, pull: str, group_elements: int) -> None:
        self._codec, self._topology, self.group_elements = codec, topology, group_elements
        self._pulls_raw = pull == "raw"
        self.adds_residual = topology == "server" and isinstance(codec, Quantised)
        self.is_flagged = self.adds_residual and not self._pulls_raw and not wire.on_device
        self._on_device: DevicePieces | None = None
        if isinstance(wire, DeviceWire):
            assert isinstance(codec, Quantised)
            self._on_device = DevicePieces(wire, codec)

    def mean(
        self,
        wire: Wire,
        cut: Cut,
        values: Tensor,
        residual: Tensor | None = None,
        left_out: Tensor | None = None,
        loss_scale: float = 1.0,
        importance: Importance | None = None,
    ) -> None:
        """Replace what `cut` has of `values` by its mean over the ranks; on the lane.

        N x mean + loss_scale x the sum of all ranks' left_out = the sum of their values + loss_scale x residual, to rounding.
        The values may only be replaced when the lane has done what it deferred: the last results are on their way then, and
        one other exchange may be begun before.

        Args:
            values: (n,), in host memory float32.
            residual, left_out: (n,) float32, of which the second is written; None: no error feedback.
            importance: of the values, for a codec that weighs them.
        """
        # Where this rank's random numbers of this bucket and step begin; below that, 2^34 pieces or values of one bucket.
        of_step = (wire.record.step * wire.world_size + wire.rank) & 0xFFFFFF
        draw = (of_step << 40) | ((wire.record.bucket & 0x3F) << 34)
        if self._on_device is not None:
            n_bytes = self._on_device.mean_of_pieces(values, cut, draw, residual, left_out, loss_scale)
            wire.record.count_exchanged(n_bytes)
            return
        if residual is not None and (loss_scale != 1.0 or not self.adds_residual):
            with wire.timing("encode"):
                values.add_(residual, alpha=loss_scale)
            residual = None
        lost = wire.scratch("left out", values.numel()) if left_out is None else left_out
        if self._topology == "server":
            push = engine_codec(self._codec, torch.float32, importance)
            pull = engine_codec(RawCodec(), torch.float32, None) if self._pulls_raw else push
            exchange = _native.PieceExchange(
                *wire.communicator.open_exchange(), wire.facts, push, pull, cut.native, values,
                residual, lost, draw, _PULL_BYTES_AHEAD,
            )  # fmt: skip
            wire.record.add_account(*exchange.run())
            wire.communicator.defer(lambda: wire.record.add_account(*exchange.finish()))
        else:
            drawn: dict[str, Any] = {"first_step": draw} if isinstance(self._codec, Quantised) else {}
            mean_through_codec(
                wire, self._codec, values, importance,
                chunk_elements=self.group_elements, left_out=lost.zero_(), **drawn,
            )  # fmt: skip
        if left_out is not None and loss_scale != 1.0:
            wire.divide(left_out, loss_scale)


class DevicePieces(DeviceOwners):
    """Push and pull where the values are: the messages and bits of native/exchange/means.hpp.

    Every tensor's piece of every part is a message of its own, so that a scale belongs to one tensor; a part's messages
    travel together, in rows of one length.
    """

    def mean_of_pieces(
        self, values: Tensor, cut: Cut, first_draw: int, residual: Tensor | None, left_out: Tensor | None, scale: float
    ) -> int:
        """As `FusedExchange.mean`; the message that begins at value k draws by `first_draw` + k. Returns: bytes sent,
        which are those received."""
        parts, rank = [self._chunks_of(cut, part) for part in range(self._world)], self._rank

        def encode(chunk_values: Tensor, part: int, index: int, row: Tensor) -> None:
            chunk, kept = parts[part][index], None if part == rank else residual  # the own part's is in the sum already
            draw = first_draw + chunk.values.start
            self._encode(self._codec, chunk_values, chunk, row, draw, kept, left_out, scale)

        def own(chunk: Chunk) -> Tensor:
            mine = values[chunk.values]
            return mine if residual is None else torch.add(mine.float(), residual[chunk.values], alpha=scale)

        return self._through_owners(values, parts, parts, encode, own)

    def _chunks_of(self, cut: Cut, part: int) -> list[Chunk]:
        """The pieces of a part, one after the other."""
        chunks, at = [], 0
        for group in cut.groups[part]:
            edges = itertools.pairwise(itertools.accumulate(map(abs, group.sizes), initial=group.start))
            for (first, last), size in zip(edges, group.sizes, strict=True):
                if size > 0:
                    room = self._codec.message_room(last - first)
                    chunks.append(Chunk(slice(first, last), slice(at, at + room)))
                    at += room
        return chunks
