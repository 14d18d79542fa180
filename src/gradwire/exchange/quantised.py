"""Direct all-reduce of quantised parts with error feedback: push to each part's owner, add there, pull the result.

Unlike direct.py, the gradient is left as it is until every rank has said that all it saw was finite, so that the bucket
can be reduced plainly instead; sums are float32 whatever the bucket's dtype; and what the owner's message leaves out of
a sum goes into the owner's own residual, where it weighs exactly what it lacks: a rank's residual is a part of the sum.

Each stream begins with an opening (which parameters the sender used) and ends with a closing (whether all was finite).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradwire.codecs.quantised import Quantised, is_nonfinite_message
from gradwire.errors import CorruptMessage
from gradwire.exchange.frames import FrameReceiver, FrameSender
from gradwire.exchange.parts import QUANTISED_CHUNK_ELEMENTS, Parts
from gradwire.telemetry.recorder import BucketRecord
from gradwire.wire.communicator import Communicator
from gradwire.wire.facts import Facts

_CHUNKS_AHEAD = 2  # as in ring.py
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
    return _QuantisedMean(communicator, codec, exchange, facts, record, chunk_elements).run()


class _QuantisedMean:
    def __init__(
        self,
        communicator: Communicator,
        codec: Quantised,
        exchange: Exchange,
        facts: Facts,
        record: BucketRecord,
        chunk_elements: int,
    ) -> None:
        self._codec, self._exchange, self._record = codec, exchange, record
        self._world, self._rank = communicator.world_size, communicator.rank
        buffer = exchange.buffer
        self._parts = parts = Parts(buffer, self._world, chunk_elements, _MIN_CHUNKS)
        self._n_chunks = n_chunks = parts.n_chunks
        self._ahead = min(_CHUNKS_AHEAD, n_chunks - 1)
        largest = parts.max_chunk_elements
        pushed_bytes = codec.max_encoded_bytes(largest, buffer.dtype)
        pulled_bytes = largest * buffer.element_size() if exchange.pulls_raw else pushed_bytes
        self._opening = _pack_bits(exchange.is_used)
        max_bytes = max(pushed_bytes, pulled_bytes, self._opening.numel())
        # The owner's final messages wait here from the reduction of their chunk until the gathering begins.
        self._finals = communicator.scratch("quantised finals", n_chunks * max_bytes).view(n_chunks, -1)
        self._final_bytes = [0] * n_chunks
        self._message = communicator.scratch("quantised message", max_bytes)
        self._total = communicator.scratch("quantised total", 4 * largest).view(torch.float32)
        self._decoded = communicator.scratch("quantised decoded", 4 * largest).view(torch.float32)
        # Each rank begins with its right neighbour, so that not all of them send to the same rank at once.
        self._peers = [(self._rank + distance) % self._world for distance in range(1, self._world)]
        tag = communicator.next_stream()
        n_messages = 2 * n_chunks + 2  # with the opening and the closing one
        n_ahead = self._ahead + 1  # the opening goes before
        self._senders = {
            peer: FrameSender(communicator, peer, tag, facts, max_bytes, n_ahead, record) for peer in self._peers
        }
        self._receivers = {
            peer: FrameReceiver(communicator, peer, tag, facts, max_bytes, n_ahead, n_messages, record)
            for peer in self._peers
        }
        self._is_used_by: dict[int, list[bool]] = {self._rank: exchange.is_used}
        self._is_finite = True

    def run(self) -> list[bool] | None:
        for sender in self._senders.values():
            sender.write(self._opening)
        for number in range(2 * self._n_chunks + self._ahead):
            if number < 2 * self._n_chunks:
                self._write(number)
            if number >= self._ahead:
                self._read(number - self._ahead)
        for sender in self._senders.values():
            sender.finish()
        if not self._is_finite:
            return None
        is_used = [any(flags) for flags in zip(*self._is_used_by.values(), strict=True)]
        for (start, end), used in zip(self._exchange.spans, is_used, strict=True):
            if not used:
                self._exchange.results[start:end] = 0
        return is_used

    # ---- the stream

    def _write(self, number: int) -> None:
        gathering, chunk = divmod(number, self._n_chunks)
        for peer in self._peers:
            sender = self._senders[peer]
            if gathering:
                sender.write(self._finals[chunk, : self._final_bytes[chunk]])
            else:
                sender.write(self._encode_push(peer, chunk))
            if number == 2 * self._n_chunks - 1:
                sender.write(torch.tensor([self._is_finite], dtype=torch.uint8))

    def _read(self, number: int) -> None:
        gathering, chunk = divmod(number, self._n_chunks)
        if number == 0:
            for peer, receiver in self._receivers.items():
                self._is_used_by[peer] = _unpack_bits(receiver.read(), len(self._exchange.spans), peer)
        if gathering:
            for peer in reversed(self._peers):
                self._adopt(self._receivers[peer].read(), peer, chunk)
                if number == 2 * self._n_chunks - 1:
                    self._read_closing(peer)
        else:
            self._final_bytes[chunk] = self._encode_final(self._reduce_chunk(chunk), chunk)
            self._adopt(self._finals[chunk, : self._final_bytes[chunk]], self._rank, chunk)

    def _read_closing(self, peer: int) -> None:
        closing = self._receivers[peer].read().tolist()
        if closing not in ([0], [1]):
            raise CorruptMessage(f"rank {peer} closed its stream with {closing[:8]}, which gradwire does not write")
        self._is_finite &= closing == [1]

    # ---- values

    def _encode_push(self, part: int, chunk: int) -> Tensor:
        gradient = self._parts.slice_of(self._exchange.buffer, part, chunk)
        return self._message[: self._encode(gradient, part, chunk, self._message, is_final=False)]

    def _encode(self, values: Tensor, part: int, chunk: int, out: Tensor, is_final: bool) -> int:
        exchange, stream = self._exchange, self._exchange.streams(part, chunk, is_final)
        started = time.perf_counter_ns()
        if exchange.residual is None or exchange.new_residual is None:
            n_bytes = self._codec.encode(values, out, step=stream)
        else:
            n_bytes = self._codec.encode_with_residual(
                values,
                self._parts.slice_of(exchange.residual, part, chunk),
                out,
                stream,
                new_residual=self._parts.slice_of(exchange.new_residual, part, chunk),
                residual_scale=exchange.residual_scale,
            )
        self._record.add("encode", started, time.perf_counter_ns())
        return n_bytes

    def _reduce_chunk(self, chunk: int) -> Tensor:
        """(m,) float32: the sum of what all ranks sent of this rank's part, in rank order, its own share unencoded."""
        own = self._parts.slice_of(self._exchange.buffer, self._rank, chunk)
        total = self._total[: own.numel()].zero_()
        decoded = self._decoded[: own.numel()]
        for source in range(self._world):
            if source == self._rank:
                total.add_(own)
                continue
            message = self._receivers[source].read()
            started = time.perf_counter_ns()
            self._note_if_nonfinite(message, own.numel())
            self._codec.decode(message, decoded)
            self._clear_unused(decoded, source, chunk)
            total.add_(decoded)
            self._record.add("decode", started, time.perf_counter_ns())
        return total

    def _clear_unused(self, decoded: Tensor, source: int, chunk: int) -> None:
        """Zero for what `source` did not use: a bit alone cannot say zero."""
        is_used = self._is_used_by[source]
        if all(is_used):
            return
        first, last = self._parts.bounds(self._rank, chunk)
        for (start, end), used in zip(self._exchange.spans, is_used, strict=True):
            if not used and start < last and end > first:
                decoded[max(start, first) - first : min(end, last) - first] = 0

    def _encode_final(self, total: Tensor, chunk: int) -> int:
        final = self._finals[chunk]
        if not self._exchange.pulls_raw:
            n_bytes = self._encode(total, self._rank, chunk, final, is_final=True)
            self._note_if_nonfinite(final[:n_bytes], total.numel())
            return n_bytes
        exchange = self._exchange
        started = time.perf_counter_ns()
        if exchange.residual is not None:
            own = self._parts.slice_of(exchange.residual, self._rank, chunk)
            total.add_(own, alpha=exchange.residual_scale)
        raw = final[: total.numel() * exchange.buffer.element_size()].view(exchange.buffer.dtype)
        raw.copy_(total)
        self._is_finite &= math.isfinite(float(torch.linalg.vector_norm(raw, float("inf"), dtype=torch.float32)))
        if exchange.new_residual is not None:
            left_out = self._parts.slice_of(exchange.new_residual, self._rank, chunk)
            torch.sub(total, raw, out=left_out).div_(exchange.residual_scale)
        self._record.add("encode", started, time.perf_counter_ns())
        return raw.numel() * raw.element_size()

    def _adopt(self, message: Tensor, part: int, chunk: int) -> None:
        """Put message / world size where the chunk lies: what every rank does with the same bytes."""
        result = self._parts.slice_of(self._exchange.results, part, chunk)
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
            self._is_finite = False


def _pack_bits(flags: list[bool]) -> Tensor:
    """At least one byte, so that a stream always has an opening."""
    packed = bytearray(max(1, -(-len(flags) // 8)))
    for place, flag in enumerate(flags):
        packed[place // 8] |= flag << place % 8
    return torch.frombuffer(packed, dtype=torch.uint8)


def _unpack_bits(message: Tensor, n_flags: int, peer: int) -> list[bool]:
    packed = bytes(message.tolist())
    if len(packed) != max(1, -(-n_flags // 8)):
        raise CorruptMessage(f"rank {peer} opened its stream with {len(packed)} bytes for {n_flags} parameters")
    return [bool(packed[place // 8] >> place % 8 & 1) for place in range(n_flags)]
