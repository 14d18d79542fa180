"""How a fused buffer of tensors becomes its mean over the ranks, compressed: by push and pull, or round a ring.

Both write what this rank's encodings lost into `left_out`. Every value is encoded once by every rank: what it pushes to
an owner, or, at the owner, the sum; in the ring, the partial sum that it hands on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gradwire import _native
from gradwire.codecs import Codec
from gradwire.codecs.quantised import Quantised
from gradwire.core.bucket import Bucket
from gradwire.exchange.engine import Importance, engine_codec, ring_mean
from gradwire.exchange.groups import Cut
from gradwire.schemes.selection import AtLeast, Selection
from gradwire.telemetry.recorder import BucketRecord
from gradwire.wire.communicator import Communicator
from gradwire.wire.facts import Facts

# How much of its results an owner may send a peer before that peer adopts the first of them.
_PULL_BYTES_AHEAD = 2 << 20


class CutSelection(Selection):
    """The decision for one bucket layout and one threshold, and how the compressed values are cut over the ranks.

    Args:
        keeps_places: bit_buf is laid out as the bucket, with gaps where raw tensors lie, so that it can be the bucket.

    Attributes:
        n_bit_buf: values that bit_buf extends over: the compressed ones, and the gaps.
    """

    def __init__(
        self, bucket: Bucket, threshold_bytes: int, world_size: int, group_elements: int, keeps_places: bool
    ) -> None:
        super().__init__(bucket, AtLeast(threshold_bytes), keeps_places)
        self.keeps_places = keeps_places
        self.n_bit_buf = bucket.n_elements if keeps_places else self.n_compressed
        spans = [(span.fused, span.fused + span.n_elements) for span in self.compressed]
        self.cut = Cut(spans, world_size, group_elements)

    @property
    def part_edges(self) -> tuple[int, ...]:
        """Where the ranks' parts of a bit_buf without gaps end, 0 first."""
        assert not self.keeps_places
        n_parts = len(self.cut.groups)
        return tuple(self.n_compressed * part // n_parts for part in range(n_parts + 1))


class Source(NamedTuple):
    """What a rank brings in where it lies: (n,) float32 gradient, and residual or None, in the order of the fused buffer."""

    gradient: torch.Tensor
    residual: torch.Tensor | None


@dataclass(frozen=True)
class FusedExchange:
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

    @property
    def takes_source(self) -> bool:
        """Whether gradient and residual may be given apart, and are added as they are encoded."""
        return self.topology == "server" and isinstance(self.codec, Quantised)

    def mean(
        self,
        values: torch.Tensor,
        left_out: torch.Tensor,
        cut: Cut,
        facts: Facts,
        record: BucketRecord,
        importance: Importance | None = None,
        source: Source | None = None,
        is_finite: Callable[[], bool] = lambda: True,
        stays_with_owners: bool = False,
    ) -> Callable[[], None]:
        """Replace `values` (n,) float32 by the mean over the ranks; `left_out` (n,) float32 by what this rank lost.

        N x mean + the sum of all ranks' left_out = the sum of their values, to rounding. With `source` (only where
        `takes_source`) the values are its sum, and `values` need not hold anything, or may be the source's gradient.

        Args:
            is_finite: asked before the first value is replaced; if it says no, on every rank, none is.
            stays_with_owners: replace this rank's part alone, by the bits that a raw pull gives, and leave the others as they
                are; nothing is lost of the own part, and what is not finite is replaced all the same.
        Returns: what is left to do until the values are replaced: the last results are on their way then. One other
            exchange may be begun before.
        """
        communicator = self.communicator
        if self.topology != "server":
            assert source is None
            left_out.zero_()
            codec = self.codec
            if isinstance(codec, Quantised):
                codec = _Drawing(codec, first_draw(communicator, record))
            ring_mean(communicator, codec, values, facts, record, importance, self.group_elements, left_out)
            return lambda: None
        if communicator.world_size == 1 or not any(cut.n_groups):
            return lambda: None
        push = engine_codec(self.codec, torch.float32, importance)
        pull = push if self.pull_codec is self.codec else engine_codec(self.pull_codec, torch.float32, importance)
        gradient, residual = Source(values, None) if source is None else source
        exchange = _native.PieceExchange(
            communicator.mesh,
            communicator.next_stream(),
            facts,
            push,
            pull,
            cut.native,
            values,
            gradient,
            residual,
            left_out,
            first_draw(communicator, record),
            not stays_with_owners,
            _PULL_BYTES_AHEAD,
            lambda: not is_finite(),
        )
        record.add_account(*exchange.run())
        return (lambda: None) if stays_with_owners else lambda: record.add_account(*exchange.finish())


class _Drawing:
    """A quantiser in a ring, each of whose messages rounds by random numbers of its own."""

    def __init__(self, codec: Quantised, first_draw: int) -> None:
        self.name, self.feeds_back = codec.name, codec.feeds_back
        self.max_encoded_bytes, self.encode, self.decode = codec.max_encoded_bytes, codec.encode, codec.decode
        self.exchange_codec = functools.partial(codec.exchange_codec, first_step=first_draw)


def first_draw(communicator: Communicator, record: BucketRecord) -> int:
    """Where this rank's random numbers of this bucket and step begin: no other rank's, step's or bucket's are the same."""
    of_step = (record.step * communicator.world_size + communicator.rank) & 0xFFFFFF
    return (of_step << 40) | ((record.bucket & 0x3F) << 34)  # below that, 2^34 pieces or values of one bucket
