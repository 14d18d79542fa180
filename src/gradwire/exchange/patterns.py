"""Exchanges: how the payloads that codecs make of a bucket become its mean over the ranks."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from gradwire import _native
from gradwire.codecs.quantised import Quantised
from gradwire.codecs.tensors import bytes_of, dtype_code
from gradwire.core.bucket import Bucket
from gradwire.exchange.parts import QUANTISED_CHUNK_ELEMENTS, QUANTISED_MIN_CHUNKS, count_chunks
from gradwire.wire.wire import Wire


class Values(NamedTuple):
    """One rank's bucket as a codec sees it: gradient + residual x loss_scale is to be sent; what is not goes to `unsent`.

    Attributes:
        bucket: the gradient, (n,); the mean is written over it.
        is_used: for each parameter, whether this rank has a gradient of it. The others' residuals count as zero.
        residual: (n,) float32, or None for no error feedback.
        unsent: (n,) float32, in units of the residual.
    """

    bucket: Bucket
    is_used: list[bool]
    residual: Tensor | None
    unsent: Tensor | None
    loss_scale: float

    @property
    def gradient(self) -> Tensor:
        return self.bucket.buffer

    def summed(self, wire: Wire) -> Tensor:
        """(n,) float32, to be changed: gradient + residual x loss_scale, where what stays of it is kept."""
        out = wire.scratch("summed", self.bucket.n_elements) if self.unsent is None else self.unsent
        out.copy_(self.gradient)
        return out if self.residual is None else out.add_(self.residual, alpha=self.loss_scale)

    def keep(self, unsent: Tensor) -> None:
        """Take the loss scale off what stays of `summed`."""
        if self.unsent is not None:
            unsent.div_(self.loss_scale)


class Reached(NamedTuple):
    """A mean that is in the bucket.

    Attributes:
        used_by_any: for each parameter, whether its result counts although this rank did not use it.
        counted: the elements of which this rank's message counted although it did not use them; None: all.
    """

    used_by_any: list[bool]
    counted: tuple[int, int] | None = None


class Exchange(Protocol):
    """One pattern of messages."""

    def mean(self, codec: Any, values: Values, wire: Wire) -> Reached | None:
        """Replace the bucket by its mean, on the lane; None, on all ranks, and the bucket as it was, if not finite."""
        ...


class GatherCodec(Protocol):
    """Payloads of one size on all ranks, which every rank combines."""

    def encode(self, values: Values, wire: Wire) -> tuple[Tensor, bool]:
        """(n,) int32, and whether the gradient was finite."""
        ...

    def decode(self, payloads: Tensor, values: Values, wire: Wire) -> None:
        """(world, n) by rank: write the mean into the bucket."""
        ...


class Gather:
    """Every rank gets every payload, and combines them in rank order."""

    def mean(self, codec: GatherCodec, values: Values, wire: Wire) -> Reached | None:
        with wire.timing("encode"):
            payload, is_finite = codec.encode(values, wire)
        met = self._meet(wire, payload, is_finite)
        if met is None:
            return None
        with wire.timing("decode"):
            codec.decode(met, values, wire)
        return Reached(values.is_used)

    def _meet(self, wire: Wire, payload: Tensor, is_finite: bool) -> Tensor | None:
        return wire.gather(payload, is_finite)


class FloatSum(Gather):
    """Float payloads, (n,) float32, of places that all ranks know, summed by the backend. Codecs as for `Gather`."""

    def _meet(self, wire: Wire, payload: Tensor, is_finite: bool) -> Tensor | None:
        return wire.sum_floats(payload, is_finite)


class ScaledCodec(Protocol):
    """Integers that every rank makes of its gradient by scales that all share."""

    def n_scales(self, bucket: Bucket) -> int: ...

    def write_scales(self, values: Values, out: Tensor) -> None:
        """out (n_scales,) float32, not negative: this rank's own; not finite if the gradient is not."""
        ...

    def encode(self, values: Values, scales: Tensor, wire: Wire) -> Tensor:
        """The integers, by the scales that all ranks share."""
        ...

    def decode(self, sums: Tensor, values: Values, scales: Tensor, wire: Wire) -> None:
        """Sums to means, in the bucket."""
        ...


class ScaledSum:
    """Two rounds: the largest of every rank's scales, by which all then quantise; and the sum of integers."""

    def mean(self, codec: ScaledCodec, values: Values, wire: Wire) -> Reached | None:
        n_scales = codec.n_scales(values.bucket)
        agreed = wire.largest(values.is_used, n_scales, lambda out: codec.write_scales(values, out))
        if agreed is None:
            return None
        used_by_any, scales = agreed
        with wire.timing("encode"):
            codes = codec.encode(values, scales, wire)
        wire.sum(codes)
        with wire.timing("decode"):
            codec.decode(codes, values, scales, wire)
            for (start, end), used in zip(values.bucket.spans, used_by_any, strict=True):
                if not used:
                    values.gradient[start:end] = 0
        return Reached(used_by_any)


class Owners:
    """Pushed to each part's owner, added there to its own, unquantised share, and pulled: native/exchange/quantised.hpp.

    Args:
        pulls_raw: sums travel in the bucket's own dtype. Otherwise quantised again: what that loses is the owner's.
        chunk_elements: values to a message; each message has its own scales.
    """

    def __init__(self, pulls_raw: bool = False, chunk_elements: int = QUANTISED_CHUNK_ELEMENTS) -> None:
        self.pulls_raw, self.chunk_elements = pulls_raw, chunk_elements

    def mean(self, codec: Quantised, values: Values, wire: Wire) -> Reached | None:
        """Cost: sends 2 (N-1)/N of the encoded bucket, to N-1 peers; every element is encoded once."""
        bucket, n, rank, world = values.bucket, values.bucket.n_elements, wire.rank, wire.world_size
        n_chunks = count_chunks(-(-bucket.n_elements // world), self.chunk_elements, QUANTISED_MIN_CHUNKS)
        used_by_any, account = _native.quantised_mean(
            wire.communicator.mesh,
            wire.communicator.next_stream(),
            wire.facts,
            codec.native_options,
            bytes_of(bucket.buffer),
            dtype_code(bucket.buffer.dtype),
            values.residual,
            values.unsent,
            values.loss_scale,
            bucket.spans,
            values.is_used,
            n_chunks,
            [bucket.draw(rank, part, chunk, part == rank) for part in range(world) for chunk in range(n_chunks)],
            self.pulls_raw,
        )
        wire.record.add_account(*account)
        if used_by_any is None:
            return None
        return Reached(used_by_any, (n * rank // world, n * (rank + 1) // world))
