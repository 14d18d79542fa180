"""The scheme `random-k`: the same random elements on every rank, drawn from a shared seed, so that sums need no indices
(random sparsification: Stich et al., NeurIPS 2018).

When not to use this: top-k converges better for the same share; this is what it is measured against.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from gradwire.control.checks import share as check_share
from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.core.site import DeviceSite
from gradwire.errors import InvalidArgument
from gradwire.exchange.patterns import FloatSum, Values
from gradwire.schemes.compressed import count_of
from gradwire.schemes.on_device import Placed, StepsOnDevice
from gradwire.schemes.plain_first import ADAM_WARMUP_STEPS
from gradwire.schemes.selective import Selective
from gradwire.schemes.sparse_on_device import RandomOnDevice
from gradwire.wire.wire import Wire


class RandomElements:
    """Payload: the values at the `share` of places that all ranks draw alike."""

    def __init__(self, share: float, seed: int) -> None:
        self.share, self.seed = share, seed

    def encode(self, values: Values, wire: Wire) -> tuple[Tensor, bool]:
        unsent, places = values.summed(wire), self.places(values.bucket)
        # One pass without a copy: the largest magnitude is NaN or Inf if anything is, drawn or not.
        is_finite = math.isfinite(float(torch.linalg.vector_norm(unsent, float("inf"))))
        payload = unsent[places]
        unsent[places] = 0
        values.keep(unsent)
        return payload, is_finite

    def decode(self, total: Tensor, values: Values, wire: Wire) -> None:
        places, out = self.places(values.bucket), values.gradient
        share = places.numel() / out.numel() if values.residual is None else 1.0
        out.zero_()
        out[places] = total.div_(wire.world_size * share).to(out.dtype)

    def places(self, bucket: Bucket) -> Tensor:
        """(count,) int64: which elements of the bucket are sent in its step."""
        n = bucket.n_elements
        return draw_indices(self.seed, bucket.step, bucket.index, n, count_of(self.share, n))


class RandomK(Placed, Selective):
    """Mean over the ranks of elements drawn anew for every bucket and step, zero elsewhere; with error feedback.

    Args:
        share: of a bucket's elements that are sent, at least one.
        error_feedback: add what was not sent to the next gradient. Without it, results are divided by `share`, which
            makes them right on average.
        seed: of the drawing; the same on all ranks.
        warmup_steps: the first steps of the training, which are reduced plainly. None: 50 beside Adam and its kin, else 0.
    """

    name = "random-k"
    published: ClassVar[Mapping[str, Any]] = MappingProxyType({"warmup_steps": 0})
    plain_beside_adam = ADAM_WARMUP_STEPS
    behind_plain = "0.54"

    def __init__(
        self, share: float = 0.01, error_feedback: bool = True, seed: int = 0, warmup_steps: int | None = None
    ) -> None:
        if not isinstance(seed, int):
            raise InvalidArgument(f"seed must be an integer, got {seed!r}")
        self.share, self.seed = check_share("share", share), seed
        super().__init__(RandomElements(self.share, seed), FloatSum(), error_feedback, warmup_steps)

    @property
    def configuration(self) -> dict[str, Any]:
        shared = {"share": self.share, "error_feedback": self.error_feedback, "seed": self.seed}
        return shared | self._selective_configuration

    def _go_to(self, site: DeviceSite, session: Session) -> StepsOnDevice:
        return RandomOnDevice(session, site, self._payload.places, self.error_feedback)


def draw_indices(seed: int, step: int, bucket: int, n_elements: int, count: int) -> Tensor:
    """(count,) int64, ascending, without repetition: the same on every rank, from what all ranks share alone."""
    digest = hashlib.blake2b(repr((seed, step, bucket, n_elements)).encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    drawn = generator.choice(n_elements, count, replace=False, shuffle=False)
    drawn.sort()
    return torch.from_numpy(drawn)
