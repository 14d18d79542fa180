"""The schemes `embedded-float` and `truncated-float`: few bits of every value, in a ring or between all pairs.

With both, NaN and Inf travel: the values that share a scale with one become NaN on all ranks.
"""

from typing import Any

from gradwire.codecs.embedded_float import EmbeddedFloat
from gradwire.codecs.truncated_float import TruncatedFloat
from gradwire.exchange.parts import CHUNK_ELEMENTS
from gradwire.exchange.ring import Ring
from gradwire.schemes.compressed import Compressed
from gradwire.schemes.selection import ByName, Names


class _Floats(Compressed):
    """A mean round a ring, or between all pairs, through a codec of floats: the class `options_of`."""

    options_of: type[EmbeddedFloat | TruncatedFloat] = EmbeddedFloat

    def __init__(
        self,
        topology: str = "ring",
        chunk_elements: int = CHUNK_ELEMENTS,
        exempt: Names = None,
        only: Names = (),
        **codec: Any,
    ) -> None:
        ring = Ring(self.options_of(**codec), topology, chunk_elements)
        super().__init__(collective=ring, select=ByName(exempt, only))
        self._codec_options = codec

    @property
    def configuration(self) -> dict[str, Any]:
        return {**self.frame_configuration, **self._codec_options}


class EmbeddedFloatScheme(_Floats):
    """`bits` bits (8 by default) of every value, with an exponent shared by a `partition` (256 values).

    Args:
        topology, chunk_elements: see `Ring`. exempt, only: see `ByName`.
        **codec: the options of `EmbeddedFloat`.

    When not to use this: beside AQGB, which sends the same bits and more where there is time; below 4 bits, where small
    values of a partition vanish and no error feedback brings them back; with few bits in a ring of many ranks, where what
    is lost adds up (topology "direct" rounds twice).
    """

    name = "embedded-float"
    options_of = EmbeddedFloat


class TruncatedFloatScheme(_Floats):
    """The first `bits` bits (8 by default) of every value, of `format` "auto", "native", "fp16", "fp8-e4m3", "fp8-e5m2",
    "fp6-e3m2" or "fp4-e2m1", with `rounding` "nearest", "truncate" (as published) or "stochastic" (`seed`): AQGB's TFP in an
    ordered all-reduce.

    Every hop rounds its partial sum anew; the sums' order is fixed by part and world size. Stochastic rounding draws
    from a stream of its own for every message of every rank, bucket and step.

    Args:
        topology, chunk_elements: see `Ring`. exempt, only: see `ByName`.
        **codec: the options of `TruncatedFloat`.

    When not to use this: with "truncate" at few bits and many ranks, where N roundings towards zero add up: "stochastic",
    or topology "direct", which rounds twice.
    """

    name = "truncated-float"
    options_of = TruncatedFloat
