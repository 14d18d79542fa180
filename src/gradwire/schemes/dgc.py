"""The scheme `dgc`: deep gradient compression (Lin et al., ICLR 2018): the largest accumulated updates of every rank.

u = momentum x u + gradient; v = v + u; the largest of v are sent, and v and u are zero there (momentum correction and factor
masking). With Nesterov's momentum v = v + gradient + momentum x u. One-dimensional parameters are sent whole, and get their
momentum after the mean.

The mean that comes back is an update with momentum, for SGD(momentum=0, weight_decay=0): momentum, Nesterov's or not, and
weight decay are options here. The optimizer's own weight decay would be added after the mean, and get no momentum.

When not to use this: with an optimizer that has momentum of its own; with Adam; with many ranks, since each receives the
elements of every other.
"""

from __future__ import annotations

import logging
import math

import torch

from gradwire.codecs.selection import add_elements, take_by_sample
from gradwire.core.bucket import Bucket
from gradwire.core.feedback import Withheld, holds_nonzero
from gradwire.core.session import Session
from gradwire.core.site import DeviceSite
from gradwire.errors import CorruptMessage
from gradwire.schemes.dgc_on_device import DgcOnDevice
from gradwire.schemes.dgc_rule import DgcRule
from gradwire.schemes.on_device import Placing, StepsOnDevice
from gradwire.wire.wire import Wire

_log = logging.getLogger(__name__)


