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
from gradwire.core.site import DeviceSite
from gradwire.exchange.patterns import ScaledSum, Values
from gradwire.gpu.kernels import kernels_on
from gradwire.schemes.on_device import Placed, StepsOnDevice, refuse_unused_parameters
from gradwire.wire.wire import Wire

_NO_RANK = -1  # what is drawn by this number is the same on all ranks


class RotatedLevels:
    """Integers: rotated values on 16 levels of their block's largest norm, a byte each, or two past 8 ranks."""

    def __init__(self, codec: Thc) -> None:
        self.codec = codec

    def n_scales(self, bucket: Bucket) -> int:
        return self.codec.n_norms(bucket.n_elements)

    def write_scales(self, values: Values, out: Tensor) -> None:
        self.codec.write_norms(values.gradient, out, values.residual, values.loss_scale)

    def encode(self, values: Values, scales: Tensor, wire: Wire) -> Tensor:
        n_bytes = self.codec.code_bytes(values.gradient.numel(), wire.world_size)
        codes = wire.scratch("thc codes", n_bytes, torch.uint8)
        self.codec.write_codes(
            values.gradient,
            scales,
            codes,
            n_ranks=wire.world_size,
            sign_step=values.bucket.draw(_NO_RANK),
            step=values.bucket.draw(wire.rank),
            residual=values.residual,
            new_residual=values.unsent,
            residual_scale=values.loss_scale,
        )
        return self.codec.summable(codes, wire.world_size)

    def decode(self, sums: Tensor, values: Values, scales: Tensor, wire: Wire) -> None:
        sign_step = values.bucket.draw(_NO_RANK)
        self.codec.read_sums(sums.view(torch.uint8), scales, wire.world_size, values.gradient, sign_step=sign_step)


class LevelsOnDevice(StepsOnDevice):
    """Steps of integers by norms that all ranks share, summed by the backend.

    Raises: Unsupported (DDP looks for unused parameters; no kernels here).
    """

    def __init__(self, session: Session, site: DeviceSite, codec: Thc, error_feedback: bool) -> None:
        refuse_unused_parameters(session)
        super().__init__(session, site)
        self._codec, self._error_feedback = codec, error_feedback
        kernels_on(site.device)  # raises, where there are none

    def _enqueue(self, bucket: Bucket, *facts: Any) -> None:
        site, codec, values, record = self._site, self._codec, bucket.buffer, bucket.record
        feedback, scale = self._session.feedback, self._session.loss_scale()
        rank, world = self._session.communicator.rank, self._session.communicator.world_size
        residual, unsent = feedback.pair(bucket) if self._error_feedback else (None, None)
        norms = site.scratch("norms", codec.n_norms(bucket.n_elements), torch.float32)
        codec.write_norms(values, norms, residual, scale)
        site.largest(norms.view(torch.int32), record)
        site.note_finite(norms)
        codes = site.scratch("codes", codec.code_bytes(bucket.n_elements, world), torch.uint8)
        sign_step = bucket.draw(_NO_RANK)
        codec.write_codes(
            values,
            norms,
            codes,
            n_ranks=world,
            sign_step=sign_step,
            step=bucket.draw(rank),
            residual=residual,
            new_residual=unsent,
            residual_scale=scale,
        )
        site.sum(codec.summable(codes, world), record)
        codec.read_sums(codes, norms, world, values, sign_step=sign_step)
        if unsent is not None:
            feedback.stage_bucket(bucket, unsent)


class ThcScheme(Placed):
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

    def _go_to(self, site: DeviceSite, session: Session) -> StepsOnDevice:
        return LevelsOnDevice(session, site, self.codec, self.error_feedback)
