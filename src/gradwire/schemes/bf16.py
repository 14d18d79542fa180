"""The scheme `bf16`: gradients rounded to bfloat16, summed by the backend, and put back: PyTorch's bf16_compress_hook.

Half the bytes of float32 for next to no processor time. A bfloat16 keeps 8 bits of a value and float32's whole range,
so no scale is needed and nothing overflows. The backend rounds every partial sum of its ring, so errors grow slowly with the ranks.

When not to use this: where a lossless mean is needed; with more ranks than about 64, whose sums lose the smaller half of
their bits.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.schemes.base import Scheme
from gradwire.wire.communicator import ring_bytes
from gradwire.wire.step_check import StepCheck


class Bf16(Scheme):
    """Mean of bfloat16 values. Inf and NaN travel as they are, so a GradScaler sees them; float16 keeps its own format."""

    name = "bf16"

    @property
    def configuration(self) -> dict[str, Any]:
        return {}

    def bind(self, session: Session) -> None:
        super().bind(session)
        self._check = StepCheck(session.communicator)

    def reduce(self, bucket: Bucket) -> torch.futures.Future:
        """Round on the lane and leave the sum to the backend, so that the next bucket is rounded meanwhile."""
        done: torch.futures.Future = torch.futures.Future()

        def fail(started: torch.futures.Future) -> None:
            try:
                started.wait()
            except Exception as error:
                done.set_exception(error)

        self.session.communicator.submit(self._start, bucket, done).add_done_callback(fail)
        return done

    def _start(self, bucket: Bucket, done: torch.futures.Future) -> None:
        communicator, record = self.session.communicator, bucket.record
        if communicator.world_size == 1:
            done.set_result(bucket.buffer)
            return
        if bucket.is_last:
            self._check.start(self.preamble(bucket), record)
        started = time.perf_counter_ns()
        # Divided before it is summed, as DDP does, in the gradient's own precision.
        bucket.buffer.mul_(1.0 / communicator.world_size)
        rounded = bucket.buffer.to(torch.bfloat16) if bucket.buffer.dtype == torch.float32 else bucket.buffer
        encoded = time.perf_counter_ns()
        record.add("encode", started, encoded)
        summed = communicator.start_all_reduce(rounded)

        def finish(summed: torch.futures.Future) -> None:
            try:
                communicator.finish(summed)
            except Exception as error:
                done.set_exception(communicator.fail(error))
                return
            arrived = time.perf_counter_ns()
            record.add("communicate", encoded, arrived)
            if rounded is not bucket.buffer:
                bucket.buffer.copy_(rounded)
                record.add("decode", arrived, time.perf_counter_ns())
            n_bytes = ring_bytes(rounded.numel() * rounded.element_size(), communicator.world_size)
            record.count_sent(n_bytes)
            record.count_received(n_bytes)
            done.set_result(bucket.buffer)

        summed.add_done_callback(finish)
