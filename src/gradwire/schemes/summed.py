"""The frame of schemes whose small integers are summed over the ranks by a plain all-reduce.

Two rounds a bucket: the ranks agree on the largest scale of any of them, which all then quantise by; and the sum.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from array import array
from typing import NamedTuple

import torch

from gradwire.core.bucket import Bucket
from gradwire.schemes.optimistic import Optimistic
from gradwire.schemes.usage import Withheld, bucket_spans, holds_nonzero
from gradwire.wire.communicator import ring_bytes

_INFINITY = 0x7F80_0000  # float32: patterns from here on are not finite
_FACT_WORDS = 2  # a checksum of what ranks must share, and its negative: their maxima cancel if all are alike


class _Agreement(NamedTuple):
    """One vector of words whose maxima over the ranks are taken, and views of it."""

    words: torch.Tensor
    flags: torch.Tensor  # for each parameter, whether it is used
    scales: torch.Tensor


class Summed(Optimistic):
    """Mean over the ranks of integers that every rank makes of its gradient by scales that all share.

    With one rank the mean is the gradient, and nothing is changed.
    """

    state_is_per_world = True

    def _send(self, bucket: Bucket) -> bool:
        communicator, record = self.session.communicator, bucket.record
        if communicator.world_size == 1:  # the mean of one is itself: nothing to send, so nothing to leave out
            return True
        started = time.perf_counter_ns()
        agreement = self._room_for(bucket)
        residual, new_residual = self._residual.flat_pair(bucket) if self.error_feedback else (None, None)
        spans = bucket_spans(bucket)
        is_used = [holds_nonzero(bucket.buffer[start:end]) for start, end in spans]
        withheld = Withheld(spans, is_used, residual)
        try:
            self._write_scales(bucket, residual, agreement.scales)
            record.add("encode", started, time.perf_counter_ns())
            if not self._agree(bucket, agreement, is_used):
                return False
            started = time.perf_counter_ns()
            codes = self._encode(bucket, agreement.scales, residual, new_residual)
            record.add("encode", started, time.perf_counter_ns())
        finally:
            withheld.put_back(residual)
        started = time.perf_counter_ns()
        communicator.all_reduce(codes)
        record.add("communicate", started, time.perf_counter_ns())
        self._count(bucket, codes.numel() * codes.element_size())
        started = time.perf_counter_ns()
        used_by_any = [flag != 0 for flag in agreement.flags.tolist()]
        if new_residual is not None:
            withheld.keep(new_residual, used_by_any)
            self._residual.stage_flat(bucket)
        self._decode(bucket, agreement.scales, codes)
        for (start, end), used in zip(spans, used_by_any, strict=True):
            if not used:
                bucket.buffer[start:end] = 0
        record.add("decode", started, time.perf_counter_ns())
        return True

    @abstractmethod
    def _n_scales(self, bucket: Bucket) -> int:
        """How many scales the bucket has: the same on all ranks."""

    @abstractmethod
    def _write_scales(self, bucket: Bucket, residual: torch.Tensor | None, out: torch.Tensor) -> None:
        """out (_n_scales,) float32, not negative: this rank's own scales; not finite if the gradient is not."""

    @abstractmethod
    def _encode(
        self, bucket: Bucket, scales: torch.Tensor, residual: torch.Tensor | None, new_residual: torch.Tensor | None
    ) -> torch.Tensor:
        """The integers, by the scales that all ranks share."""

    @abstractmethod
    def _decode(self, bucket: Bucket, scales: torch.Tensor, sums: torch.Tensor) -> None:
        """Sums to means, in the bucket."""

    def _room_for(self, bucket: Bucket) -> _Agreement:
        n_flags, n_scales = len(bucket.parameters), self._n_scales(bucket)
        n_words = _FACT_WORDS + n_flags + n_scales
        words = self.session.communicator.scratch("agreement", 4 * n_words).view(torch.int32)
        return _Agreement(words, words[_FACT_WORDS:][:n_flags], words[n_words - n_scales :].view(torch.float32))

    def _agree(self, bucket: Bucket, agreement: _Agreement, is_used: list[bool]) -> bool:
        """Leave in `agreement` what is largest of all ranks; False, on all of them, if a rank's scales are not finite.

        Floats that are not negative are ordered as their bits are, so one maximum of integers carries everything.
        Raises: RankMismatch if ranks disagree on scheme, options, model or step.
        """
        communicator, words = self.session.communicator, agreement.words
        facts = self._facts_of(bucket)
        head = array("i", [facts, -facts, *is_used])
        words[: len(head)].copy_(torch.frombuffer(head, dtype=torch.int32))
        started = time.perf_counter_ns()
        communicator.all_reduce(words, torch.distributed.ReduceOp.MAX)
        bucket.record.add("communicate", started, time.perf_counter_ns())
        self._count(bucket, 4 * words.numel())
        if int(words[0]) != -int(words[1]):
            self._name_mismatch(bucket)
        return int(agreement.scales.view(torch.int32).max()) < _INFINITY

    def _count(self, bucket: Bucket, n_bytes: int) -> None:
        on_the_wire = ring_bytes(n_bytes, self.session.communicator.world_size)
        bucket.record.count_sent(on_the_wire)
        bucket.record.count_received(on_the_wire)
