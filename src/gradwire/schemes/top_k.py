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

from gradwire.checks import choice as check_choice
from gradwire.checks import share as check_share
from gradwire.codecs.chunks import CHUNK, add_chunks, take_chunks
from gradwire.codecs.selection import add_elements, take_largest
from gradwire.core.feedback import Part
from gradwire.schemes.compressed import Compressed, count_of
from gradwire.schemes.plain_steps import PlainSteps
from gradwire.schemes.selection import ByName, Names
from gradwire.wire.wire import Flag, Wire


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
        send_largest(part, wire, self.share, Elements() if self.code == "elements" else Chunks())


CODES = ("elements", "chunks")


class Elements:
    """The layout of elements that travel: their indices, int32, then their values, float32."""

    def take(self, total: Tensor, share: float, wire: Wire) -> tuple[Tensor, Flag]:
        """The payload, (m,) int32, which holds the largest of `total` (n,), where what it does not hold stays."""
        indices, taken, is_finite = take_largest(total, count_of(share, total.numel()))
        return self.pack(indices, taken, total), is_finite

    def add(self, payload: Tensor, share: float, sums: Tensor, wire: Wire) -> None:
        """Add what a rank's payload holds to `sums` (n,) float32."""
        add_elements(*self.unpack(payload, sums.numel(), wire), sums, wire.error)

    def pack(self, indices: Tensor, taken: Tensor, total: Tensor) -> Tensor:
        """The payload, (n,) int32; `indices` (k,) ascend. What it does not hold of `taken` (k,) goes back to `total`."""
        return torch.cat([indices, taken.view(torch.int32)])

    def unpack(self, payload: Tensor, n_elements: int, wire: Wire) -> tuple[Tensor, Tensor]:
        """(k,) int32 indices, to be checked, and (k,) float32 values."""
        indices, taken = payload.chunk(2)
        return indices, taken.view(torch.float32)


class Chunks(Elements):
    """The layout of `codecs.chunks`."""

    def take(self, total: Tensor, share: float, wire: Wire) -> tuple[Tensor, Flag]:
        is_finite = wire.all_finite(total)
        return take_chunks(total, count_of(share, CHUNK)), is_finite

    def add(self, payload: Tensor, share: float, sums: Tensor, wire: Wire) -> None:
        add_chunks(payload, count_of(share, CHUNK), sums)


def send_largest(part: Part, wire: Wire, share: float, elements: Elements) -> None:
    """Replace `part.values` by the mean of every rank's `share` of largest values; what is not sent stays."""
    with wire.timing("encode"):
        payload, is_finite = elements.take(part.total(), share, wire)
        part.keep()
    payloads = wire.gather(payload, is_finite)
    with wire.timing("decode"):
        mean = wire.scratch("mean", part.bucket.n_elements).zero_()
        for rank, received in enumerate(payloads):  # in rank order: the same sum everywhere
            elements.add(received, share, mean, wire)
            wire.check(rank)
        part.values.copy_(wire.divide(mean, wire.world_size))
