"""Schemes that are a codec in a ring (or between all pairs): embedded and truncated floats, and the methods beside GComp."""

from __future__ import annotations

from typing import Any, ClassVar

from gradwire import codecs
from gradwire.core.feedback import Part
from gradwire.core.session import Session
from gradwire.exchange.parts import CHUNK_ELEMENTS
from gradwire.exchange.ring import Ring
from gradwire.schemes.compressed import Compressed
from gradwire.wire.wire import Wire


class ThroughCodec(Compressed):
    """Mean over the ranks in which every message goes through the codec of the scheme's name. NaN and Inf travel.

    Args:
        topology, chunk_elements: see `Ring`.
        **codec_options: of the codec.
    """

    def __init__(self, topology: str = "ring", chunk_elements: int = CHUNK_ELEMENTS, **codec_options: Any) -> None:
        super().__init__()
        self._ring = Ring(codecs.by_name(self.name, **codec_options), topology, chunk_elements)
        self._codec_options = codec_options

    @property
    def configuration(self) -> dict[str, Any]:
        return {**self._ring.configuration, **self._codec_options}

    def bind(self, session: Session) -> None:
        """Raises: Unsupported (no kernels on the device, or none for the codec's options)."""
        super().bind(session)
        self._ring.bind(session.wire)

    def step(self, part: Part, wire: Wire) -> None:
        self._ring.mean(part.bucket, wire)

    def stats(self) -> dict[str, Any]:
        return {}


class TruncateScheme(ThroughCodec):
    """The `bits` lowest mantissa bits always cut off (18 by default): the quantisation of GComp's Fig. 18.

    When not to use this: for training; it is the comparator that GComp's levels are measured against.
    """

    name: ClassVar[str] = "truncate"


class EmbeddedFloatScheme(ThroughCodec):
    """`bits` bits (8 by default) of every value, with an exponent shared by a `partition` (256 values).

    When not to use this: beside AQGB, which sends the same bits and more where there is time; below 5 bits, where small
    values of a partition vanish and no error feedback brings them back.
    """

    name: ClassVar[str] = "embedded-float"


class TruncatedFloatScheme(ThroughCodec):
    """The first `bits` bits (8 by default) of every value, of `format` "auto", "native", "fp16", "fp8-e4m3", "fp8-e5m2",
    "fp6-e3m2" or "fp4-e2m1", with `rounding` "nearest", "truncate" (as published) or "stochastic" (`seed`): AQGB's TFP in an
    ordered all-reduce.

    Every hop rounds its partial sum anew; the sums' order is fixed by part and world size. Stochastic rounding draws
    from a stream of its own for every message of every rank, bucket and step.

    When not to use this: with "truncate" at few bits and many ranks, where N roundings towards zero add up: "stochastic",
    or topology "direct", which rounds twice.
    """

    name: ClassVar[str] = "truncated-float"


class ZstdScheme(ThroughCodec):
    """Lossless: zstd on the bytes (`level`, 1 by default).

    When not to use this: on any network faster than about 0.3 Gb/s a core; it gains 7 % and takes longer than it saves.
    """

    name: ClassVar[str] = "zstd"
    works_on_device = False


class ZlibScheme(ThroughCodec):
    """Lossless: zlib on the bytes (`level`, 1 by default).

    When not to use this: wherever zstd is to be had.
    """

    name: ClassVar[str] = "zlib"
    works_on_device = False
