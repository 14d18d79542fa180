"""The scheme `qsgd`: values rounded by chance to a few levels of their block's norm (Alistarh et al., NeurIPS 2017).

Right on average, so without error feedback, as published: its errors may be larger than the gradient, and fed back they
would grow. Sums are rounded a second time on their way back.

When not to use this: at 4 bits where one-bit or two-bit with error feedback converges, which send less; with few levels
and large blocks, whose variance is that of the norm.
"""

from __future__ import annotations

from typing import Any

from gradwire.codecs.qsgd import Qsgd
from gradwire.exchange.parts import QUANTISED_CHUNK_ELEMENTS
from gradwire.schemes.quantised import QuantisedDirect


class QsgdScheme(QuantisedDirect):
    """See `gradwire.codecs.qsgd.Qsgd` for levels, block and seed, `QuantisedDirect` for the rest."""

    name = "qsgd"

    def __init__(
        self,
        levels: int = 7,
        block: int = 512,
        seed: int = 0,
        pull: str = "compressed",
        chunk_elements: int = QUANTISED_CHUNK_ELEMENTS,
    ) -> None:
        super().__init__(Qsgd(levels, block, seed), False, pull, chunk_elements)
        self._options = {"levels": levels, "block": block, "seed": seed}

    @property
    def configuration(self) -> dict[str, Any]:
        return {**super().configuration, **self._options}
