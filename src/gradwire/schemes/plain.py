"""The scheme `plain`: DDP's own all-reduce, with gradwire's telemetry and checks. The baseline of everything.

When not to use this: when nothing of gradwire is wanted; DDP without a hook does the same.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.schemes.base import Scheme
from gradwire.wire.communicator import Communicator, ring_bytes
from gradwire.wire.step_check import StepCheck


class Plain(Scheme):
    """Mean by the backend's all-reduce, in the gradient's own dtype; bit-identical to DDP without a hook."""

    name = "plain"

    @property
    def configuration(self) -> dict[str, Any]:
        return {}

    def bind(self, session: Session) -> None:
        super().bind(session)
        self._check = StepCheck(session.communicator)

    def reduce(self, bucket: Bucket) -> torch.futures.Future:
        """Start the all-reduce on the lane and leave it to the backend, so that buckets overlap as they do in DDP."""
        communicator = self.session.communicator
        done: torch.futures.Future = torch.futures.Future()

        def start() -> None:
            if communicator.world_size == 1:
                done.set_result(bucket.buffer)
                return
            if bucket.is_last:
                self._check.start(self.preamble(bucket), bucket.record)
            start_plain_mean(communicator, bucket).add_done_callback(finish)

        def finish(finished: torch.futures.Future) -> None:
            try:
                finished.wait()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(bucket.buffer)

        def forward_error(started: torch.futures.Future) -> None:
            try:
                started.wait()
            except Exception as error:
                done.set_exception(error)

        communicator.submit(start).add_done_callback(forward_error)
        return done


def start_plain_mean(communicator: Communicator, bucket: Bucket) -> torch.futures.Future:
    """Start the mean as this scheme takes it, on the lane, which need not wait: the future is done when it is there."""
    done: torch.futures.Future = torch.futures.Future()
    # DDP multiplies by 1/N before it sums, which keeps float16 sums in range; the same product gives its bits.
    bucket.buffer.mul_(1.0 / communicator.world_size)
    started = time.perf_counter_ns()
    summed = communicator.start_all_reduce(bucket.buffer)

    def finish(summed: torch.futures.Future) -> None:
        try:
            communicator.finish(summed)
        except Exception as error:
            done.set_exception(communicator.fail(error))
            return
        bucket.record.add("communicate", started, time.perf_counter_ns())
        n_bytes = ring_bytes(bucket.original_bytes, communicator.world_size)
        bucket.record.count_exchanged(n_bytes)
        done.set_result(bucket.buffer)

    summed.add_done_callback(finish)
    return done
