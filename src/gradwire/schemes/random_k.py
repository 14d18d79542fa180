"""The scheme `random-k`: the same random elements on every rank, drawn from a shared seed, so that sums need no indices.

When not to use this: top-k converges better for the same share; this is what it is measured against.
"""

from __future__ import annotations

import hashlib
import math
import time
from typing import Any

import numpy as np
import torch

from gradwire.core.bucket import Bucket
from gradwire.errors import InvalidArgument
from gradwire.schemes.optimistic import Optimistic, check_share, count_of
from gradwire.wire.communicator import ring_bytes

_FACT_BITS = 31


class RandomK(Optimistic):
    """Mean over the ranks of elements drawn anew for every bucket and step, zero elsewhere; with error feedback.

    Args:
        share: of a bucket's elements that are sent, at least one.
        error_feedback: add what was not sent to the next gradient. Without it, results are divided by `share`, which
            makes them right on average.
        seed: of the drawing; the same on all ranks.
    """

    name = "random-k"
    state_is_per_world = True

    def __init__(self, share: float = 0.01, error_feedback: bool = True, seed: int = 0) -> None:
        super().__init__(error_feedback)
        self.share = check_share("share", share)
        if not isinstance(seed, int):
            raise InvalidArgument(f"seed must be an integer, got {seed!r}")
        self.seed = seed

    @property
    def configuration(self) -> dict[str, Any]:
        return {"share": self.share, "error_feedback": self.error_feedback, "seed": self.seed}

    def _send(self, bucket: Bucket) -> bool:
        communicator = self.session.communicator
        if communicator.world_size == 1:
            return True
        started = time.perf_counter_ns()
        corrected = self._corrected(bucket)
        indices = draw_indices(
            self.seed, bucket.step, bucket.index, bucket.n_elements, count_of(self.share, bucket.n_elements)
        )
        # One pass without a copy: the largest magnitude is NaN or Inf if anything is, drawn or not.
        is_finite = math.isfinite(float(torch.linalg.vector_norm(corrected, float("inf"))))
        facts = self._facts_of(bucket)
        # In front of the values: whether this rank's are finite, and bits that all ranks must share.
        head = [float(not is_finite), *(float(facts >> bit & 1) for bit in range(_FACT_BITS))]
        message = torch.cat([torch.tensor(head), corrected[indices]])
        bucket.record.add("encode", started, time.perf_counter_ns())
        started = time.perf_counter_ns()
        communicator.all_reduce(message)
        bucket.record.add("communicate", started, time.perf_counter_ns())
        n_bytes = ring_bytes(4 * message.numel(), communicator.world_size)
        bucket.record.count_sent(n_bytes)
        bucket.record.count_received(n_bytes)
        started = time.perf_counter_ns()
        fact_sums = message[1 : len(head)]
        if not bool(((fact_sums == 0) | (fact_sums == communicator.world_size)).all()):
            self._name_mismatch(bucket)
        # A sum of finite values that overflows is redone as well.
        if message[0] != 0 or not bool(message.isfinite().all()):
            return False
        corrected[indices] = 0
        self._stage(bucket, corrected)
        drawn_share = indices.numel() / bucket.n_elements
        message[len(head) :].div_(communicator.world_size * (1.0 if self.error_feedback else drawn_share))
        bucket.buffer.zero_()
        bucket.buffer[indices] = message[len(head) :].to(bucket.buffer.dtype)
        bucket.record.add("decode", started, time.perf_counter_ns())
        return True


def draw_indices(seed: int, step: int, bucket: int, n_elements: int, count: int) -> torch.Tensor:
    """(count,) int64, ascending, without repetition: the same on every rank, from what all ranks share alone."""
    digest = hashlib.blake2b(repr((seed, step, bucket, n_elements)).encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    drawn = generator.choice(n_elements, count, replace=False, shuffle=False)
    drawn.sort()
    return torch.from_numpy(drawn)
