"""The scheme `thc`: rotated values on 16 levels whose integers are summed in flight (Li et al., NSDI 2024).

Up to 8 ranks a value takes a byte on the wire, up to 1,000 ranks two. The published system sums in a switch or server,
from 4 bits a value; a plain all-reduce carries the sums both ways. Each block of 1,024 values shares the largest of the
ranks' norms.

When not to use this: with more than 8 ranks, unless two bytes a value are little enough; where the codec's time counts.
"""

from __future__ import annotations

from typing import Any

import torch

from gradwire.codecs.hadamard import Thc as ThcCodec
from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.schemes.summed import Summed
from gradwire.schemes.usage import stream_of


class Thc(Summed):
    """Sums of what each rank's gradient + residual rounds to, rotated back once.

    Args:
        clip: in standard deviations of the rotated values.
        seed: of signs and rounding; the same on all ranks, which round independently nevertheless.
        error_feedback: add what was clamped and rounded off to the next gradient.
    """

    name = "thc"

    def __init__(self, clip: float = 2.15, seed: int = 0, error_feedback: bool = True) -> None:
        super().__init__(bool(error_feedback))
        self.codec = ThcCodec(clip, seed)

    @property
    def configuration(self) -> dict[str, Any]:
        return {"clip": self.codec.clip, "seed": self.codec.seed, "error_feedback": self.error_feedback}

    def bind(self, session: Session) -> None:
        """Raises: Unsupported (more ranks than can be summed)."""
        self.codec.sums_are_wide(session.communicator.world_size)
        super().bind(session)

    def _n_scales(self, bucket: Bucket) -> int:
        return self.codec.n_norms(bucket.n_elements)

    def _write_scales(self, bucket: Bucket, residual: torch.Tensor | None, out: torch.Tensor) -> None:
        self.codec.norms_of(bucket.buffer, out, residual, self.session.loss_scale())

    def _encode(
        self, bucket: Bucket, scales: torch.Tensor, residual: torch.Tensor | None, new_residual: torch.Tensor | None
    ) -> torch.Tensor:
        communicator = self.session.communicator
        codes = communicator.scratch("thc codes", self.codec.n_codes(bucket.n_elements))
        self.codec.write_codes(
            bucket.buffer,
            scales,
            codes,
            sign_step=self._sign_step(bucket),
            step=stream_of(bucket, communicator.rank),
            residual=residual,
            new_residual=new_residual,
            residual_scale=self.session.loss_scale(),
        )
        # Two sums to a word, where bytes would overflow: Gloo has no sum of 16-bit integers, and none of these carries.
        return codes.to(torch.int16).view(torch.int32) if self._is_wide else codes

    def _decode(self, bucket: Bucket, scales: torch.Tensor, sums: torch.Tensor) -> None:
        sums = sums.view(torch.int16) if self._is_wide else sums
        world_size = self.session.communicator.world_size
        self.codec.read_sums(sums, scales, world_size, bucket.buffer, sign_step=self._sign_step(bucket))

    @property
    def _is_wide(self) -> bool:
        return self.codec.sums_are_wide(self.session.communicator.world_size)

    @staticmethod
    def _sign_step(bucket: Bucket) -> int:
        """The same on all ranks: no rank has this number."""
        return stream_of(bucket, -1)
