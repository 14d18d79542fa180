"""Steps of deep gradient compression on a device: what `Dgc._send` does, without a host that waits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradwire.codecs.selection import raise_error, take_by_sample
from gradwire.core.bucket import Bucket
from gradwire.core.feedback import Feedback
from gradwire.core.session import Session
from gradwire.core.site import DeviceSite
from gradwire.schemes.dgc_rule import DgcRule
from gradwire.schemes.on_device import StepsOnDevice, refuse_unused_parameters
from gradwire.schemes.sparse_on_device import Elements

_Spans = list[tuple[int, int]]


class DgcOnDevice(StepsOnDevice):
    """A parameter whose gradient is all zeros counts as used: nobody looks.

    Args:
        scheme: its options, and the pieces that do not depend on where they work.
        momenta: of every slot; they count from the next step on, as residuals do.
    Raises: Unsupported (DDP looks for unused parameters; no kernels here).
    """

    acts_alone = True

    def __init__(self, session: Session, site: DeviceSite, scheme: DgcRule, momenta: Feedback) -> None:
        refuse_unused_parameters(session)
        super().__init__(session, site)
        self._scheme, self._momenta = scheme, momenta
        self._kept.append(momenta)
        self._elements = Elements(session, site, has_count=True)

    def _enqueue(self, bucket: Bucket, *facts: object) -> None:
        site, scheme, elements, feedback = self._site, self._scheme, self._elements, self._session.feedback
        world_size, scale = self._session.communicator.world_size, self._session.loss_scale()
        momenta, new_momenta = self._momenta.pair(bucket)
        sums, new_sums = feedback.pair(bucket)
        spans = bucket.spans
        whole = scheme.whole_spans(bucket, spans)
        gradient = self._clipped(bucket, spans, scale)
        for slot, span in zip(bucket.slots, spans, strict=True):
            if span not in whole:
                scheme.decay(slot, gradient[slice(*span)])
        torch.add(gradient, momenta, alpha=scheme.momentum, out=new_momenta)
        scheme.update(gradient, new_momenta, new_sums).add_(sums)
        is_finite = gradient.isfinite().all().logical_and_(new_sums.isfinite().all())
        dense = torch.cat([gradient[start:end] for start, end in whole]) if whole else None
        for start, end in whole:
            new_sums[start:end].zero_()
        if world_size == 1:
            gathered = elements.alone(is_finite)
        else:
            tensors, counts = scheme.spans_and_counts(bucket, whole)
            samples = scheme.samples(bucket, tensors, counts)
            count, indices, taken = take_by_sample(new_sums, tensors, counts, samples, new_momenta)
            message = elements.seal([count, indices, taken.view(torch.int32)], is_finite)
            gathered = elements.gather(message, bucket)
            if dense is not None:
                site.sum(dense, bucket.record)
                site.divide(dense, world_size)
        mean = gradient.zero_()
        elements.add_up(gathered, mean)
        site.divide(mean, world_size)
        if dense is not None:
            self._add_whole(bucket, whole, dense, mean, momenta, new_momenta)
        self._momenta.stage_bucket(bucket, new_momenta)
        feedback.stage_bucket(bucket, new_sums)
        bucket.buffer.copy_(mean.mul_(scale))
        elements.conclude(gathered, bucket.buffer)

    def _clipped(self, bucket: Bucket, spans: _Spans, scale: float) -> Tensor:
        """(n,) float32, scratch: the gradient without the loss scale, each parameter's clipped."""
        gradient = self._site.scratch("dgc gradient", bucket.n_elements, torch.float32).copy_(bucket.buffer)
        self._site.divide(gradient, scale)
        if self._scheme.max_norm is not None:
            limit = self._scheme.max_norm / math.sqrt(self._session.communicator.world_size)
            for start, end in spans:
                norm = torch.linalg.vector_norm(gradient[start:end]).double()
                factor = torch.where(norm > limit, limit / norm, 1.0)
                gradient[start:end].mul_(factor.float())
        return gradient

    def _add_whole(
        self, bucket: Bucket, whole: _Spans, dense: Tensor, mean: Tensor, momenta: Tensor, new_momenta: Tensor
    ) -> None:
        """Parameters that are sent whole: their mean, `dense`, then their momentum, alike on all ranks."""
        scheme, first, slots = self._scheme, 0, dict(zip(bucket.spans, bucket.slots, strict=True))
        for start, end in whole:
            part = dense[first : first + end - start]
            first += end - start
            scheme.decay(slots.get((start, end)), part)
            torch.add(part, momenta[start:end], alpha=scheme.momentum, out=new_momenta[start:end])
            scheme.update(part, new_momenta[start:end], mean[start:end])

    def _raise_error(self, code: int) -> None:
        raise_error(code)
