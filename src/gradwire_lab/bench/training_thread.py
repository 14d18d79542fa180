"""A bare quantiser with its codec on the training thread: what SlimGC's Fig. 13 is measured against.

Each bucket is encoded, with error feedback, where DDP hands it over, and pushed to the owners of its parts. When the
last gradient is there the same thread decodes and adds what it owns, encodes the sums, and decodes the answers. Bytes
and arithmetic are those of the schemes `one-bit` and `two-bit`; only who works when differs.

When not to use this: in training. It exists to be compared with; its residuals belong to buckets, and the first step's
are lost when DDP rebuilds them.
"""

# No `from __future__ import annotations` here: DDP compares a hook's annotations as objects, not as strings.
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from gradwire.codecs.quantised import OneBit, Quantised, TwoBit
from gradwire.core.threads import use_fair_share_of_cores
from gradwire.wire.communicator import completed

CODECS: dict[str, type[Quantised]] = {"ddp-one-bit": OneBit, "ddp-two-bit": TwoBit}

_LENGTH_BYTES = 8  # before every message: how long it is, as an int64


class _Exchange:
    """One bucket layout's buffers, and what of the bucket is under way.

    Attributes:
        parts: the slice of each rank's part.
        residual: (n,) float32: what this rank's messages have left out so far.
        pushes, pushed: (world, slot) uint8: messages to and from every rank. `pulls`: everyone's answers.
    """

    def __init__(self, n: int, world_size: int, codec: Quantised) -> None:
        edges = [n * part // world_size for part in range(world_size + 1)]
        self.parts = list(map(slice, edges, edges[1:]))
        largest = -(-n // world_size)
        # A whole number of int64: slots lie behind one another.
        slot = -(-(_LENGTH_BYTES + codec.max_encoded_bytes(largest, torch.float32)) // 8) * 8
        self.residual, self.total, self.decoded = torch.zeros(n), torch.empty(largest), torch.empty(largest)
        self.pushes, self.pushed, self.pulls = torch.zeros(3, world_size, slot, dtype=torch.uint8)
        self.answer = torch.zeros(slot, dtype=torch.uint8)
        self.work: dist.Work
        self.bucket: torch.Tensor
        self.done: torch.futures.Future


class TrainingThreadQuantiser:
    """The state of the hook, one a model.

    Args:
        codec: one-bit or two-bit.
        occupy: told how many seconds of a backward pass the codec took, by an emulated accelerator that has to wait.

    Attributes:
        codec_spans, communicate_spans: (start_s, end_s) on `time.perf_counter`; all codec work, and every collective
            from its start to its end.
        encode_s, decode_s: seconds in the codec so far.
        sent_bytes: bytes that this rank has sent so far.
    """

    def __init__(self, codec: Quantised, occupy: Callable[[float], None] | None = None) -> None:
        use_fair_share_of_cores()
        self._codec, self._occupy = codec, occupy
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self._exchanges: dict[int, _Exchange] = {}
        self._under_way: list[_Exchange] = []
        self.codec_spans: list[tuple[float, float]] = []
        self.communicate_spans: list[tuple[float, float]] = []
        self.encode_s = self.decode_s = 0.0
        self.sent_bytes = 0

    def register(self, model: DistributedDataParallel) -> None:
        """Make it the hook of `model`."""
        model.register_comm_hook(self, _hook)

    def start(self, index: int, buffer: torch.Tensor, is_last: bool) -> torch.futures.Future:
        """Encode a bucket, (n,) float32, and push it; the future is done at the end of the backward pass."""
        if self._world_size == 1:  # the mean of one is itself
            return completed(buffer)
        exchange = self._exchanges.get(index)
        if exchange is None or exchange.residual.numel() != buffer.numel():
            exchange = self._exchanges[index] = _Exchange(buffer.numel(), self._world_size, self._codec)
        exchange.bucket, exchange.done = buffer, torch.futures.Future()
        started = time.perf_counter()
        for owner, part in enumerate(exchange.parts):
            if owner != self._rank:
                self._encode(buffer[part], exchange.residual[part], exchange.pushes[owner])
        ended = self._note_codec(started)
        self.encode_s += ended - started
        if self._occupy is not None:
            self._occupy(ended - started)
        exchange.work = self._watch(dist.all_to_all_single(exchange.pushed, exchange.pushes, async_op=True))
        self.sent_bytes += (self._world_size - 1) * exchange.pushes.shape[1]
        self._under_way.append(exchange)
        if is_last:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        return exchange.done

    def _finish(self) -> None:
        """The gradients are computed, and DDP is about to wait: add, answer, adopt, bucket by bucket."""
        under_way, self._under_way = self._under_way, []
        for exchange in under_way:
            exchange.work.wait()
            self._answer(exchange)
            gathered = list(exchange.pulls.unbind(0))
            exchange.work = self._watch(dist.all_gather(gathered, exchange.answer, async_op=True))
            self.sent_bytes += (self._world_size - 1) * exchange.answer.numel()
        for exchange in under_way:
            exchange.work.wait()
            started = time.perf_counter()
            for part, pull in zip(exchange.parts, exchange.pulls, strict=True):
                self._decode(pull, exchange.bucket[part])
            exchange.bucket.div_(self._world_size)
            self.decode_s += self._note_codec(started) - started
            exchange.done.set_result(exchange.bucket)

    def _answer(self, exchange: _Exchange) -> None:
        """Add up this rank's part, in rank order, its own values exactly; what encoding the sum loses stays here."""
        part = exchange.parts[self._rank]
        residual = exchange.residual[part]
        total, decoded = exchange.total[: residual.numel()], exchange.decoded[: residual.numel()]
        started = time.perf_counter()
        total.zero_()
        for source in range(self._world_size):
            if source == self._rank:
                total.add_(exchange.bucket[part]).add_(residual)
            else:
                self._decode(exchange.pushed[source], decoded)
                total.add_(decoded)
        summed = time.perf_counter()
        residual.zero_()
        self._encode(total, residual, exchange.answer)
        ended = self._note_codec(started)
        self.decode_s += summed - started
        self.encode_s += ended - summed

    def _encode(self, values: torch.Tensor, residual: torch.Tensor, slot: torch.Tensor) -> None:
        n_bytes = self._codec.encode_with_residual(values, residual, slot[_LENGTH_BYTES:])
        slot[:_LENGTH_BYTES].view(torch.int64).fill_(n_bytes)

    def _decode(self, slot: torch.Tensor, out: torch.Tensor) -> None:
        n_bytes = int(slot[:_LENGTH_BYTES].view(torch.int64))
        self._codec.decode(slot[_LENGTH_BYTES : _LENGTH_BYTES + n_bytes], out)

    def _note_codec(self, started: float) -> float:
        ended = time.perf_counter()
        self.codec_spans.append((started, ended))
        return ended

    def _watch(self, work: dist.Work | None) -> dist.Work:
        assert work is not None
        started = time.perf_counter()
        spans = self.communicate_spans
        work.get_future().add_done_callback(lambda _: spans.append((started, time.perf_counter())))
        return work


def _hook(state: TrainingThreadQuantiser, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return state.start(bucket.index(), bucket.buffer(), bucket.is_last())
