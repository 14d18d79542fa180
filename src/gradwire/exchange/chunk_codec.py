"""A codec at work on the chunks of one bucket: timed, with its scratch memory, and the importance of every element."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from gradwire.codecs import Codec, OnePassCodec
from gradwire.exchange.parts import Parts
from gradwire.telemetry.recorder import BucketRecord
from gradwire.wire.communicator import Communicator

# (start, end) -> (end - start,) uint8: the importance bytes of these elements of the bucket, for the codec to encode and
# decode by. A chunk is asked for whenever a message of it is written or read; the result is used before the next call.
Importance = Callable[[int, int], torch.Tensor]


class ChunkCodec:
    """Encodes and decodes chunks of `buffer`, in place for results, through one chunk of scratch for partial sums."""

    def __init__(
        self,
        communicator: Communicator,
        codec: Codec,
        buffer: torch.Tensor,
        parts: Parts,
        importance: Importance | None,
        record: BucketRecord,
        left_out: torch.Tensor | None = None,
    ) -> None:
        """`left_out` (n,), of the buffer's dtype: where what an encoding loses is written; each value is encoded once."""
        self._left_out = left_out
        self._codec, self._buffer, self._parts, self._importance, self._record = (
            codec,
            buffer,
            parts,
            importance,
            record,
        )
        self._world_size = communicator.world_size
        # A sum of float16 values overflows where their mean does not: they are divided first, as DDP does.
        self._divides_first = buffer.dtype == torch.float16
        if self._divides_first:
            buffer.div_(self._world_size)
        self.max_message_bytes = codec.max_encoded_bytes(parts.max_chunk_elements, buffer.dtype)
        scratch = communicator.scratch("partial sum", parts.max_chunk_elements * buffer.element_size())
        self._scratch = scratch.view(buffer.dtype)

    def encode_own(self, part: int, chunk: int, out: torch.Tensor) -> int:
        """Encode this rank's gradient of a chunk into `out`; the bytes written."""
        return self.encode(self._parts.slice_of(self._buffer, part, chunk), part, chunk, out)

    def encode(self, values: torch.Tensor, part: int, chunk: int, out: torch.Tensor) -> int:
        """Encode `values` that stand for a chunk, with that chunk's importance."""
        importance = self._importance_of(part, chunk)
        started = time.perf_counter_ns()
        n_bytes = self._codec.encode(values, out, importance)
        if self._left_out is not None:
            left_out = self._parts.slice_of(self._left_out, part, chunk)
            self._decode(out[:n_bytes], left_out, importance)
            torch.sub(values, left_out, out=left_out)
            if self._divides_first:
                left_out.mul_(self._world_size)
        self._record.add("encode", started, time.perf_counter_ns())
        return n_bytes

    def decode_plus_own(self, message: torch.Tensor, part: int, chunk: int) -> torch.Tensor:
        """Decoded message + this rank's gradient of the chunk; valid until the next call."""
        own = self._parts.slice_of(self._buffer, part, chunk)
        total = self._scratch[: own.numel()]
        importance = self._importance_of(part, chunk)
        started = time.perf_counter_ns()
        self._decode(message, total, importance, addend=own)
        self._record.add("decode", started, time.perf_counter_ns())
        return total

    def add_decoded(self, message: torch.Tensor, total: torch.Tensor, part: int, chunk: int) -> None:
        """total += decoded message of the chunk."""
        importance = self._importance_of(part, chunk)
        started = time.perf_counter_ns()
        if isinstance(self._codec, OnePassCodec):
            self._decode(message, total, importance, addend=total)
        else:
            values = self._scratch[: total.numel()]
            self._codec.decode(message, values)
            total.add_(values)
        self._record.add("decode", started, time.perf_counter_ns())

    def adopt_mean(self, message: torch.Tensor, part: int, chunk: int) -> None:
        """Put decoded message / world size where the chunk lies: what every rank does with the same bytes."""
        result = self._parts.slice_of(self._buffer, part, chunk)
        importance = self._importance_of(part, chunk)
        started = time.perf_counter_ns()
        self._decode(message, result, importance, divisor=1 if self._divides_first else self._world_size)
        self._record.add("decode", started, time.perf_counter_ns())

    def _importance_of(self, part: int, chunk: int) -> torch.Tensor | None:
        return None if self._importance is None else self._importance(*self._parts.bounds(part, chunk))

    def _decode(
        self,
        message: torch.Tensor,
        out: torch.Tensor,
        importance: torch.Tensor | None,
        addend: torch.Tensor | None = None,
        divisor: int = 1,
    ) -> None:
        """`out` = decoded message + addend, or / divisor."""
        if isinstance(self._codec, OnePassCodec):
            self._codec.decode(message, out, importance, addend=addend, divisor=divisor)
            return
        self._codec.decode(message, out)
        if addend is not None:
            out.add_(addend)
        if divisor != 1:
            out.div_(divisor)
