"""The scheme `terngrad`: -1, 0 or 1 times a scale that all ranks share, summed as integers (Wen et al., NeurIPS 2017).

Up to 7 ranks a value takes 4 bits on the wire (the sum of all ranks has to fit), up to 127 ranks 8 bits. Published with a
scale for each layer; here each bucket has one, whose values are clipped at 2.5 standard deviations of the bucket.

When not to use this: with more than 127 ranks; where one-bit or two-bit can be used, which send less and feed their errors
back: the variance of ternary rounding stays, and asks for smaller learning rates.
"""

from __future__ import annotations

from typing import Any

import torch

from gradwire.codecs.ternary import Ternary
from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.schemes.summed import Summed
from gradwire.schemes.usage import stream_of


class TernGrad(Summed):
    """Right on average but for what is clipped; without error feedback, as published.

    Args:
        clip: in standard deviations of the bucket (taken from zero).
        seed: of the drawing; the same on all ranks, which draw independently nevertheless.
    """

    name = "terngrad"
    state_is_per_world = False

    def __init__(self, clip: float = 2.5, seed: int = 0) -> None:
        super().__init__(error_feedback=False)
        self.codec = Ternary(clip, seed)

    @property
    def configuration(self) -> dict[str, Any]:
        return {"clip": self.codec.clip, "seed": self.codec.seed}

    def bind(self, session: Session) -> None:
        """Raises: Unsupported (more ranks than can be summed)."""
        self.codec.field_bits(session.communicator.world_size)
        super().bind(session)

    def _n_scales(self, bucket: Bucket) -> int:
        return 1

    def _write_scales(self, bucket: Bucket, residual: torch.Tensor | None, out: torch.Tensor) -> None:
        out.fill_(self.codec.scale_of(bucket.buffer))

    def _encode(
        self, bucket: Bucket, scales: torch.Tensor, residual: torch.Tensor | None, new_residual: torch.Tensor | None
    ) -> torch.Tensor:
        communicator = self.session.communicator
        n_bytes = self.codec.count_bytes(bucket.n_elements, communicator.world_size)
        codes = communicator.scratch("ternary counts", n_bytes)
        stream = stream_of(bucket, communicator.rank)
        self.codec.write_counts(bucket.buffer, float(scales[0]), communicator.world_size, codes, step=stream)
        return codes

    def _decode(self, bucket: Bucket, scales: torch.Tensor, sums: torch.Tensor) -> None:
        self.codec.read_counts(sums, float(scales[0]), self.session.communicator.world_size, bucket.buffer)
