"""The scheme `random-k`: the same random elements on every rank, drawn from a shared seed, so that sums need no indices
(random sparsification: Stich et al., NeurIPS 2018).

When not to use this: top-k converges better for the same share; this is what it is measured against.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.checks import share as check_share
from gradwire.core.feedback import Part
from gradwire.errors import InvalidArgument
from gradwire.schemes.compressed import Compressed, count_of
from gradwire.schemes.plain_steps import PlainSteps
from gradwire.wire.wire import Wire


class RandomK(Compressed):
    """Mean over the ranks of elements drawn anew for every bucket and step, zero elsewhere; with error feedback.

    Args:
        share: of a bucket's elements that are sent, at least one.
        error_feedback: add what was not sent to the next gradient. Without it, results are divided by `share`, which
            makes them right on average.
        seed: of the drawing; the same on all ranks.
        warmup_steps: the first steps of the training, which are reduced plainly. None: 50 beside Adam and its kin, else 0.
    """

    name = "random-k"
    works_on_device = False

    def __init__(
        self, share: float = 0.01, error_feedback: bool = True, seed: int = 0, warmup_steps: int | None = None
    ) -> None:
        if not isinstance(seed, int):
            raise InvalidArgument(f"seed must be an integer, got {seed!r}")
        super().__init__(error_feedback=error_feedback, plain=PlainSteps(self.name, asked=warmup_steps))
        self.share, self.seed = check_share("share", share), seed

    @property
    def configuration(self) -> dict[str, Any]:
        shared = {"share": self.share, "error_feedback": self.error_feedback, "seed": self.seed}
        return shared | self.frame_configuration

    def step(self, part: Part, wire: Wire) -> None:
        """Sum the elements that all ranks draw alike."""
        bucket, n = part.bucket, part.bucket.n_elements
        places = wire.place(draw_indices(self.seed, bucket.step, bucket.index, n, count_of(self.share, n)))
        with wire.timing("encode"):
            total = part.total()
            is_finite = wire.all_finite(total)  # drawn or not
            drawn = total.index_select(0, places)
            total.index_fill_(0, places, 0.0)
            part.keep()
        summed = wire.sum_floats(drawn, is_finite)
        with wire.timing("decode"):
            share = places.numel() / n if part.residual is None else 1.0
            mean = wire.divide(summed, wire.world_size * share).to(part.values.dtype)
            part.values.zero_().index_copy_(0, places, mean)


def draw_indices(seed: int, step: int, bucket: int, n_elements: int, count: int) -> Tensor:
    """(count,) int64, ascending, without repetition: the same on every rank, from what all ranks share alone."""
    digest = hashlib.blake2b(repr((seed, step, bucket, n_elements)).encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    drawn = generator.choice(n_elements, count, replace=False, shuffle=False)
    drawn.sort()
    return torch.from_numpy(drawn)
