"""The scheme `terngrad`: -1, 0 or 1 times a scale that all ranks share, summed as integers (Wen et al., NeurIPS 2017).

Up to 7 ranks a value takes 4 bits on the wire (the sum of all ranks has to fit), up to 127 ranks 8 bits. Published with a
scale for each layer; here each bucket has one, whose values are clipped at 2.5 standard deviations of the bucket.

When not to use this: with more than 127 ranks; where one-bit or two-bit can be used, which send less and feed their errors
back: the variance of ternary rounding stays, and asks for smaller learning rates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradwire.codecs.ternary import Ternary
from gradwire.core.session import Session
from gradwire.exchange.patterns import ScaledSum, Values
from gradwire.schemes.compressed import Compressed
from gradwire.wire.wire import Wire


class TernaryCounts:
    """Integers: -1, 0 or 1 by chance, in fields that hold the sum over all ranks."""

    def __init__(self, codec: Ternary) -> None:
        self.codec = codec

    def n_scales(self, n_elements: int) -> int:
        return 1

    def write_scales(self, values: Values, out: Tensor) -> None:
        out.fill_(self.codec.scale_of(values.gradient))

    def encode(self, values: Values, scales: Tensor, wire: Wire) -> Tensor:
        n_bytes = self.codec.count_bytes(values.gradient.numel(), wire.world_size)
        codes = wire.scratch("ternary counts", n_bytes, torch.uint8)
        draw = values.bucket.draw(wire.rank)
        self.codec.write_counts(values.gradient, float(scales[0]), wire.world_size, codes, step=draw)
        return codes

    def decode(self, sums: Tensor, values: Values, scales: Tensor, wire: Wire) -> None:
        self.codec.read_counts(sums, float(scales[0]), wire.world_size, values.gradient)


class TernGrad(Compressed):
    """Right on average but for what is clipped; without error feedback, as published.

    Args:
        clip: in standard deviations of the bucket (taken from zero).
        seed: of the drawing; the same on all ranks, which draw independently nevertheless.
    """

    name = "terngrad"

    def __init__(self, clip: float = 2.5, seed: int = 0) -> None:
        self.codec = Ternary(clip, seed)
        super().__init__(TernaryCounts(self.codec), ScaledSum())

    @property
    def configuration(self) -> dict[str, Any]:
        return {"clip": self.codec.clip, "seed": self.codec.seed}

    def bind(self, session: Session) -> None:
        """Raises: Unsupported (more ranks than can be summed)."""
        self.codec.field_bits(session.communicator.world_size)
        super().bind(session)
