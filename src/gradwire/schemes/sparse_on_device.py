"""Steps on a device of schemes that send some elements: those that all ranks draw alike, or each rank's own choice."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.core.site import DeviceSite
from gradwire.schemes.on_device import StepsOnDevice, refuse_unused_parameters


class SparseOnDevice(StepsOnDevice):
    """What such steps share: the sum of gradient and residual, of which some elements are sent.

    Args:
        error_feedback: add what was not sent to the next gradient.
    Raises: Unsupported (DDP looks for unused parameters).
    """

    def __init__(self, session: Session, site: DeviceSite, error_feedback: bool) -> None:
        refuse_unused_parameters(session)
        super().__init__(session, site)
        self._error_feedback = error_feedback

    def _summed(self, bucket: Bucket) -> Tensor:
        """(n,) float32, to be changed: gradient + residual x loss scale."""
        if not self._error_feedback:
            return self._site.scratch("summed", bucket.n_elements, torch.float32).copy_(bucket.buffer)
        residual, unsent = self._session.feedback.pair(bucket)
        return unsent.copy_(bucket.buffer).add_(residual, alpha=self._session.loss_scale())

    def _keep(self, bucket: Bucket, unsent: Tensor) -> None:
        """Stage what stays of `_summed`, without the loss scale."""
        if self._error_feedback:
            self._session.feedback.stage_bucket(bucket, self._site.divide(unsent, self._session.loss_scale()))


class RandomOnDevice(SparseOnDevice):
    """Steps of elements that all ranks draw alike, summed by the backend.

    Args:
        places: (count,) int64 on the CPU: which elements of a bucket are sent.
    """

    def __init__(
        self, session: Session, site: DeviceSite, places: Callable[[Bucket], Tensor], error_feedback: bool
    ) -> None:
        super().__init__(session, site, error_feedback)
        self._places = places

    def _enqueue(self, bucket: Bucket, *facts: object) -> None:
        site, out, world = self._site, bucket.buffer, self._session.communicator.world_size
        places, unsent = site.upload(self._places(bucket)), self._summed(bucket)
        # Before the values goes NaN where anything is not finite, drawn or not: so its sum tells all ranks.
        message = site.scratch("message", 1 + places.numel(), torch.float32)
        message[:1].zero_().masked_fill_(unsent.isfinite().all().logical_not(), float("nan"))
        total = message[1:]
        torch.index_select(unsent, 0, places, out=total)
        unsent.index_fill_(0, places, 0.0)
        self._keep(bucket, unsent)
        site.sum(message, bucket.record)
        site.note_finite(message)
        share = 1.0 if self._error_feedback else places.numel() / bucket.n_elements
        site.divide(total, world * share)
        out.zero_().index_copy_(0, places, total.to(out.dtype))
        out.masked_fill_(message.isfinite().all().logical_not(), float("nan"))
