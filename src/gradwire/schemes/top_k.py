"""The scheme `top-k`: every rank sends its largest elements and their places; the rest waits (Shi et al., MLSys 2021).

The published selection bisects a threshold in 20 rounds over the gradient and fills up from just below it. A histogram
of magnitudes finds the same threshold in one pass, and exactly.

When not to use this: on fast networks, with many ranks (each receives the elements of every other), or where a share
large enough to converge is no longer small.
"""

from typing import Any

import torch
from torch import Tensor

from gradwire.checks import choice as check_choice
from gradwire.checks import share as check_share
from gradwire.codecs.chunks import CHUNK, add_chunks, take_chunks
from gradwire.codecs.selection import add_elements, take_largest
from gradwire.core.feedback import Part
from gradwire.schemes.compressed import Compressed, count_of
from gradwire.schemes.plain_steps import PlainSteps
from gradwire.schemes.selection import ByName, Names
from gradwire.wire.wire import Flag, Wire

CODES = ("elements", "chunks")


class TopK(Compressed):
    """Mean over the ranks of each rank's largest elements: (index int32, value float32) of each, with error feedback.

    Args:
        share: of a bucket's elements that are sent, at least one.
        error_feedback: add what was not sent to the next gradient.
        warmup_steps: the first steps of the training, which are reduced plainly. None: 50 beside all but SGD, else 0.
        code: "elements", 64 bits each, as published; or "chunks": of every 4,096 values equally many, in 14 bits each, and what
            they lose stays too; for exchanges that are rare or far (SparseLoCo, arXiv 2508.15706).
        exempt, only: see `ByName`.
    """

    name = "top-k"
    options_of = ByName

    def __init__(
        self,
        share: float = 0.001,
        error_feedback: bool = True,
        warmup_steps: int | None = None,
        code: str = "elements",
        **names: Names,
    ) -> None:
        plain = PlainSteps(self.name, asked=warmup_steps)
        super().__init__(error_feedback=error_feedback, plain=plain, select=ByName(**names))
        self.share, self.code = check_share("share", share), check_choice("code", code, CODES)

    @property
    def configuration(self) -> dict[str, Any]:
        own = {"share": self.share, "error_feedback": self.error_feedback, "code": self.code}
        return own | self.frame_configuration

    def step(self, part: Part, wire: Wire) -> None:
        with wire.timing("encode"):
            payload, is_finite = self._take(part.total(), wire)
            part.keep()
        payloads = wire.gather(payload, is_finite)
        with wire.timing("decode"):
            mean = wire.scratch("mean", part.bucket.n_elements).zero_()
            for rank, received in enumerate(payloads):  # in rank order: the same sum everywhere
                self._add(received, mean, wire)
                wire.check(rank)
            part.values.copy_(wire.divide(mean, wire.world_size))

    def _take(self, total: Tensor, wire: Wire) -> tuple[Tensor, Flag]:
        """The payload, (m,) int32: the largest of `total` (n,), where what it does not hold stays.

        Elements are k indices, int32, which ascend, then k values, float32.
        """
        if self.code == "chunks":
            is_finite = wire.all_finite(total)
            return take_chunks(total, count_of(self.share, CHUNK)), is_finite
        indices, taken, is_finite = take_largest(total, count_of(self.share, total.numel()))
        return torch.cat([indices, taken.view(torch.int32)]), is_finite

    def _add(self, payload: Tensor, sums: Tensor, wire: Wire) -> None:
        """Add what a rank's payload holds to `sums` (n,) float32."""
        if self.code == "chunks":
            add_chunks(payload, count_of(self.share, CHUNK), sums)
        else:
            indices, taken = payload.chunk(2)
            add_elements(indices, taken.view(torch.float32), sums, wire.error)
