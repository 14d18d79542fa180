"""How a fused buffer of tensors becomes its mean over the ranks, compressed: by push and pull, or round a ring.

Both write what this rank's encodings lost into `left_out`. Every value is encoded once by every rank: what it pushes to
an owner, or, at the owner, the sum; in the ring, the partial sum that it hands on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from gradwire.codecs import Codec, pieces
from gradwire.codecs.quantised import Quantised
from gradwire.exchange.engine import Importance, ring_mean
from gradwire.exchange.push_pull import Cut, Ends, Group, push_pull
from gradwire.telemetry.recorder import BucketRecord
from gradwire.wire.communicator import Communicator
from gradwire.wire.facts import Facts


class Source(NamedTuple):
    """What a rank brings in where it lies: (n,) float32 gradient, and residual or None, in the order of the fused buffer."""

    gradient: torch.Tensor
    residual: torch.Tensor | None


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

    @property
    def takes_source(self) -> bool:
        """Whether gradient and residual may be given apart, and are added as they are encoded."""
        return self.topology == "server" and pieces.is_one_call(self.codec)

    def mean(
        self,
        values: torch.Tensor,
        left_out: torch.Tensor,
        cut: Cut,
        facts: Facts,
        record: BucketRecord,
        importance: Importance | None = None,
        source: Source | None = None,
        is_void: Callable[[], bool] = lambda: False,
    ) -> Callable[[], None]:
        """Replace `values` (n,) float32 by the mean over the ranks; `left_out` (n,) float32 by what this rank lost.

        N x mean + the sum of all ranks' left_out = the sum of their values, to rounding. With `source` (only where
        `takes_source`) the values are its sum, and `values` need not hold anything, or may be the source's gradient.

        Args:
            is_void: asked before the first value is replaced; if it says so, on every rank, none is.
        Returns: what is left to do until the values are replaced (gradwire.exchange.push_pull).
        """
        if self.topology == "server":
            ends = _ServerEnds(self, values, left_out, cut, record, importance, source, is_void)
            return push_pull(self.communicator, cut.n_groups, ends, facts, record)
        assert source is None
        left_out.zero_()
        ring_mean(self.communicator, self.codec, values, facts, record, importance, self.group_elements, left_out)
        return lambda: None

    def push(
        self,
        values: torch.Tensor,
        left_out: torch.Tensor,
        cut: Cut,
        facts: Facts,
        record: BucketRecord,
        importance: Importance | None = None,
        source: Source | None = None,
        is_void: Callable[[], bool] = lambda: False,
    ) -> Callable[[], None]:
        """Replace this rank's part of `values` (n,) float32 by its mean over the ranks, and leave the other parts alone.

        `left_out` is as in `mean`: nothing is lost of the own part. The mean has the bits that `mean` gives with a raw
        pull. What is void is replaced all the same. Nothing is left to do.
        """
        ends = _ServerEnds(self, values, left_out, cut, record, importance, source, is_void, has_pull=False)
        return push_pull(self.communicator, cut.n_groups, ends, facts, record, has_pull=False)


class _ServerEnds(Ends):
    """A rank as a worker, which pushes and pulls, and as the server of its own part."""

    def __init__(
        self,
        exchange: Exchange,
        values: torch.Tensor,
        left_out: torch.Tensor,
        cut: Cut,
        record: BucketRecord,
        importance: Importance | None,
        source: Source | None,
        is_void: Callable[[], bool] = lambda: False,
        has_pull: bool = True,
    ) -> None:
        self._has_pull, self._is_void = has_pull, is_void
        self._source = Source(values, None) if source is None else source
        self._codec, self._pull_codec = exchange.codec, exchange.pull_codec
        self._values, self._left_out, self._cut = values, left_out, cut
        self._record = record
        communicator = exchange.communicator
        self._rank, self._world_size = communicator.rank, communicator.world_size
        self.max_push_bytes = _max_group_bytes(self._codec, cut)
        self.max_pull_bytes = _max_group_bytes(self._pull_codec, cut)
        n_bytes = 4 * cut.max_group_elements
        self._draw = _first_draw(communicator, record)
        self._importance: torch.Tensor | None = None
        if importance is not None:  # needed until the last result is adopted, when the next bucket is under way
            with record.timing("importance"):
                self._importance = communicator.scratch(f"importance {record.bucket % 2}", values.numel()).zero_()
                importance.write(0, self._importance)
        self._total = communicator.scratch("server total", n_bytes).view(torch.float32)
        self._decoded = communicator.scratch("server decoded", n_bytes).view(torch.float32)

    # ---- as a worker

    def encode_push(self, part: int, group: int, out: torch.Tensor) -> int:
        pushed = self._cut.groups[part][group]
        own = self._source_of(pushed.start, pushed.end)
        return self._encode(self._codec, pushed, own.gradient, out, own.residual)

    def adopt(self, part: int, group: int, message: torch.Tensor) -> None:
        if self._is_void():
            return
        start, end, sizes = self._cut.groups[part][group]
        with self._record.timing("decode"):
            values, weights = self._values[start:end], self._importance_of(start, end)
            pieces.decode(self._pull_codec, message, sizes, values, self._world_size, weights)

    # ---- as the server of its own part

    def add_pushed(self, source: int, group: int, message: torch.Tensor) -> None:
        start, end, sizes = self._cut.groups[self._rank][group]
        total, weights = self._total[: end - start], self._importance_of(start, end)
        with self._record.timing("decode"):
            if source == 0:
                pieces.decode(self._codec, message, sizes, total, importance=weights)
            else:
                pieces.add(self._codec, message, sizes, total, self._decoded[: end - start], weights)

    def add_own(self, group: int) -> None:
        start, end, _ = self._cut.groups[self._rank][group]
        total = self._total[: end - start]
        with self._record.timing("decode"):
            # Its own values never leave this rank, so they stay exact; what was left out of them is in the sum.
            own, residual = self._source_of(start, end)
            if residual is not None:
                own = torch.add(own, residual, out=self._decoded[: end - start])
            total.copy_(own) if self._rank == 0 else total.add_(own)

    def encode_pull(self, group: int, out: torch.Tensor) -> int:
        pulled = self._cut.groups[self._rank][group]
        total = self._total[: pulled.end - pulled.start]
        if not self._has_pull:
            self._left_out[pulled.start : pulled.end].zero_()
            torch.div(total, self._world_size, out=self._values[pulled.start : pulled.end])
            return 0
        # It will adopt the very values that the others decode: sum - what the encoding lost would round differently.
        return self._encode(self._pull_codec, pulled, total, out)

    # ---- as both

    def _importance_of(self, start: int, end: int) -> torch.Tensor | None:
        return None if self._importance is None else self._importance[start:end]

    def _source_of(self, start: int, end: int) -> Source:
        gradient, residual = self._source
        return Source(gradient[start:end], None if residual is None else residual[start:end])

    def _encode(
        self, codec: Codec, group: Group, values: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None
    ) -> int:
        start, end, sizes = group
        importance = self._importance_of(start, end)
        with self._record.timing("encode"):
            left_out = self._left_out[start:end]
            n_bytes = pieces.encode(codec, values, sizes, out, left_out, self._draw + start, importance, residual)
        return n_bytes


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
    return max((pieces.max_encoded_bytes(codec, group.sizes) for part in cut.groups for group in part), default=0)
