"""General and numeric compressors that gradwire's codecs are measured against: one function each, one interface.

Each has the setting that its authors recommend where speed matters, and keeps what a real user would keep between calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradwire.errors import InvalidArgument, Unsupported

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Baseline:
    """A compressor of float arrays.

    Attributes:
        encode: one message that holds an array (n,) float32, which stays as it is. decode: the array; may be read-only.
        is_threaded: whether `n_threads` above 1 changes anything.
    """

    setting: str
    encode: Callable[[Floats], bytes]
    decode: Callable[[bytes], Floats]
    is_threaded: bool = False


def _zstd(n_threads: int) -> Baseline:
    """What `zstd -1` runs: the reference of the tables."""
    import zstandard

    # 0 compresses on the calling thread; 1 would start a worker and only add its hand-over.
    compressor = zstandard.ZstdCompressor(level=1, threads=n_threads if n_threads > 1 else 0)
    decompressor = zstandard.ZstdDecompressor()
    return Baseline("level 1", lambda array: compressor.compress(array.data), _floats(decompressor.decompress), True)


def _zlib(n_threads: int) -> Baseline:
    import zlib

    return Baseline("level 1", lambda array: zlib.compress(array.data, level=1), _floats(zlib.decompress))


def _lz4(n_threads: int) -> Baseline:
    """A byte matcher, which finds little in mantissas."""
    import lz4.frame as lz4

    return Baseline(
        "frame, level 0", lambda array: lz4.compress(array.data, compression_level=0), _floats(lz4.decompress)
    )


def _blosc2(n_threads: int) -> Baseline:
    """Separates the planes of the exponent before it matches."""
    import blosc2

    options = {"codec": blosc2.Codec.ZSTD, "clevel": 1, "filters": [blosc2.Filter.BITSHUFFLE], "nthreads": n_threads}
    return Baseline(
        "bitshuffle + zstd level 1",
        lambda array: blosc2.compress2(array, typesize=array.itemsize, **options),
        _floats(lambda message: blosc2.decompress2(message, nthreads=n_threads)),
        True,
    )


def _zipnn(n_threads: int) -> Baseline:
    """Huffman over the bytes of the exponent, made for models and gradients (Hershcovitch et al., 2024)."""
    import zipnn

    codec = zipnn.ZipNN(input_format="byte", bytearray_dtype="float32", threads=n_threads)
    # ZipNN reorders its input in place, so it gets a copy; any real user of it pays for that too.
    return Baseline(
        "byte input, float32", lambda array: codec.compress(array.tobytes()), _floats(codec.decompress), True
    )


def _pcodec(n_threads: int) -> Baseline:
    """A numeric codec that models columns of numbers."""
    from pcodec import ChunkConfig, standalone

    return Baseline(
        "level 1",
        lambda array: standalone.simple_compress(array, ChunkConfig(compression_level=1)),
        lambda message: np.asarray(standalone.simple_decompress(message), np.float32),
    )


def _floats(decompress: Callable[[bytes], bytes]) -> Callable[[bytes], Floats]:
    return lambda message: np.frombuffer(decompress(message), np.float32)


# A new baseline is one function and one entry here. The first is the reference of every table.
_REGISTRY = {"zstd": _zstd, "zlib": _zlib, "lz4": _lz4, "blosc2": _blosc2, "zipnn": _zipnn, "pcodec": _pcodec}


def names() -> list[str]:
    """The baselines in the order of the tables."""
    return list(_REGISTRY)


def by_name(name: str, n_threads: int = 1) -> Baseline:
    """A new baseline. Raises: InvalidArgument (unknown name), Unsupported (its package is not installed)."""
    if name not in _REGISTRY:
        raise InvalidArgument(f"no baseline is called {name!r}; there are: {', '.join(names())}")
    try:
        return _REGISTRY[name](n_threads)
    except ImportError as error:
        raise Unsupported(f"baseline {name!r}: {error}; pip install 'gradwire[bench]'") from error
