"""What one bucket sends: its values as integers, and what error feedback keeps of them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from gradwire.codecs.count_sketch import FixedPoint
from gradwire.codecs.selection import take_largest
from gradwire.core.bucket import Bucket
from gradwire.core.feedback import Feedback, Withheld, holds_nonzero
from gradwire.core.session import Session
from gradwire.schemes.compressed import count_of
from gradwire.schemes.homomorphic.shared_index import Union
from gradwire.wire.wire import Wire


def quantised(values: torch.Tensor, fixed: FixedPoint) -> torch.Tensor:
    """(n,) integers; ties to even."""
    scaled = values.double().mul_(math.ldexp(1.0, fixed.shift)).round_().clamp_(-fixed.limit, fixed.limit)
    return scaled.to(fixed.dtype)


def values_to_send(
    session: Session, bucket: Bucket, wire: Wire, error_feedback: bool, density: float | None, is_packed: bool
) -> tuple[torch.Tensor, Unsent | None]:
    """(n,) to be summed, float32 or as the bucket (for sketches not float16), and with error feedback what is kept.

    Args: density: share of the largest values that are sent; None: all.
    """
    n, gradient = bucket.n_elements, bucket.buffer
    with wire.timing("encode"):
        if not error_feedback and density is None:
            if gradient.dtype == torch.float16 and not is_packed:
                return wire.scratch("values", n).copy_(gradient), None
            return gradient, None
        corrected, unsent = wire.scratch("corrected", n).copy_(gradient), None
        if error_feedback:
            unsent = Unsent(session.feedback, bucket, session.loss_scale(), corrected)
        if density is None:
            return corrected, unsent
        # What is not finite is among the largest: its bucket is going to be redone.
        largest, taken, _ = take_largest(corrected, count_of(density, n))
        kept = wire.scratch("kept", n).zero_().index_copy_(0, largest.long(), taken)
        if unsent is not None:
            unsent.left_out = corrected
        return kept, unsent


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


class Summand(NamedTuple):
    """What this rank adds to the sum of one bucket, and what all ranks know of that.

    Attributes:
        key: the bucket's, for what is learnt of it.
        values: (n,) as `values_to_send` gave them, and `unsent` with them.
    """

    bucket: Bucket
    wire: Wire
    key: str
    values: torch.Tensor
    unsent: Unsent | None
    union: Union
