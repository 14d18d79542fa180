"""The scheme `top-k`: every rank sends its largest elements and their places; the rest waits (Shi et al., MLSys 2021).

The published selection bisects a threshold in 20 rounds over the gradient and fills up from just below it. A histogram
of magnitudes finds the same threshold in one pass, and exactly.

When not to use this: on fast networks, with many ranks (each receives the elements of every other), or where a share
large enough to converge is no longer small.
"""

from __future__ import annotations

from typing import Any

import torch

from gradwire.checks import share as check_share
from gradwire.codecs.selection import add_elements, take_largest
from gradwire.core.feedback import Part
from gradwire.schemes.compressed import Compressed, count_of
from gradwire.schemes.plain_steps import PlainSteps
from gradwire.schemes.selection import ByName, Names
from gradwire.wire.wire import Wire


class TopK(Compressed):
    """Mean over the ranks of each rank's largest elements: (index int32, value float32) of each, with error feedback.

    Args:
        share: of a bucket's elements that are sent, at least one.
        error_feedback: add what was not sent to the next gradient.
        warmup_steps: the first steps of the training, which are reduced plainly. None: 50 beside all but SGD, else 0.
        exempt, only: see `ByName`.
    """

    name = "top-k"
    options_of = ByName

    def __init__(
        self,
        share: float = 0.001,
        error_feedback: bool = True,
        warmup_steps: int | None = None,
        **names: Names,
    ) -> None:
        plain = PlainSteps(self.name, asked=warmup_steps)
        super().__init__(error_feedback=error_feedback, plain=plain, select=ByName(**names))
        self.share = check_share("share", share)

    @property
    def configuration(self) -> dict[str, Any]:
        return {"share": self.share, "error_feedback": self.error_feedback} | self.frame_configuration

    def step(self, part: Part, wire: Wire) -> None:
        """What is sent: indices (k,) int32, ascending, then values (k,) float32."""
        n = part.bucket.n_elements
        with wire.timing("encode"):
            total = part.total()
            indices, taken, is_finite = take_largest(total, count_of(self.share, n))
            payload = torch.cat([indices, taken.view(torch.int32)])
            part.keep()
        payloads = wire.gather(payload, is_finite)
        with wire.timing("decode"):
            mean = wire.scratch("mean", n).zero_()
            for rank, received in enumerate(payloads):  # in rank order: the same sum everywhere
                found, values = received.chunk(2)
                add_elements(found, values.view(torch.float32), mean, wire.error)
                wire.check(rank)
            part.values.copy_(wire.divide(mean, wire.world_size))
