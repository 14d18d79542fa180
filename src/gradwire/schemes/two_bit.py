"""The scheme `two-bit`: +t, 0 or -t for every value, with error feedback: the 2-bit quantiser that SlimGC improves.

Beside Adam, where scales are by group, four levels instead of three: docs/results/lossy.md.

When not to use this: where the network is not the bottleneck; with an absolute threshold that has not been fitted to the
gradient's scale, which sends nothing for many steps or noise in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from gradwire.codecs.two_bit import TwoBit
from gradwire.errors import InvalidArgument
from gradwire.exchange.parts import QUANTISED_CHUNK_ELEMENTS
from gradwire.schemes.few_bits import FewBits
from gradwire.schemes.selection import ByName, Names


class TwoBitScheme(FewBits):
    """See `gradwire.codecs.two_bit.TwoBit` for threshold and relative, `FewBits` and `QuantisedDirect` for the rest.

    Args:
        levels: 3, or 4 (with `scale_values` only, and without a threshold). None: 4 where `scale_values` is left out and
            becomes a number beside Adam, else 3.
        exempt, only: see `ByName`.
    """

    name = "two-bit"
    published: ClassVar[Mapping[str, Any]] = MappingProxyType({**FewBits.published, "levels": 3})
    behind_plain = "0.03"
    options_of = ByName

    def __init__(
        self,
        threshold: float | None = None,
        relative: bool = True,
        error_feedback: bool = True,
        pull: str = "compressed",
        chunk_elements: int = QUANTISED_CHUNK_ELEMENTS,
        warmup_steps: int | None = None,
        scale_values: int | str | None = None,
        levels: int | None = None,
        **names: Names,
    ) -> None:
        if levels not in (None, 3, 4):
            raise InvalidArgument(f"levels is 3 or 4, not {levels!r}")
        levels_in_groups = levels or (4 if scale_values is None and threshold is None else 3)
        if levels == 4 and not isinstance(scale_values, int):
            raise InvalidArgument("levels=4 is for scales by group: give scale_values=64 too")

        def make_codec(group: int | None) -> TwoBit:
            return TwoBit(threshold, relative, group, 3 if group is None else levels_in_groups)

        super().__init__(
            make_codec, relative, error_feedback, pull, chunk_elements, warmup_steps, scale_values, ByName(**names)
        )
        codec = TwoBit(threshold, relative)
        self._options = {"threshold": codec.threshold, "relative": codec.relative}

    @property
    def configuration(self) -> dict[str, Any]:
        assert isinstance(self.codec, TwoBit)
        return {**super().configuration, **self._options} | ({"levels": 4} if self.codec.levels == 4 else {})
