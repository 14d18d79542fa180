"""The scheme `top-k-adam`: the largest of Adam's own updates, behind a variance that stays.

What top-k leaves out of a gradient reaches Adam late and in one piece, which its second moments then keep for hundreds of
steps. So the variance is frozen after some plain steps, as `one-bit-adam` does it. From there on Adam is SGD with
momentum, value by value at a rate of its own, and sparse updates are safe there if the momentum comes before the
selection (momentum correction: Lin et al., ICLR 2018). With b1 and the frozen root sqrt(v) the optimizer's own, every rank

    m <- b1 m + (1 - b1) gradient;    r <- r + m / sqrt(v);    sends the largest of r, which are zero then

and the user's Adam takes sqrt(v) times the mean of what was sent as its momentum of this step. That is the gradient that
comes back, so its norm is that of an update. The optimizer's state keeps the running mean of these.

When not to use this: under any other optimizer; in runs that are hardly longer than `freeze_step`; where the variance
goes on changing, as after a second warm-up of the learning rate; with many ranks, since each receives the elements of
every other: above seven, `one-bit-adam` sends less than the default share.
"""

from __future__ import annotations

from typing import Any

import torch

from gradwire.control.checks import share as check_share
from gradwire.core.bucket import Bucket
from gradwire.core.feedback import Feedback, holds_nonzero
from gradwire.core.session import Session
from gradwire.core.site import DeviceSite
from gradwire.exchange.patterns import Gather
from gradwire.schemes.apart import Apart
from gradwire.schemes.behind_adam import BehindAdam
from gradwire.schemes.compressed import WithMomenta
from gradwire.schemes.on_device import ApartOnDevice, StepsOnDevice
from gradwire.schemes.selection import Names, Selection
from gradwire.schemes.sparse_on_device import LargestOnDevice, ShortElements
from gradwire.schemes.top_k import LargestInShort


class TopKAdam(BehindAdam, WithMomenta):
    """See `BehindAdam` for what is not named here. Its own state is the ranks' momenta and what they did not send.

    Args:
        share: of a bucket's elements that are sent, at least one; 4 bytes each.
    """

    name = "top-k-adam"
    instead = "top-k"

    def __init__(
        self,
        share: float = 0.01,
        freeze_step: int = 50,
        correction: str = "frozen",
        exempt: Names = (),
        only: Names = (),
    ) -> None:
        self.share = check_share("share", share)
        super().__init__(LargestInShort(self.share), Gather(), freeze_step, correction, exempt, only)

    @property
    def configuration(self) -> dict[str, Any]:
        return {**super().configuration, "share": self.share}

    # ---- one bucket

    def fill(self, part: Bucket, bucket: Bucket, chosen: Selection) -> None:
        loss_scale = self.session.loss_scale()
        is_new = [self._momenta.of(slot) is None for slot in chosen.slots]
        momenta, new_momenta = self._momenta.pair(part)
        for slot, span, new in zip(chosen.slots, chosen.compressed, is_new, strict=True):
            shared, beta1 = self.adam.momentum(slot)
            old, moved, update = map(span.in_fused, (momenta, new_momenta, part.buffer))
            gradient = span.in_bucket(bucket.buffer)
            if new:
                old.copy_(shared)
            if holds_nonzero(gradient):
                moved.copy_(gradient).div_(loss_scale).lerp_(old, beta1)
                torch.div(moved, self.adam.root(slot), out=update).mul_(loss_scale)
            else:  # what this rank did not use waits
                moved.copy_(old)
                update.zero_()
        self._momenta.stage_bucket(part, new_momenta)

    def take(self, part: Bucket, bucket: Bucket, chosen: Selection) -> None:
        for slot, span in zip(chosen.slots, chosen.compressed, strict=True):
            span.in_bucket(bucket.buffer).copy_(span.in_fused(part.buffer).mul_(self.adam.root(slot)))
        self.adam.updates.update(part.parameters)

    # ---- on a device

    def _go_to(self, site: DeviceSite, session: Session) -> StepsOnDevice:
        return _UpdatesOnDevice(self, session, site, self._momenta)


class _UpdatesOnDevice(Apart, ApartOnDevice, LargestOnDevice):
    """Its steps on a device: what is sent of a tensor is the largest of its updates, once its variance is frozen."""

    def __init__(self, scheme: TopKAdam, session: Session, site: DeviceSite, momenta: Feedback) -> None:
        super().__init__(session, site, scheme.share, scheme.error_feedback, ShortElements(session, site))
        self._scheme, self._momenta = scheme, momenta
        self._choose, self.apart = scheme._choose, self
        self._kept.append(momenta)

    def _enqueue(self, bucket: Bucket, *facts: object) -> None:
        """What is frozen is asked on the lane, which may have to wait for the step before."""
        self._compress_apart(bucket, self._choose(bucket))

    def _compress(self, bucket: Bucket) -> None:
        LargestOnDevice._enqueue(self, bucket)

    def part_dtype(self, bucket: Bucket) -> torch.dtype:
        return self._scheme.part_dtype(bucket)

    def take(self, part: Bucket, bucket: Bucket, chosen: Selection) -> None:
        self._scheme.take(part, bucket, chosen)

    def fill(self, part: Bucket, bucket: Bucket, chosen: Selection) -> None:
        """As the scheme's: what this rank did not use waits, and the device alone knows what that is."""
        loss_scale, adam = self._session.loss_scale(), self._scheme.adam
        is_new = [self._momenta.of(slot) is None for slot in chosen.slots]
        momenta, new_momenta = self._momenta.pair(part)
        for slot, span, new in zip(chosen.slots, chosen.compressed, is_new, strict=True):
            shared, beta1 = adam.momentum(slot)
            old, moved, update = map(span.in_fused, (momenta, new_momenta, part.buffer))
            gradient = span.in_bucket(bucket.buffer)
            if new:
                old.copy_(shared)
            is_used = gradient.any()
            self._site.divide(moved.copy_(gradient), loss_scale).lerp_(old, beta1)
            moved.copy_(torch.where(is_used, moved, old))
            torch.div(moved, adam.root(slot), out=update).mul_(loss_scale)
            update.copy_(torch.where(is_used, update, 0.0))
        self._momenta.stage_bucket(part, new_momenta)
