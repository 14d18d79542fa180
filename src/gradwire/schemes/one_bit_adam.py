"""The scheme `one-bit-adam`: momenta at one bit, behind a variance that stays (Tang et al., ICML 2021).

What Adam divides by, the root of its second moments, would see the quantiser's error before all else. So the first steps
are plain, until the variance has settled; then it is frozen, each rank moves its momentum by its own gradient, and it is
momenta that are exchanged, with error feedback. In the algorithm's terms, with b1 the optimizer's own:

    m' <- mean over the ranks of quantised(b1 m + (1 - b1) gradient);    gradient <- m + (m' - m) / (1 - b1)

The gradient that comes back is the one by which the user's Adam takes m' as its momentum: schedules, weight decay and
checkpoints are the optimizer's own. It has the quantiser's error in it, 1 / (1 - b1) times: its norm says little.

When not to use this: under any other optimizer; in runs that are hardly longer than `freeze_step`; where the variance
goes on changing, as after a second warm-up of the learning rate; where gradients are clipped by their norm after the mean.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from gradwire.codecs.one_bit import OneBit
from gradwire.codecs.qsgd import Qsgd
from gradwire.codecs.quantised import Quantised
from gradwire.codecs.two_bit import TwoBit
from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.exchange.parts import QUANTISED_CHUNK_ELEMENTS
from gradwire.schemes.frozen_adam import FrozenAdam
from gradwire.schemes.quantised import QuantisedDirect, check_steps, or_none
from gradwire.schemes.selection import ByName, Names, Selection

_CORRECTIONS = ("frozen", "running")
_CODECS = ("one-bit", "two-bit", "qsgd")


class OneBitAdam(QuantisedDirect):
    """See `QuantisedDirect` for what is not named here.

    Args:
        freeze_step: updates of a parameter, from its first gradient on, before its variance is frozen. A parameter that
            begins to train later travels plainly for so many updates of its own.
        codec: "one-bit", "two-bit" or "qsgd" (4 bits).
        correction: of the variance for its start at zero: "frozen" with it, so that the size of a step goes on as it was;
            "running", as Adam's own, by which steps grow to 1 / sqrt(1 - beta2^freeze_step) times theirs: what is
            published has no correction, and ends there.
        scale_values: values to a scale; None for one scale a message.
    """

    name = "one-bit-adam"
    needs_adam = True
    works_on_device = False
    settled_by = "freeze_step"

    def __init__(
        self,
        freeze_step: int = 50,
        codec: str = "one-bit",
        scale_values: int | None = 512,
        correction: str = "frozen",
        pull: str = "compressed",
        chunk_elements: int = QUANTISED_CHUNK_ELEMENTS,
        exempt: Names = (),
        only: Names = (),
    ) -> None:
        self.freeze_step = check_steps("freeze_step", freeze_step)
        if self.freeze_step < 1:
            raise InvalidArgument("freeze_step must be at least 1: a variance that has seen nothing cannot be frozen")
        if correction not in _CORRECTIONS:
            raise InvalidArgument(f"correction is one of {', '.join(_CORRECTIONS)}, not {correction!r}")
        self._codec_name, self.correction = codec, correction
        quantiser = _codec_of(codec, or_none(scale_values))
        super().__init__(quantiser, True, pull, chunk_elements, 0, ByName(exempt, only))
        self._adam: FrozenAdam | None = None

    @property
    def configuration(self) -> dict[str, Any]:
        return {
            **super().configuration,
            "codec": self._codec_name,
            "freeze_step": self.freeze_step,
            "correction": self.correction,
        }

    @property
    def settling_steps(self) -> int:
        """Steps that are reduced plainly, unless the optimizer has taken them before."""
        return self.freeze_step

    @property
    def is_settled(self) -> bool:
        """Whether a variance is frozen."""
        return self._adam is not None and bool(self._adam.frozen_at)

    def bind(self, session: Session) -> None:
        """As every scheme's. Raises: Unsupported (an optimizer that is no Adam, or with options it cannot do)."""
        if session.module is None:
            raise Unsupported("one-bit-adam works inside DDP; behind other doors take one-bit or two-bit")
        adam = FrozenAdam(session.optimizer, self.freeze_step, self.correction == "frozen")
        with contextlib.ExitStack() as undo:
            undo.callback(adam.close)
            super().bind(session)
            undo.pop_all()
        self._adam = adam

    def close(self) -> None:
        super().close()
        if self._adam is not None:
            self._adam.close()
            self._adam = None

    # ---- one bucket

    def _choose(self, bucket: Bucket) -> Selection:
        """Never as it lies: what is sent is not what lies in the bucket."""
        assert self._adam is not None
        # All are asked, because to ask is to count.
        frozen = {slot: self._adam.is_frozen(slot) for slot in bucket.slots}
        return Selection(bucket, lambda slot, n_bytes: slot is not None and frozen[slot] and self.select(slot, n_bytes))

    def _part_dtype(self, bucket: Bucket) -> torch.dtype:
        return torch.float32

    def _fill(self, fused: torch.Tensor, bucket: Bucket, chosen: Selection) -> None:
        assert self._adam is not None
        loss_scale = self.session.loss_scale()
        for slot, span in zip(chosen.slots, chosen.compressed, strict=True):
            momentum, beta1 = self._adam.momentum(slot)
            mine = span.in_fused(fused)
            torch.mul(momentum, loss_scale, out=mine)
            mine.lerp_(span.in_bucket(bucket.buffer).float(), 1 - beta1)

    def _take(self, fused: torch.Tensor, bucket: Bucket, chosen: Selection) -> None:
        assert self._adam is not None
        loss_scale = self.session.loss_scale()
        for slot, span in zip(chosen.slots, chosen.compressed, strict=True):
            momentum, beta1 = self._adam.momentum(slot)
            old, new = momentum.mul(loss_scale), span.in_fused(fused)
            span.in_bucket(bucket.buffer).copy_(new.sub_(old).div_(1 - beta1).add_(old))

    # ---- between steps

    def stats(self) -> dict[str, Any]:
        """Tensors whose variance is frozen, and buckets that were redone uncompressed."""
        return {**super().stats(), "n_frozen": len(self._adam.frozen_at) if self._adam is not None else 0}

    def state_dict(self) -> dict[str, Any]:
        assert self._adam is not None
        return {**super().state_dict(), **self._adam.state_by_name(self.session.slots)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: InvalidArgument."""
        assert self._adam is not None
        super().load_state_dict(state)
        self._adam.load_by_name(state, self.session.slots)


def _codec_of(name: str, scale_values: int | None) -> Quantised:
    if name == "one-bit":
        return OneBit(scale_values=scale_values)
    if name == "two-bit":
        return TwoBit(scale_values=scale_values)
    if name == "qsgd":
        return Qsgd()
    raise InvalidArgument(f"codec is one of {', '.join(_CODECS)}, not {name!r}")
