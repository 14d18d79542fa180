"""The scheme `two-bit`: +t, 0 or -t for every value, with error feedback: the 2-bit quantiser that SlimGC improves.

When not to use this: where the network is not the bottleneck; with an absolute threshold that has not been fitted to the
gradient's scale, which sends nothing for many steps or noise in all of them.
"""

from __future__ import annotations

import functools
from typing import Any

from gradwire.codecs.two_bit import TwoBit
from gradwire.exchange.parts import QUANTISED_CHUNK_ELEMENTS
from gradwire.schemes.few_bits import FewBits
from gradwire.schemes.selection import ByName, Names


class TwoBitScheme(FewBits):
    """See `gradwire.codecs.two_bit.TwoBit` for threshold and relative, `FewBits` and `QuantisedDirect` for the rest."""

    name = "two-bit"
    behind_plain = "0.12"

    def __init__(
        self,
        threshold: float | None = None,
        relative: bool = True,
        error_feedback: bool = True,
        pull: str = "compressed",
        chunk_elements: int = QUANTISED_CHUNK_ELEMENTS,
        warmup_steps: int | None = None,
        scale_values: int | str | None = None,
        exempt: Names = (),
        only: Names = (),
    ) -> None:
        super().__init__(
            functools.partial(TwoBit, threshold, relative), relative, error_feedback, pull, chunk_elements,
            warmup_steps, scale_values, ByName(exempt, only),
        )  # fmt: skip
        codec = TwoBit(threshold, relative)
        self._options = {"threshold": codec.threshold, "relative": codec.relative}

    @property
    def configuration(self) -> dict[str, Any]:
        return {**super().configuration, **self._options}