class Dgc(Placing, DgcRule):
    """Mean over the ranks of each rank's largest accumulated updates. Its own state, u and v, is its error feedback.

    With one rank nothing is left out: the result is the gradient with momentum.

    Args:
        share: of a bucket's elements that are sent after the warm-up, 0.001 in the paper; 0.1 in SlimGC's comparison.
        momentum: 0.9, taken over from the optimizer, which then must have none.
        warmup_steps: in how many steps the share falls exponentially to `share`.
        max_norm: clip each parameter's gradient to this norm / sqrt(ranks) before it is added; None for no clipping.
        seed: of the sample that the threshold is taken from.
        per: "layer": the share is taken of each tensor, as the paper has it; "bucket": of a bucket's elements together,
            where tensors of small gradients send nothing for long.
        nesterov: Nesterov's momentum, as SGD's own.
        weight_decay: this share of a parameter is added to its gradient before all else, as SGD does; by the ranks that
            have a gradient of it.
    """

    name = "dgc"

    def bind(self, session: Session) -> None:
        super().bind(session)
        groups = session.optimizer.param_groups if session.optimizer is not None else []
        if self.momentum and any(group.get("momentum") or "betas" in group for group in groups):
            _log.warning(
                "gradwire dgc: its result already has momentum %g, and the optimizer adds its own: "
                "use SGD(momentum=0), or dgc with momentum=0",
                self.momentum,
            )
        elif self.momentum and any(group.get("weight_decay") for group in groups):
            _log.warning(
                "gradwire dgc: the optimizer adds its weight decay after the momentum %g; "
                "to have it as SGD(momentum=%g) does, give dgc the weight_decay, and the optimizer none",
                self.momentum,
                self.momentum,
            )

    def _send(self, bucket: Bucket, wire: Wire) -> bool:
        scale = self.session.loss_scale()
        with wire.timing("encode"):
            momenta, new_momenta = self._momenta.pair(bucket)
            sums, new_sums = self.session.feedback.pair(bucket)
            spans = bucket.spans
            whole = self.whole_spans(bucket, spans)
            # What this rank did not use waits; the momentum of parameters that are sent whole is the same on all ranks.
            is_used = [span in whole or holds_nonzero(bucket.buffer[slice(*span)]) for span in spans]
            waiting = [Withheld(spans, is_used, state) for state in (momenta, sums)]
            gradient = self._clipped(bucket, spans, scale)
            for slot, span, used in zip(bucket.slots, spans, is_used, strict=True):
                if used and span not in whole:
                    self.decay(slot, gradient[slice(*span)])
            torch.add(gradient, momenta, alpha=self.momentum, out=new_momenta)
            self.update(gradient, new_momenta, new_sums).add_(sums)
            for withheld in waiting:
                withheld.put_back()
            # One pass without a copy: the largest magnitude is NaN or Inf if anything is.
            is_finite = all(
                math.isfinite(float(torch.linalg.vector_norm(values, float("inf")))) for values in (gradient, new_sums)
            )
            dense = torch.cat([gradient[start:end] for start, end in whole]) if whole else None
            for start, end in whole:
                new_sums[start:end] = 0
            tensors, counts = self.spans_and_counts(bucket, whole)
            samples = self.samples(bucket, tensors, counts)
            count, indices, taken = take_by_sample(new_sums, tensors, counts, samples, new_momenta)
        messages: torch.Tensor | None = None
        if wire.world_size > 1:
            messages = wire.gather(torch.cat([count, indices, taken.view(torch.int32)]), is_finite)
            if messages is None:
                return False
        elif not is_finite:
            return False
        if dense is not None and wire.world_size > 1:
            wire.sum(dense).div_(wire.world_size)
        with wire.timing("decode"):
            mean = self._mean_of(bucket, messages, gradient)
            if dense is not None:
                self._add_whole(bucket, whole, dense, mean, momenta, new_momenta)
            for withheld, new in zip(waiting, (new_momenta, new_sums), strict=True):
                withheld.keep(new, [False] * len(spans))
            self._momenta.stage_bucket(bucket, new_momenta)
            self.session.feedback.stage_bucket(bucket, new_sums)
            bucket.buffer.copy_(mean.mul_(scale))
        return True

    def _clipped(self, bucket: Bucket, spans: list[tuple[int, int]], scale: float) -> torch.Tensor:
        """(n,) float32, scratch: the gradient without the loss scale, each parameter's clipped."""
        scratch = self.session.communicator.scratch("dgc gradient", 4 * bucket.n_elements).view(torch.float32)
        torch.div(bucket.buffer, scale, out=scratch) if bucket.buffer.dtype == torch.float32 else scratch.copy_(
            bucket.buffer
        ).div_(scale)
        if self.max_norm is not None:
            limit = self.max_norm / math.sqrt(self.session.communicator.world_size)
            for start, end in spans:
                norm = float(torch.linalg.vector_norm(scratch[start:end]))
                if norm > limit:
                    scratch[start:end].mul_(limit / norm)
        return scratch

    def _mean_of(self, bucket: Bucket, messages: torch.Tensor | None, scratch: torch.Tensor) -> torch.Tensor:
        """(n,) float32 in `scratch`: the mean of what was sent sparsely."""
        mean = scratch.zero_()
        if messages is None:
            return mean
        k = (messages.shape[1] - 1) // 2
        for rank, message in enumerate(messages):  # in rank order: the same sum everywhere
            error = torch.zeros(1, dtype=torch.int32)
            add_elements(message[1 : 1 + k], message[1 + k :].view(torch.float32), mean, error, message[:1])
            if error:
                raise CorruptMessage(
                    f"rank {rank} sent {int(message[0])} of at most {k} elements, or an index outside of bucket "
                    f"{bucket.index} ({bucket.n_elements} elements) in step {bucket.step}; restart from the last checkpoint"
                )
        return mean.div_(len(messages))

    def _add_whole(
        self,
        bucket: Bucket,
        whole: list[tuple[int, int]],
        dense: torch.Tensor,
        mean: torch.Tensor,
        momenta: torch.Tensor,
        new_momenta: torch.Tensor,
    ) -> None:
        """Parameters that are sent whole: their mean, `dense`, then their momentum, alike on all ranks."""
        first, slots = 0, dict(zip(bucket.spans, bucket.slots, strict=True))
        for start, end in whole:
            part = dense[first : first + end - start]
            first += end - start
            if not part.any():  # unused on all ranks: DDP throws the result away, so its momentum waits
                new_momenta[start:end], mean[start:end] = momenta[start:end], part
                continue
            self.decay(slots.get((start, end)), part)
            torch.add(part, momenta[start:end], alpha=self.momentum, out=new_momenta[start:end])
            self.update(part, new_momenta[start:end], mean[start:end])

    # ---- on a device

    def _go_to(self, site: DeviceSite, session: Session) -> StepsOnDevice:
        return DgcOnDevice(session, site, self, self._momenta)
