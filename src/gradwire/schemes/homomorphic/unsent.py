"""What one bucket sends: its values as integers, and what error feedback keeps of them."""

from __future__ import annotations

import math

import torch

from gradwire.codecs.count_sketch import FixedPoint
from gradwire.core.bucket import Bucket
from gradwire.core.feedback import Feedback, Withheld, holds_nonzero


def quantised(values: torch.Tensor, fixed: FixedPoint) -> torch.Tensor:
    """(n,) integers; ties to even."""
    scaled = values.double().mul_(math.ldexp(1.0, fixed.shift)).round_().clamp_(-fixed.limit, fixed.limit)
    return scaled.to(fixed.dtype)


class Unsent:
    """What error feedback keeps of one bucket: what the sparsifier left out, and for an estimate the distance to it.

    The ranks' distances add up to what all of them together sent, less what all of them got.
    """

    def __init__(self, feedback: Feedback, bucket: Bucket, loss_scale: float, corrected: torch.Tensor) -> None:
        """Adds the residual to `corrected`, (n,) float32."""
        self._feedback, self._bucket, self._loss_scale = feedback, bucket, loss_scale
        residual, self._room = feedback.pair(bucket)
        is_used = [holds_nonzero(bucket.buffer[start:end]) for start, end in bucket.spans]
        self._withheld = Withheld(bucket.spans, is_used, residual)
        corrected.add_(residual, alpha=loss_scale)
        self._withheld.put_back()
        self.left_out: torch.Tensor | None = None

    def stage(self, values: torch.Tensor, mean: torch.Tensor, estimated: torch.Tensor | None) -> None:
        unsent = self._room.zero_() if self.left_out is None else self._room.copy_(self.left_out)
        if estimated is not None:
            unsent[estimated] += values[estimated] - mean[estimated]
        unsent.div_(self._loss_scale)
        self._withheld.keep(unsent, [True] * len(self._bucket.spans))
        self._feedback.stage_bucket(self._bucket, unsent)
