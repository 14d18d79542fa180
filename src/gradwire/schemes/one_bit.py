"""The scheme `one-bit`: the sign of every value and a scale, with error feedback (Seide et al., Interspeech 2014).

When not to use this: where the network is not the bottleneck, with few steps (what one bit leaves out arrives late), or
under Adam's first hundred steps, whose second moments then see the quantiser's noise: train those plainly and `switch`.
"""

from __future__ import annotations

from typing import Any

from gradwire.codecs.one_bit import OneBit
from gradwire.exchange.parts import QUANTISED_CHUNK_ELEMENTS
from gradwire.schemes.quantised import QuantisedDirect, or_none
from gradwire.schemes.selection import ByName, Names


class OneBitScheme(QuantisedDirect):
    """See `gradwire.codecs.one_bit.OneBit` for scale and threshold, `QuantisedDirect` for the rest."""

    name = "one-bit"
    loses_under_adam = "0.42 nats higher"

    def __init__(
        self,
        scale: str = "mean",
        threshold: float | None = None,
        error_feedback: bool = True,
        pull: str = "compressed",
        chunk_elements: int = QUANTISED_CHUNK_ELEMENTS,
        warmup_steps: int = 0,
        scale_values: int | None = None,
        exempt: Names = (),
        only: Names = (),
    ) -> None:
        codec = OneBit(scale, threshold, or_none(scale_values))
        super().__init__(codec, error_feedback, pull, chunk_elements, warmup_steps, ByName(exempt, only))
        self._options = {"scale": codec.scale, "threshold": codec.threshold}

    @property
    def configuration(self) -> dict[str, Any]:
        return {**super().configuration, **self._options}
