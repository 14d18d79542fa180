"""The scheme `top-k`: every rank sends its largest elements and their places; the rest waits (Shi et al., MLSys 2021).

The published selection bisects a threshold in 20 rounds over the gradient and fills up from just below it. A histogram
of magnitudes finds the same threshold in one pass, and exactly.

When not to use this: on fast networks, with many ranks (each receives the elements of every other), or where a share
large enough to converge is no longer small.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradwire import _native
from gradwire.control.checks import share as check_share
from gradwire.errors import CorruptMessage
from gradwire.exchange.patterns import Gather, Values
from gradwire.schemes.compressed import Compressed, count_of
from gradwire.wire.wire import Wire


class LargestElements:
    """Payload: indices, then values, of the `share` of largest elements."""

    def __init__(self, share: float) -> None:
        self.share = share

    def encode(self, values: Values, wire: Wire) -> tuple[Tensor, bool]:
        unsent = values.summed(wire)
        indices = torch.empty(count_of(self.share, unsent.numel()), dtype=torch.int32)
        is_finite = _native.select_largest(unsent, indices) == 0
        places = indices.long()
        chosen = unsent[places]
        unsent[places] = 0
        values.keep(unsent)
        return torch.cat([indices, chosen.view(torch.int32)]), is_finite

    def decode(self, payloads: Tensor, values: Values, wire: Wire) -> None:
        bucket = values.bucket
        mean = wire.scratch("mean", bucket.n_elements).zero_()
        for rank, payload in enumerate(payloads):  # in rank order: the same sum everywhere
            places, chosen = payload.chunk(2)
            if int(places.min()) < 0 or int(places.max()) >= bucket.n_elements:
                raise CorruptMessage(
                    f"rank {rank} sent an index outside of bucket {bucket.index} ({bucket.n_elements} elements) in "
                    f"step {bucket.step}; restart from the last checkpoint"
                )
            mean.index_add_(0, places.long(), chosen.view(torch.float32))
        bucket.buffer.copy_(mean.div_(wire.world_size))


class TopK(Compressed):
    """Mean over the ranks of each rank's largest elements: (index int32, value float32) of each, with error feedback.

    Args:
        share: of a bucket's elements that are sent, at least one.
        error_feedback: add what was not sent to the next gradient.
    """

    name = "top-k"

    def __init__(self, share: float = 0.001, error_feedback: bool = True) -> None:
        self.share = check_share("share", share)
        super().__init__(LargestElements(self.share), Gather(), error_feedback)

    @property
    def configuration(self) -> dict[str, Any]:
        return {"share": self.share, "error_feedback": self.error_feedback}
