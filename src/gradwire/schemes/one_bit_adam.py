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

from collections.abc import Callable
from typing import Any

import torch

from gradwire.checks import choice as check_choice
from gradwire.codecs.quantised import OneBit, Qsgd, Quantised, TwoBit
from gradwire.core.bucket import Bucket
from gradwire.exchange.owners import Owners
from gradwire.exchange.parts import QUANTISED_CHUNK_ELEMENTS
from gradwire.schemes.compressed import Compressed
from gradwire.schemes.frozen_adam import FrozenAdam
from gradwire.schemes.selection import ByName, Names, Selection

_CODECS: dict[str, Callable[[Any], Quantised]] = {
    "one-bit": lambda values: OneBit(scale_values=values),
    "two-bit": lambda values: TwoBit(scale_values=values),
    "four-level": lambda values: TwoBit(scale_values=values, levels=4),
    "qsgd": lambda values: Qsgd(),
}


class OneBitAdam(Compressed):
    """Momenta through a quantiser. On a device they are where the optimizer keeps them, and both run there.

    Args:
        freeze_step, correction: see `FrozenAdam`.
        codec: "one-bit", "two-bit" (+t, 0, -t), "four-level" (two bits too; needs `scale_values`) or "qsgd" (4 bits,
            without error feedback).
        scale_values: values to a scale; None for one scale a message.
        pull, chunk_elements: see `Owners`.
        exempt, only: see `ByName`.
    """

    name = "one-bit-adam"
    needs_momenta = True
    options_of = ByName
    adam: FrozenAdam

    def __init__(
        self,
        freeze_step: int = 50,
        codec: str = "one-bit",
        scale_values: int | str | None = 64,
        correction: str = "frozen",
        pull: str = "compressed",
        chunk_elements: int = QUANTISED_CHUNK_ELEMENTS,
        **names: Names,
    ) -> None:
        self._codec_name = check_choice("codec", codec, _CODECS)
        self.codec = _CODECS[codec](None if scale_values == "none" else scale_values)
        super().__init__(
            collective=Owners(self.codec, pull, chunk_elements),
            error_feedback=self.codec.feeds_back,
            adam=FrozenAdam(self.name, freeze_step, correction),
            select=ByName(**{"exempt": (), **names}),
        )

    @property
    def configuration(self) -> dict[str, Any]:
        scales = {"scale_values": self.codec.scale_values} if self.codec.scale_values else {}
        return {"error_feedback": self.error_feedback, **self.frame_configuration, "codec": self._codec_name, **scales}

    def fill(self, part: Bucket, bucket: Bucket, chosen: Selection) -> None:
        loss_scale = self.session.loss_scale()
        for slot, span in zip(chosen.slots, chosen.compressed, strict=True):
            momentum, beta1 = self.adam.momentum(slot)
            mine = span.in_fused(part.buffer)
            torch.mul(momentum, loss_scale, out=mine)
            mine.lerp_(span.in_bucket(bucket.buffer).float(), 1 - beta1)

    def take(self, part: Bucket, bucket: Bucket, chosen: Selection) -> None:
        loss_scale = self.session.loss_scale()
        for slot, span in zip(chosen.slots, chosen.compressed, strict=True):
            momentum, beta1 = self.adam.momentum(slot)
            old, new = momentum.mul(loss_scale), span.in_fused(part.buffer)
            span.in_bucket(bucket.buffer).copy_(new.sub_(old).div_(1 - beta1).add_(old))
