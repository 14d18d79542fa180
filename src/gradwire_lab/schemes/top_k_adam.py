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
from torch import Tensor

from gradwire.checks import share as check_share
from gradwire.core.bucket import Bucket
from gradwire.core.feedback import Part
from gradwire.schemes.compressed import Compressed
from gradwire.schemes.frozen_adam import FrozenAdam
from gradwire.schemes.selection import ByName, Names, Selection
from gradwire.schemes.top_k import Elements, send_largest
from gradwire.wire.wire import Wire

_BLOCK_BITS, _IN_BLOCK = 16, 0xFFFF


class TopKAdam(Compressed):
    """The largest updates of every rank. Its own state is the ranks' momenta and what they did not send.

    Args:
        share: of a bucket's elements that are sent, at least one; 4 bytes each.
        freeze_step, correction: see `FrozenAdam`.
        exempt, only: see `ByName`.
    """

    name = "top-k-adam"
    needs_momenta = True
    works_on_device = False
    adam: FrozenAdam

    def __init__(
        self,
        share: float = 0.01,
        freeze_step: int = 50,
        correction: str = "frozen",
        exempt: Names = (),
        only: Names = (),
    ) -> None:
        adam = FrozenAdam(self.name, "top-k", freeze_step, correction)
        super().__init__(error_feedback=True, momenta=True, adam=adam, select=ByName(exempt, only))
        self.share = check_share("share", share)

    @property
    def configuration(self) -> dict[str, Any]:
        return {"error_feedback": True, "share": self.share, **self.frame_configuration}

    # ---- one bucket

    def fill(self, part: Bucket, bucket: Bucket, chosen: Selection) -> None:
        assert self.momenta is not None
        loss_scale, adam = self.session.loss_scale(), self.adam
        is_new = [self.momenta.of(slot) is None for slot in chosen.slots]
        momenta, new_momenta = self.momenta.pair(part)
        for slot, span, new in zip(chosen.slots, chosen.compressed, is_new, strict=True):
            shared, beta1 = adam.momentum(slot)
            old, moved, update = map(span.in_fused, (momenta, new_momenta, part.buffer))
            gradient = span.in_bucket(bucket.buffer)
            if new:
                old.copy_(shared)
            is_used = gradient.any()  # what this rank did not use waits
            self.session.wire.divide(moved.copy_(gradient), loss_scale).lerp_(old, beta1)
            moved.copy_(torch.where(is_used, moved, old))
            torch.div(moved, adam.root(slot), out=update).mul_(loss_scale)
            update.copy_(torch.where(is_used, update, 0.0))
        self.momenta.stage_bucket(part, new_momenta)

    def take(self, part: Bucket, bucket: Bucket, chosen: Selection) -> None:
        for slot, span in zip(chosen.slots, chosen.compressed, strict=True):
            span.in_bucket(bucket.buffer).copy_(span.in_fused(part.buffer).mul_(self.adam.root(slot)))
        self.adam.updates.update(part.parameters)

    def step(self, part: Part, wire: Wire) -> None:
        send_largest(part, wire, self.share, ShortElements())


class ShortElements(Elements):
    """The layout of elements in 4 bytes each: half of its index, and its value as bfloat16; what that loses stays.

    A payload: how many are in each block of 65,536 elements, int32; places in their block, int16; values, bfloat16.
    """

    def pack(self, indices: Tensor, taken: Tensor, total: Tensor) -> Tensor:
        short = taken.bfloat16()
        total.index_copy_(0, indices.long(), taken - short.float())
        counts = indices.new_zeros(_n_blocks(total.numel()))
        counts.index_add_(0, indices >> _BLOCK_BITS, torch.ones_like(indices))
        halves = torch.cat([(indices & _IN_BLOCK).to(torch.int16), short.view(torch.int16)])
        return torch.cat([counts, halves.view(torch.int32)])

    def unpack(self, payload: Tensor, n_elements: int, wire: Wire) -> tuple[Tensor, Tensor]:
        counts, halves = payload.tensor_split([_n_blocks(n_elements)])
        places, short = halves.view(torch.int16).chunk(2)
        ends = counts.cumsum(0)
        wire.note_error((counts < 0).any().logical_or(ends[-1] != places.numel()))
        # Whatever the counts are: nothing is written outside.
        element = torch.arange(places.numel(), dtype=torch.int64, device=payload.device)
        blocks = torch.searchsorted(ends, element, right=True).to(torch.int32)
        return (places.to(torch.int32) & _IN_BLOCK) + (blocks << _BLOCK_BITS), short.view(torch.bfloat16).float()


def _n_blocks(n_elements: int) -> int:
    return -(-n_elements >> _BLOCK_BITS)
