"""The scheme `terngrad`: -1, 0 or 1 times a scale that all ranks share, summed as integers (Wen et al., NeurIPS 2017).

Up to 7 ranks a value takes 4 bits on the wire (the sum of all ranks has to fit), up to 127 ranks 8 bits. Each
tensor has a scale of its own, and is clipped at 2.5 of its own standard deviations, as published. By bucket (`per="bucket"`)
the tensors of small gradients are next to all zeros, and clipping takes most from those of large ones.

When not to use this: with more than 127 ranks; where one-bit or two-bit can be used, which send less and feed their errors
back: the variance of ternary rounding stays, and asks for smaller learning rates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradwire.codecs.ternary import Shares, Ternary
from gradwire.control.checks import choice as check_choice
from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.core.site import DeviceSite
from gradwire.exchange.patterns import ScaledSum, Values
from gradwire.schemes.on_device import Placed, StepsOnDevice, SummedOnDevice, spans_of_scales
from gradwire.wire.wire import Wire


class TernaryCounts:
    """Integers: -1, 0 or 1 by chance, in fields that hold the sum over all ranks."""

    def __init__(self, codec: Ternary, per: str) -> None:
        self.codec, self._per = codec, per

    def n_scales(self, bucket: Bucket) -> int:
        return self._shares(bucket).n_spans

    def write_scales(self, values: Values, out: Tensor) -> None:
        self.codec.write_scales(values.gradient, self._shares(values.bucket), out)

    def encode(self, values: Values, scales: Tensor, wire: Wire) -> Tensor:
        n_bytes = self.codec.count_bytes(values.gradient.numel(), wire.world_size)
        counts = wire.scratch("ternary counts", n_bytes, torch.uint8)
        shares, draw = self._shares(values.bucket), values.bucket.draw(wire.rank)
        self.codec.write_counts(values.gradient, shares, scales, wire.world_size, counts, draw)
        return counts

    def decode(self, sums: Tensor, values: Values, scales: Tensor, wire: Wire) -> None:
        self.codec.read_counts(sums, self._shares(values.bucket), scales, wire.world_size, values.gradient)

    def _shares(self, bucket: Bucket) -> Shares:
        return self.codec.share(bucket.n_elements, spans_of_scales(bucket, self._per), bucket.buffer.device)


class TernGrad(Placed):
    """Right on average but for what is clipped; without error feedback, as published.

    Args:
        clip: in standard deviations of what shares a scale (taken from zero).
        seed: of the drawing; the same on all ranks, which draw independently nevertheless.
        per: what shares a scale: "layer", a tensor; or "bucket".
    """

    name = "terngrad"

    def __init__(self, clip: float = 2.5, seed: int = 0, per: str = "layer") -> None:
        self.codec, self.per = Ternary(clip, seed), check_choice("per", per, ("layer", "bucket"))
        super().__init__(TernaryCounts(self.codec, per), ScaledSum())

    @property
    def configuration(self) -> dict[str, Any]:
        return {"clip": self.codec.clip, "seed": self.codec.seed, "per": self.per}

    def bind(self, session: Session) -> None:
        """Raises: Unsupported (more ranks than can be summed)."""
        self.codec.field_bits(session.communicator.world_size)
        super().bind(session)

    def _go_to(self, site: DeviceSite, session: Session) -> StepsOnDevice:
        return SummedOnDevice(session, site, self.codec, self.per)
