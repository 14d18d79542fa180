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

from typing import Any

import torch

from gradwire.codecs.one_bit import OneBit
from gradwire.codecs.qsgd import Qsgd
from gradwire.codecs.quantised import Quantised
from gradwire.codecs.two_bit import TwoBit
from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.core.site import DeviceSite
from gradwire.errors import InvalidArgument
from gradwire.exchange.parts import QUANTISED_CHUNK_ELEMENTS
from gradwire.schemes.behind_adam import BehindAdam
from gradwire.schemes.few_bits import ADAM_SCALE_VALUES
from gradwire.schemes.on_device import QuantisedOnDevice
from gradwire.schemes.quantised import or_none, owners_of
from gradwire.schemes.selection import Names, Selection

_CODECS = ("one-bit", "two-bit", "four-level", "qsgd")


class OneBitAdam(BehindAdam):
    """See `BehindAdam` and `QuantisedDirect` for what is not named here.

    Args:
        codec: "one-bit", "two-bit" (+t, 0, -t), "four-level" (two bits too; needs `scale_values`) or "qsgd" (4 bits).
        scale_values: values to a scale; None for one scale a message.
    """

    name = "one-bit-adam"
    instead = "one-bit or two-bit"

    def __init__(
        self,
        freeze_step: int = 50,
        codec: str = "one-bit",
        scale_values: int | None = ADAM_SCALE_VALUES,
        correction: str = "frozen",
        pull: str = "compressed",
        chunk_elements: int = QUANTISED_CHUNK_ELEMENTS,
        exempt: Names = (),
        only: Names = (),
    ) -> None:
        quantiser = _codec_of(codec, or_none(scale_values))
        super().__init__(quantiser, owners_of(pull, chunk_elements), freeze_step, correction, exempt, only)
        shared = {"codec": codec, "pull": pull, "chunk_elements": chunk_elements}
        self._options = shared | ({"scale_values": quantiser.scale_values} if quantiser.scale_values else {})
        self.codec, self.pull, self.chunk_elements = quantiser, pull, chunk_elements

    @property
    def configuration(self) -> dict[str, Any]:
        return super().configuration | self._options

    # ---- one bucket

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

    # ---- on a device

    def _go_to(self, site: DeviceSite, session: Session) -> QuantisedOnDevice:
        """Raises: Unsupported (what needs the host)."""
        return _MomentaOnDevice(self, session, site)


class _MomentaOnDevice(QuantisedOnDevice):
    """Its steps on a device: what is sent of a tensor is its momentum, once its variance is frozen."""

    def __init__(self, scheme: OneBitAdam, session: Session, site: DeviceSite) -> None:
        super().__init__(
            session, site, scheme.codec, scheme.error_feedback, scheme.chunk_elements, scheme.pull == "raw"
        )
        self._choose, self.apart = scheme._choose, scheme

    def _enqueue(self, bucket: Bucket, *facts: Any) -> None:
        """What is frozen is asked on the lane, which may have to wait for the step before."""
        self._compress_apart(bucket, self._choose(bucket))


def _codec_of(name: str, scale_values: int | None) -> Quantised:
    if name == "one-bit":
        return OneBit(scale_values=scale_values)
    if name == "two-bit":
        return TwoBit(scale_values=scale_values)
    if name == "four-level":
        return TwoBit(scale_values=scale_values, levels=4)
    if name == "qsgd":
        return Qsgd()
    raise InvalidArgument(f"codec is one of {', '.join(_CODECS)}, not {name!r}")
