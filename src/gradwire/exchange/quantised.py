"""Direct all-reduce of quantised parts with error feedback: push to each part's owner, add there, pull the result.

Unlike in the direct mean of a codec (engine.py), the gradient is left as it is until every rank has said that all it saw
was finite, so that the bucket can be reduced plainly instead; sums are float32 whatever the bucket's dtype; and what the
owner's message leaves out of a sum goes into the owner's own residual, where it weighs exactly what it lacks: a rank's
residual is a part of the sum.

Each stream begins with an opening (which parameters the sender used) and ends with a closing (whether all was finite).
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codecs.quantised import Quantised, is_nonfinite_message
from gradwire.errors import CorruptMessage
from gradwire.exchange.parts import QUANTISED_CHUNK_ELEMENTS, Parts
from gradwire.exchange.push_pull import Ends, push_pull
from gradwire.telemetry.recorder import BucketRecord
from gradwire.wire.communicator import Communicator
from gradwire.wire.facts import Facts

_MIN_CHUNKS = 2  # so that one is encoded while the other travels


@dataclass
class Exchange:
    """What one rank brings to the reduction of one bucket.

    Attributes:
        buffer: (n,) float32, bfloat16 or float16: the gradient; not changed.
        results: (n,) of the buffer's dtype: where the mean goes.
        residual, new_residual: (n,) float32, or None for no error feedback; only the second is changed.
        residual_scale: what the gradient is multiplied by and the residuals are not.
        spans: where each parameter lies, (start, end); those of all ranks are alike.
        is_used: for each parameter, whether this rank has a gradient of it. What is not used counts as zero, exactly.
        streams: (part, chunk, is_final) -> the number that this rank's stochastic rounding draws by.
        pulls_raw: whether the owners' sums travel in the buffer's own dtype instead of through the codec.
    """

    buffer: Tensor
    results: Tensor
    residual: Tensor | None
    new_residual: Tensor | None
    residual_scale: float
    spans: list[tuple[int, int]]
    is_used: list[bool]
    streams: Callable[[int, int, bool], int]
    pulls_raw: bool = False


def quantised_mean(
    communicator: Communicator,
    codec: Quantised,
    exchange: Exchange,
    facts: Facts,
    record: BucketRecord,
    chunk_elements: int = QUANTISED_CHUNK_ELEMENTS,
) -> list[bool] | None:
    """Write the mean over the ranks into exchange.results; runs on the lane, with at least two ranks.

    Returns: for each parameter whether any rank used it, where not the mean is zero; or None, on all ranks, if a value
        on some rank was not finite.
    Raises: PeerLost, RankMismatch, CorruptMessage, IncompatibleVersion.
    Cost: sends 2 (N-1)/N of the encoded buffer, to N-1 peers; every element is encoded once.
    """
    ends = _QuantisedEnds(communicator, codec, exchange, record, chunk_elements)
    push_pull(communicator, [ends.n_chunks] * communicator.world_size, ends, facts, record)()
    if not ends.is_finite:
        return None
    is_used = [any(flags) for flags in zip(*ends.is_used_by.values(), strict=True)]
    for (start, end), used in zip(exchange.spans, is_used, strict=True):
        if not used:
            exchange.results[start:end] = 0
    return is_used


class _QuantisedEnds(Ends):
    """A rank as the worker that pushes and pulls, and as the owner of its part, whose groups are chunks.

    Attributes:
        is_used_by: by rank, for each parameter whether it has a gradient of it.
        is_finite: whether all that was seen was finite.
    """

    def __init__(
        self,
        communicator: Communicator,
        codec: Quantised,
        exchange: Exchange,
        record: BucketRecord,
        chunk_elements: int,
    ) -> None:
        self._codec, self._exchange, self._record = codec, exchange, record
        self._world, self._rank = communicator.world_size, communicator.rank
        buffer = exchange.buffer
        self._parts = parts = Parts(buffer, self._world, chunk_elements, _MIN_CHUNKS)
        self.n_chunks, largest = parts.n_chunks, parts.max_chunk_elements
        # Where tensors begin, for codecs none of whose scales may serve two of them.
        self._starts = sorted({start for start, _ in exchange.spans}) if codec.scale_values else []
        self.max_push_bytes = codec.max_encoded_bytes(largest, buffer.dtype, len(self._starts))
        self.max_pull_bytes = largest * buffer.element_size() if exchange.pulls_raw else self.max_push_bytes
        self._total = communicator.scratch("quantised total", 4 * largest).view(torch.float32)
        self._decoded = communicator.scratch("quantised decoded", 4 * largest).view(torch.float32)
        self.is_used_by: dict[int, list[bool]] = {self._rank: exchange.is_used}
        self.is_finite = True

    def opening(self) -> bytes:
        return _pack_bits(self._exchange.is_used)

    def take_opening(self, source: int, told: bytes) -> None:
        self.is_used_by[source] = _unpack_bits(told, len(self._exchange.spans), source)

    def closing(self) -> bytes:
        return bytes([self.is_finite])

    def take_closing(self, source: int, told: bytes) -> None:
        if told not in (b"\0", b"\1"):
            raise CorruptMessage(f"rank {source} closed its stream with {told[:8]!r}, which gradwire does not write")
        self.is_finite &= told == b"\1"

    # ---- values

    def encode_push(self, part: int, group: int, out: Tensor) -> int:
        return self._encode(self._parts.slice_of(self._exchange.buffer, part, group), part, group, out, is_final=False)

    def _cuts(self, part: int, chunk: int) -> list[int]:
        """Where tensors begin within a chunk."""
        first, last = self._parts.bounds(part, chunk)
        within = slice(bisect_right(self._starts, first), bisect_left(self._starts, last))
        return [start - first for start in self._starts[within]]

    def _encode(self, values: Tensor, part: int, chunk: int, out: Tensor, is_final: bool) -> int:
        exchange, stream = self._exchange, self._exchange.streams(part, chunk, is_final)
        started = time.perf_counter_ns()
        if exchange.residual is None or exchange.new_residual is None:
            n_bytes = self._codec.encode(values, out, step=stream, cuts=self._cuts(part, chunk))
        else:
            n_bytes = self._codec.encode_with_residual(
                values,
                self._parts.slice_of(exchange.residual, part, chunk),
                out,
                stream,
                new_residual=self._parts.slice_of(exchange.new_residual, part, chunk),
                residual_scale=exchange.residual_scale,
                cuts=self._cuts(part, chunk),
            )
        self._record.add("encode", started, time.perf_counter_ns())
        return n_bytes

    def _total_of(self, source: int, group: int) -> Tensor:
        """(m,) float32: the sum of what has been added of this rank's chunk; zeros before the first rank's values."""
        first, last = self._parts.bounds(self._rank, group)
        total = self._total[: last - first]
        return total.zero_() if source == 0 else total

    def add_own(self, group: int) -> None:
        self._total_of(self._rank, group).add_(self._parts.slice_of(self._exchange.buffer, self._rank, group))

    def add_pushed(self, source: int, group: int, message: Tensor) -> None:
        total = self._total_of(source, group)
        decoded = self._decoded[: total.numel()]
        started = time.perf_counter_ns()
        self._note_if_nonfinite(message, total.numel())
        self._codec.decode(message, decoded)
        self._clear_unused(decoded, source, group)
        total.add_(decoded)
        self._record.add("decode", started, time.perf_counter_ns())

    def _clear_unused(self, decoded: Tensor, source: int, chunk: int) -> None:
        """Zero for what `source` did not use: a bit alone cannot say zero."""
        is_used = self.is_used_by[source]
        if all(is_used):
            return
        first, last = self._parts.bounds(self._rank, chunk)
        for (start, end), used in zip(self._exchange.spans, is_used, strict=True):
            if not used and start < last and end > first:
                decoded[max(start, first) - first : min(end, last) - first] = 0

    def encode_pull(self, group: int, out: Tensor) -> int:
        total = self._total_of(self._world, group)
        if not self._exchange.pulls_raw:
            n_bytes = self._encode(total, self._rank, group, out, is_final=True)
            self._note_if_nonfinite(out[:n_bytes], total.numel())
            return n_bytes
        exchange = self._exchange
        started = time.perf_counter_ns()
        if exchange.residual is not None:
            own = self._parts.slice_of(exchange.residual, self._rank, group)
            total.add_(own, alpha=exchange.residual_scale)
        raw = out[: total.numel() * exchange.buffer.element_size()].view(exchange.buffer.dtype)
        raw.copy_(total)
        self.is_finite &= math.isfinite(float(torch.linalg.vector_norm(raw, float("inf"), dtype=torch.float32)))
        if exchange.new_residual is not None:
            left_out = self._parts.slice_of(exchange.new_residual, self._rank, group)
            torch.sub(total, raw, out=left_out).div_(exchange.residual_scale)
        self._record.add("encode", started, time.perf_counter_ns())
        return raw.numel() * raw.element_size()

    def adopt(self, part: int, group: int, message: Tensor) -> None:
        """Put message / world size where the chunk lies: what every rank does with the same bytes."""
        result = self._parts.slice_of(self._exchange.results, part, group)
        started = time.perf_counter_ns()
        if self._exchange.pulls_raw:
            if message.numel() != result.numel() * result.element_size():
                raise CorruptMessage(f"rank {part} sent {message.numel()} bytes for {result.numel()} raw values")
            result.view(torch.uint8).copy_(message)
            result.div_(self._world)
        else:
            values = result if result.dtype == torch.float32 else self._decoded[: result.numel()]
            self._note_if_nonfinite(message, result.numel())
            self._codec.decode(message, values)
            values.div_(self._world)
            if values is not result:
                result.copy_(values)
        self._record.add("decode", started, time.perf_counter_ns())

    def _note_if_nonfinite(self, message: Tensor, n_elements: int) -> None:
        if is_nonfinite_message(message, n_elements):
            self.is_finite = False


def _pack_bits(flags: list[bool]) -> bytes:
    """At least one byte, so that a stream always has an opening."""
    packed = bytearray(max(1, -(-len(flags) // 8)))
    for place, flag in enumerate(flags):
        packed[place // 8] |= flag << place % 8
    return bytes(packed)


def _unpack_bits(packed: bytes, n_flags: int, peer: int) -> list[bool]:
    if len(packed) != max(1, -(-n_flags // 8)):
        raise CorruptMessage(f"rank {peer} opened its stream with {len(packed)} bytes for {n_flags} parameters")
    return [bool(packed[place // 8] >> place % 8 & 1) for place in range(n_flags)]
