"""The frame of schemes whose small integers are summed over the ranks by a plain all-reduce.

Two rounds a bucket: the ranks agree on the largest scale of any of them, which all then quantise by; and the sum.
"""

from __future__ import annotations

import time
from abc import abstractmethod

import torch

from gradwire.bucket import Bucket
from gradwire.communicator import ring_bytes
from gradwire.schemes.optimistic import Optimistic
from gradwire.schemes.usage import Withheld, bucket_spans, holds_nonzero

_INFINITY = 0x7F80_0000  # float32: patterns from here on are not finite


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
        residual, new_residual = self._residual.flat_pair(bucket) if self.error_feedback else (None, None)
        spans = bucket_spans(bucket)
        is_used = [holds_nonzero(bucket.buffer[start:end]) for start, end in spans]
        withheld = Withheld(spans, is_used, residual)
        try:
            scales = self._scales_of(bucket, residual)
            record.add("encode", started, time.perf_counter_ns())
            agreed = self._agree(bucket, scales, is_used)
            if agreed is None:
                return False
            scales, used_by_any = agreed
            started = time.perf_counter_ns()
            codes = self._encode(bucket, scales, residual, new_residual)
            record.add("encode", started, time.perf_counter_ns())
        finally:
            withheld.put_back(residual)
        started = time.perf_counter_ns()
        communicator.all_reduce(codes)
        record.add("communicate", started, time.perf_counter_ns())
        self._count(bucket, codes.numel() * codes.element_size())
        started = time.perf_counter_ns()
        if new_residual is not None:
            withheld.keep(new_residual, used_by_any)
            self._residual.stage_flat(bucket)
        self._decode(bucket, scales, codes)
        for (start, end), used in zip(spans, used_by_any, strict=True):
            if not used:
                bucket.buffer[start:end] = 0
        record.add("decode", started, time.perf_counter_ns())
        return True

    @abstractmethod
    def _scales_of(self, bucket: Bucket, residual: torch.Tensor | None) -> torch.Tensor:
        """(n,) float32, not negative: this rank's own scales; not finite if the gradient is not."""

    @abstractmethod
    def _encode(
        self, bucket: Bucket, scales: torch.Tensor, residual: torch.Tensor | None, new_residual: torch.Tensor | None
    ) -> torch.Tensor:
        """The integers, by the scales that all ranks share."""

    @abstractmethod
    def _decode(self, bucket: Bucket, scales: torch.Tensor, sums: torch.Tensor) -> None:
        """Sums to means, in the bucket."""

    def _agree(
        self, bucket: Bucket, scales: torch.Tensor, is_used: list[bool]
    ) -> tuple[torch.Tensor, list[bool]] | None:
        """The largest of all ranks' scales, and which parameters any rank used; None if a rank's are not finite.

        Floats that are not negative are ordered as their bits are, so one maximum of integers carries everything.
        Raises: RankMismatch if ranks disagree on scheme, options, model or step.
        """
        communicator = self.session.communicator
        facts = self._facts_of(bucket)
        n_flags = len(is_used)
        flags = torch.tensor([facts, -facts, *is_used], dtype=torch.int32)
        words = torch.cat([flags, scales.view(torch.int32)])
        started = time.perf_counter_ns()
        communicator.all_reduce(words, torch.distributed.ReduceOp.MAX)
        bucket.record.add("communicate", started, time.perf_counter_ns())
        self._count(bucket, 4 * words.numel())
        if int(words[0]) != -int(words[1]):
            self._name_mismatch(bucket)
        shared = words[2 + n_flags :]
        if bool((shared >= _INFINITY).any()):
            return None
        return shared.clone().view(torch.float32), [flag != 0 for flag in words[2 : 2 + n_flags].tolist()]

    def _count(self, bucket: Bucket, n_bytes: int) -> None:
        on_the_wire = ring_bytes(n_bytes, self.session.communicator.world_size)
        bucket.record.count_sent(on_the_wire)
        bucket.record.count_received(on_the_wire)
