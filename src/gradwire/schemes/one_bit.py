"""The scheme `one-bit`: the sign of every value and a scale, with error feedback (Seide et al., Interspeech 2014).

When not to use this: where the network is not the bottleneck, with few steps (what one bit leaves out arrives late), or
under Adam where its loss has to be plain's: `one-bit-adam` is nearer.
"""

from __future__ import annotations

import functools
from typing import Any

from gradwire.codecs.one_bit import OneBit
from gradwire.exchange.parts import QUANTISED_CHUNK_ELEMENTS
from gradwire.schemes.few_bits import FewBits
from gradwire.schemes.selection import ByName, Names


class OneBitScheme(FewBits):
    """See `gradwire.codecs.one_bit.OneBit` for scale and threshold, `FewBits` and `QuantisedDirect` for the rest."""

    name = "one-bit"
    behind_plain = "0.08"

    def __init__(
        self,
        scale: str = "mean",
        threshold: float | None = None,
        error_feedback: bool = True,
        pull: str = "compressed",
        chunk_elements: int = QUANTISED_CHUNK_ELEMENTS,
        warmup_steps: int | None = None,
        scale_values: int | str | None = None,
        exempt: Names = (),
        only: Names = (),
    ) -> None:
        super().__init__(
            functools.partial(OneBit, scale, threshold), scale != "fixed", error_feedback, pull, chunk_elements,
            warmup_steps, scale_values, ByName(exempt, only),
        )  # fmt: skip
        codec = OneBit(scale, threshold)
        self._options = {"scale": codec.scale, "threshold": codec.threshold}

    @property
    def configuration(self) -> dict[str, Any]:
        return {**super().configuration, **self._options}
