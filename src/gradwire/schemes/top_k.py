"""The scheme `top-k`: every rank sends its largest elements and their places; the rest waits (Shi et al., MLSys 2021).

The published selection bisects a threshold in 20 rounds over the gradient and fills up from just below it. A histogram
of magnitudes finds the same threshold in one pass, and exactly.

When not to use this: on fast networks, with many ranks (each receives the elements of every other), or where a share
large enough to converge is no longer small.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from gradwire import _native
from gradwire.core.bucket import Bucket
from gradwire.errors import CorruptMessage
from gradwire.schemes.optimistic import Optimistic, check_share, count_of


class TopK(Optimistic):
    """Mean over the ranks of each rank's largest elements: (index int32, value float32) of each, with error feedback.

    Args:
        share: of a bucket's elements that are sent, at least one.
        error_feedback: add what was not sent to the next gradient.
    """

    name = "top-k"
    state_is_per_world = True

    def __init__(self, share: float = 0.001, error_feedback: bool = True) -> None:
        super().__init__(error_feedback)
        self.share = check_share("share", share)

    @property
    def configuration(self) -> dict[str, Any]:
        return {"share": self.share, "error_feedback": self.error_feedback}

    def _send(self, bucket: Bucket) -> bool:
        world_size = self.session.communicator.world_size
        if world_size == 1:  # the mean of one is itself: nothing to send, so nothing to leave out
            return True
        started = time.perf_counter_ns()
        corrected = self._corrected(bucket)
        indices = torch.empty(count_of(self.share, bucket.n_elements), dtype=torch.int32)
        is_finite = _native.select_largest(corrected, indices) == 0
        values = corrected[indices.long()]
        bucket.record.add("encode", started, time.perf_counter_ns())
        messages = self._gather(bucket, torch.cat([indices, values.view(torch.int32)]), is_finite)
        if messages is None:
            return False
        started = time.perf_counter_ns()
        corrected[indices.long()] = 0
        self._stage(bucket, corrected)
        mean = corrected.zero_()
        for rank, message in enumerate(messages):  # in rank order: the same sum everywhere
            places, values = message[: indices.numel()].long(), message[indices.numel() :].view(torch.float32)
            if int(places.min()) < 0 or int(places.max()) >= bucket.n_elements:
                raise CorruptMessage(
                    f"rank {rank} sent an index outside of bucket {bucket.index} ({bucket.n_elements} elements) in "
                    f"step {bucket.step}; restart from the last checkpoint"
                )
            mean.index_add_(0, places, values)
        bucket.buffer.copy_(mean.div_(world_size))
        bucket.record.add("decode", started, time.perf_counter_ns())
        return True
