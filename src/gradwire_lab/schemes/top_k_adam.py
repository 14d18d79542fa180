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
from gradwire.core.session import Session
from gradwire.schemes.compressed import Compressed
from gradwire.schemes.frozen_adam import Freezing
from gradwire.schemes.plain_steps import PlainSteps
from gradwire.schemes.selection import ByName, Names, Selection
from gradwire.schemes.top_k import Elements, send_largest
from gradwire.wire.wire import Wire

_BLOCK_BITS, _IN_BLOCK = 16, 0xFFFF


class TopKAdam(Compressed):
    """The largest updates of every rank. Its own state is the ranks' momenta and what they did not send.

    Args:
        share: of a bucket's elements that are sent, at least one; 4 bytes each.
        freeze_step, correction: see `Freezing`.
        exempt, only: see `ByName`.
    """

    name = "top-k-adam"
    needs_adam = True
    works_on_device = False

    def __init__(
        self,
        share: float = 0.01,
        freeze_step: int = 50,
        correction: str = "frozen",
        exempt: Names = (),
        only: Names = (),
    ) -> None:
        self._freezing = Freezing(self.name, "top-k", freeze_step, correction)
        plain = PlainSteps(
            self.name, "freeze_step"
        )  # none by their number: a variance that is not frozen travels plainly
        super().__init__(error_feedback=True, momenta=True, plain=plain, select=ByName(exempt, only))
        self.share = check_share("share", share)

    @property
    def configuration(self) -> dict[str, Any]:
        shared = {"error_feedback": self.error_feedback, **self._freezing.configuration, "share": self.share}
        return {**shared, **self.select.configuration}

    @property
    def settling_steps(self) -> int:
        """Steps that are reduced plainly, unless the optimizer has taken them before."""
        return self._freezing.freeze_step

    @property
    def is_settled(self) -> bool:
        """Whether a variance is frozen."""
        return self._freezing.n_frozen > 0

    def bind(self, session: Session) -> None:
        """Raises: Unsupported (an optimizer that is no Adam, or with options it cannot do; no kernels on the device)."""
        with self._freezing.binding(session):
            super().bind(session)

    def close(self) -> None:
        super().close()
        self._freezing.close()

    # ---- one bucket

    def choose(self, bucket: Bucket) -> Selection:
        return self._freezing.choose(bucket, self.select)

    def part_dtype(self, bucket: Bucket) -> torch.dtype:
        return torch.float32

    def fill(self, part: Bucket, bucket: Bucket, chosen: Selection) -> None:
        assert self.momenta is not None
        loss_scale, adam = self.session.loss_scale(), self._freezing.adam
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
            span.in_bucket(bucket.buffer).copy_(span.in_fused(part.buffer).mul_(self._freezing.adam.root(slot)))
        self._freezing.adam.updates.update(part.parameters)

    def step(self, part: Part, wire: Wire) -> None:
        send_largest(part, wire, self.share, ShortElements())

    # ---- between steps

    def stats(self) -> dict[str, Any]:
        """Tensors whose variance is frozen, and steps in which something was not finite."""
        return {**super().stats(), "n_frozen": self._freezing.n_frozen}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self._freezing.adam.state_by_name(self.session.slots)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: InvalidArgument."""
        super().load_state_dict(state)
        self._freezing.adam.load_by_name(state, self.session.slots)


class ShortElements(Elements):
    """How elements travel in 4 bytes each: half of its index, and its value as bfloat16; what that loses stays.

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
