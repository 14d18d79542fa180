"""The scheme `thc`: rotated values on 16 levels whose integers are summed in flight (Li et al., NSDI 2024).

Up to 8 ranks a value takes a byte on the wire, up to 1,000 ranks two. The published system sums in a switch or server,
from 4 bits a value; a plain all-reduce carries the sums both ways. Each block of 1,024 values shares the largest of the
ranks' norms.

When not to use this: with more than 8 ranks, unless two bytes a value are little enough; where the codec's time counts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradwire.codecs.hadamard import Thc
from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.exchange.patterns import ScaledSum, Values
from gradwire.schemes.compressed import Compressed
from gradwire.wire.wire import Wire

_NO_RANK = -1  # what is drawn by this number is the same on all ranks


class RotatedLevels:
    """Integers: rotated values on 16 levels of their block's largest norm, a byte each, or two past 8 ranks."""

    def __init__(self, codec: Thc) -> None:
        self.codec = codec

    def n_scales(self, bucket: Bucket) -> int:
        return self.codec.n_norms(bucket.n_elements)

    def write_scales(self, values: Values, out: Tensor) -> None:
        self.codec.norms_of(values.gradient, out, values.residual, values.loss_scale)

    def encode(self, values: Values, scales: Tensor, wire: Wire) -> Tensor:
        codes = wire.scratch("thc codes", self.codec.n_codes(values.gradient.numel()), torch.uint8)
        self.codec.write_codes(
            values.gradient,
            scales,
            codes,
            sign_step=values.bucket.draw(_NO_RANK),
            step=values.bucket.draw(wire.rank),
            residual=values.residual,
            new_residual=values.unsent,
            residual_scale=values.loss_scale,
        )
        # Two sums to a word, where bytes would overflow: Gloo has no sum of 16-bit integers, and none of these carries.
        return codes.to(torch.int16).view(torch.int32) if self.codec.sums_are_wide(wire.world_size) else codes

    def decode(self, sums: Tensor, values: Values, scales: Tensor, wire: Wire) -> None:
        codes = sums.view(torch.int16) if self.codec.sums_are_wide(wire.world_size) else sums
        sign_step = values.bucket.draw(_NO_RANK)
        self.codec.read_sums(codes, scales, wire.world_size, values.gradient, sign_step=sign_step)


class ThcScheme(Compressed):
    """Sums of what each rank's gradient + residual rounds to, rotated back once.

    Args:
        clip: in standard deviations of the rotated values.
        seed: of signs and rounding; the same on all ranks, which round independently nevertheless.
        error_feedback: add what was clamped and rounded off to the next gradient.
    """

    name = "thc"

    def __init__(self, clip: float = 2.15, seed: int = 0, error_feedback: bool = True) -> None:
        self.codec = Thc(clip, seed)
        super().__init__(RotatedLevels(self.codec), ScaledSum(), error_feedback)

    @property
    def configuration(self) -> dict[str, Any]:
        return {"clip": self.codec.clip, "seed": self.codec.seed, "error_feedback": self.error_feedback}

    def bind(self, session: Session) -> None:
        """Raises: Unsupported (more ranks than can be summed)."""
        self.codec.sums_are_wide(session.communicator.world_size)
        super().bind(session)
