"""The aggregator `process-group`: the backend's own all-reduce. A fabric with reduction offload serves it unchanged."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from gradwire.checks import choice as check_choice
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.telemetry.recorder import BucketRecord, Recorder
from gradwire.wire.communicator import Communicator, ring_bytes

_SUMMED = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64)
_OR_BY = ("all-reduce", "all-to-all")


class ProcessGroup:
    """Sums by all-reduce; ORs by all-reduce (Gloo's BOR) or by shards.

    Args:
        or_by: "all-reduce", or "all-to-all" for backends that know no OR (NCCL): each rank gets one shard of every
            rank's words, ORs them, and all ranks gather the shards. Both send 2 (N-1)/N of the words.
    Raises: InvalidArgument.
    """

    name = "process-group"
    sums_floats = True

    def __init__(self, or_by: str = "all-reduce") -> None:
        check_choice("or_by", or_by, _OR_BY)
        self.or_by = or_by
        self._communicator: Communicator

    def bind(self, communicator: Communicator, recorder: Recorder) -> None:
        self._communicator = communicator

    def or_words(self, words: torch.Tensor, record: BucketRecord) -> None:
        self._start_or(words, record).wait()

    def _start_or(self, words: torch.Tensor, record: BucketRecord) -> _BackendSum:
        _check(words, (torch.int32,))
        if self.or_by == "all-reduce" or words.numel() < self._communicator.world_size:
            return _BackendSum(self, self._communicator, words, record, dist.ReduceOp.BOR)
        with record.timing("communicate"):
            self._or_by_shards(words)
        self._count(words, record)
        return _BackendSum(self, self._communicator, words[:0], record, None)

    def max_int32(self, values: torch.Tensor, record: BucketRecord) -> None:
        _check(values, (torch.int32,))
        with record.timing("communicate"):
            self._communicator.all_reduce(values, dist.ReduceOp.MAX)
        self._count(values, record)

    def start_sum(self, values: torch.Tensor, record: BucketRecord) -> _BackendSum:
        _check(values, _SUMMED)
        return _BackendSum(self, self._communicator, values, record)

    def start_or_and_sum(
        self, words: torch.Tensor, values: torch.Tensor, record: BucketRecord
    ) -> tuple[_BackendSum, _BackendSum]:
        """See `Aggregator`: both are on their way at once."""
        if self.or_by == "all-reduce":
            return self._start_or(words, record), self.start_sum(values, record)
        summed = self.start_sum(values, record)  # first: the OR by shards is done when it returns
        return self._start_or(words, record), summed

    def stats(self) -> dict[str, Any]:
        """Nothing of its own: the recorder has the bytes."""
        return {}

    def close(self) -> None:
        """Nothing is held."""

    def _or_by_shards(self, words: torch.Tensor) -> None:
        world_size, rank = self._communicator.world_size, self._communicator.rank
        shard_words = -(-words.numel() // world_size)
        whole = torch.zeros(world_size * shard_words, dtype=torch.int32)
        whole[: words.numel()] = words
        theirs = self._communicator.all_to_all(whole.view(world_size, shard_words))
        shard = theirs[rank]
        for other in range(world_size):
            if other != rank:
                shard |= theirs[other]
        words.copy_(self._communicator.all_gather(shard).view(-1)[: words.numel()])

    def _count(self, tensor: torch.Tensor, record: BucketRecord) -> None:
        n_bytes = ring_bytes(tensor.numel() * tensor.element_size(), self._communicator.world_size)
        record.count_exchanged(n_bytes)


class _BackendSum:
    """A reduction on its way; without an operation, one that is done and counted."""

    def __init__(
        self,
        aggregator: ProcessGroup,
        communicator: Communicator,
        values: torch.Tensor,
        record: BucketRecord,
        operation: Any = dist.ReduceOp.SUM,
    ) -> None:
        self._aggregator, self._communicator, self._values, self._record = aggregator, communicator, values, record
        self._timing = record.timing("communicate")
        self._future = None if operation is None else communicator.start_all_reduce(values, operation)

    def wait(self) -> None:
        if self._future is None:
            return
        self._communicator.finish(self._future)
        self._timing.end()
        self._aggregator._count(self._values, self._record)


def _check(tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        listing = ", ".join(str(dtype) for dtype in dtypes)
        raise Unsupported(f"the aggregator process-group takes {listing} here, not {tensor.dtype}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise InvalidArgument(f"an aggregator takes (n,) contiguous tensors, got shape {tuple(tensor.shape)}")
