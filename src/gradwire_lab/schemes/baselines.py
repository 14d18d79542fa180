"""The methods that GComp is measured against: all-reduce in some steps only, mantissas cut off, general compressors."""

from __future__ import annotations

from typing import Any

from gradwire import codecs
from gradwire.core.feedback import Part
from gradwire.errors import InvalidArgument
from gradwire.exchange.parts import CHUNK_ELEMENTS
from gradwire.exchange.ring import Ring
from gradwire.schemes.compressed import Compressed
from gradwire.wire.wire import Wire


class Periodic(Compressed):
    """Mean over the ranks in every `every`-th step, this rank's own gradient in the others: GComp's Fig. 18.

    When not to use this: for training. Replicas drift apart by definition: the one scheme whose ranks do not agree.
    """

    name = "periodic"
    replicas_may_differ = True
    works_on_device = False

    def __init__(self, every: int = 8) -> None:
        if every < 1:
            raise InvalidArgument(f"every must be at least 1, got {every}")
        super().__init__(collective=Ring(codecs.by_name("raw")))
        self.every = every

    @property
    def configuration(self) -> dict[str, Any]:
        return {**self.frame_configuration, "every": self.every}

    def step(self, part: Part, wire: Wire) -> None:
        if part.bucket.step % self.every == self.every - 1:
            super().step(part, wire)


class TruncateRing(Compressed):
    """The `bits` lowest mantissa bits always cut off (18 by default), in a ring: the quantisation of GComp's Fig. 18.

    When not to use this: for training; it is the comparator that GComp's levels are measured against.
    """

    name = "truncate"
    works_on_device = False

    def __init__(self, topology: str = "ring", chunk_elements: int = CHUNK_ELEMENTS, **codec: Any) -> None:
        super().__init__(collective=Ring(codecs.by_name(self.name, **codec), topology, chunk_elements))
        self._codec_options = codec

    @property
    def configuration(self) -> dict[str, Any]:
        return {**self.frame_configuration, **self._codec_options}


class ZlibRing(TruncateRing):
    """Lossless: zlib on the bytes (`level`, 1 by default), in a ring.

    When not to use this: wherever zstd is to be had.
    """

    name = "zlib"


class ZstdRing(TruncateRing):
    """Lossless: zstd on the bytes (`level`, 1 by default), in a ring.

    When not to use this: on any network faster than about 0.3 Gb/s a core; it gains 7 % and takes longer than it saves.
    """

    name = "zstd"
