"""The scheme `two-bit`: +t, 0 or -t for every value, with error feedback: the 2-bit quantiser that SlimGC improves.

When not to use this: where the network is not the bottleneck; with an absolute threshold that has not been fitted to the
gradient's scale, which sends nothing for many steps or noise in all of them.
"""

from __future__ import annotations

from typing import Any

from gradwire.codecs.two_bit import TwoBit
from gradwire.exchange.parts import QUANTISED_CHUNK_ELEMENTS
from gradwire.schemes.quantised import QuantisedDirect, or_none
from gradwire.schemes.selection import ByName, Names


class TwoBitScheme(QuantisedDirect):
    """See `gradwire.codecs.two_bit.TwoBit` for threshold and relative, `QuantisedDirect` for the rest."""

    name = "two-bit"
    loses_under_adam = "0.24 nats higher"

    def __init__(
        self,
        threshold: float | None = None,
        relative: bool = True,
        error_feedback: bool = True,
        pull: str = "compressed",
        chunk_elements: int = QUANTISED_CHUNK_ELEMENTS,
        warmup_steps: int = 0,
        scale_values: int | None = None,
        exempt: Names = (),
        only: Names = (),
    ) -> None:
        codec = TwoBit(threshold, relative, or_none(scale_values))
        super().__init__(codec, error_feedback, pull, chunk_elements, warmup_steps, ByName(exempt, only))
        self._options = {"threshold": codec.threshold, "relative": codec.relative}

    @property
    def configuration(self) -> dict[str, Any]:
        return {**super().configuration, **self._options}
