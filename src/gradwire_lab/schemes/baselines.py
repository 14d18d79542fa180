"""The methods that GComp is measured against: all-reduce in some steps only, mantissas cut off, general compressors."""

import threading
import zlib
from typing import Any

import numpy as np

from gradwire import codecs
from gradwire.checks import count as check_count
from gradwire.codecs.gcomp import GCompCodec, HuffmanTable
from gradwire.codecs.general import RawCodec
from gradwire.core.feedback import Part
from gradwire.errors import CorruptMessage, InvalidArgument, needs_extra
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
    shared = ("every",)

    def __init__(self, every: int = 8) -> None:
        super().__init__(collective=Ring(codecs.by_name("raw")))
        self.every = check_count("every", every)

    def step(self, part: Part, wire: Wire) -> None:
        if part.bucket.step % self.every == self.every - 1:
            super().step(part, wire)


class CodecRing(Compressed):
    """Mean over the ranks through the codec of this name and options, in a ring."""

    works_on_device = False

    def __init__(
        self, name: str, codec: dict[str, Any], /, topology: str = "ring", chunk_elements: int = CHUNK_ELEMENTS
    ) -> None:
        self.name = name
        super().__init__(collective=Ring(codecs.by_name(name, **codec), topology, chunk_elements))
        self._codec_options = codec

    @property
    def configuration(self) -> dict[str, Any]:
        return {**self.frame_configuration, **self._codec_options}


def truncate_ring(topology: str = "ring", chunk_elements: int = CHUNK_ELEMENTS, **codec: Any) -> CodecRing:
    """The `bits` lowest mantissa bits always cut off (18 by default), in a ring: the quantisation of GComp's Fig. 18.
    When not to use this: for training; it is the comparator that GComp's levels are measured against."""
    return CodecRing("truncate", codec, topology, chunk_elements)


def zlib_ring(topology: str = "ring", chunk_elements: int = CHUNK_ELEMENTS, **codec: Any) -> CodecRing:
    """Lossless: zlib on the bytes (`level`, 1 by default), in a ring. When not to use this: wherever zstd is to be had."""
    return CodecRing("zlib", codec, topology, chunk_elements)


def zstd_ring(topology: str = "ring", chunk_elements: int = CHUNK_ELEMENTS, **codec: Any) -> CodecRing:
    """Lossless: zstd on the bytes (`level`, 1 by default), in a ring. When not to use this: on any network faster than
    about 0.3 Gb/s a core; it gains 7 % and takes longer than it saves."""
    return CodecRing("zstd", codec, topology, chunk_elements)


class Truncate(GCompCodec):
    """GComp's message with the `bits` lowest mantissa bits always cut off: the comparator of the paper's Fig. 18."""

    name = "truncate"

    def __init__(self, bits: int = 18, table: HuffmanTable | None = None, format: int = 2) -> None:
        """See `GCompCodec`. Raises: InvalidArgument."""
        super().__init__(importance="truncate", bits=bits, table=table, format=format)


class ZlibCodec(RawCodec):
    """zlib (DEFLATE). The bytes depend on the zlib that Python was built with; every zlib reads them.

    When not to use this: to save time; it compresses gradients by 7 % at 0.03 GB/s (level 1).
    Args: level: 1 (fast) to 9. Raises: InvalidArgument.
    """

    name = "zlib"
    _method = 1

    def __init__(self, level: int = 1) -> None:
        if not 1 <= level <= 9:
            raise InvalidArgument(f"zlib: level must be 1 to 9, got {level}")
        self._level = level

    def _compress(self, values: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes | None:
        return zlib.compress(values.data, self._level)

    def _decompress(self, payload: np.ndarray[Any, np.dtype[np.uint8]], n_bytes: int) -> bytes:
        stream = zlib.decompressobj()
        try:
            content = stream.decompress(payload.data, n_bytes + 1)  # one more: a longer content must not pass unseen
        except zlib.error as error:
            raise CorruptMessage(f"zlib: {error}") from error
        if not stream.eof or stream.unused_data or stream.unconsumed_tail:
            raise CorruptMessage("zlib: the stream does not end with the payload")
        return content


class ZstdCodec(RawCodec):
    """Zstandard. The bytes depend on the version of the zstandard package; every version reads them.

    When not to use this: on networks faster than some 1 Gb/s; it compresses gradients by 7 % at 0.4 GB/s (level 1).
    Args: level: -7 (fast) to 22, not 0. Raises: InvalidArgument, Unsupported (package not installed).
    """

    name = "zstd"
    _method = 2

    def __init__(self, level: int = 1) -> None:
        if not -7 <= level <= 22 or level == 0:
            raise InvalidArgument(f"zstd: level must be -7 to 22 and not 0, got {level}")
        try:
            import zstandard
        except ImportError as error:
            raise needs_extra("codec zstd needs the package zstandard, zlib works without", "bench") from error
        self._zstandard = zstandard
        self._level = level
        self._contexts = threading.local()  # a context serves one call at a time, and costs more than a small message

    def _compress(self, values: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes | None:
        if not hasattr(self._contexts, "compressor"):
            self._contexts.compressor = self._zstandard.ZstdCompressor(level=self._level)
        compressed: bytes = self._contexts.compressor.compress(values.data)
        return compressed

    def _decompress(self, payload: np.ndarray[Any, np.dtype[np.uint8]], n_bytes: int) -> bytes:
        if not hasattr(self._contexts, "decompressor"):
            self._contexts.decompressor = self._zstandard.ZstdDecompressor()
        try:
            # The frame says how much it holds, and that much would be allocated: checked first.
            held = self._zstandard.get_frame_parameters(payload.data).content_size
            if held != n_bytes:
                raise CorruptMessage(f"zstd: a frame of {held} bytes, expected {n_bytes}")
            content: bytes = self._contexts.decompressor.decompress(payload.data, allow_extra_data=False)
        except self._zstandard.ZstdError as error:
            raise CorruptMessage(f"zstd: {error}") from error
        return content
