"""General and numeric compressors that gradwire's codecs are measured against: one function each, one interface.

Each has the setting that its authors recommend where speed matters, and keeps what a real user would keep between calls.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire.errors import InvalidArgument, Unsupported

Floats = npt.NDArray[np.float32]
# Array to message, and message to what holds the array's bytes.
Both = tuple[Callable[[Floats], bytes], Callable[[bytes], Any]]


@dataclass(frozen=True)
class Baseline:
    """A compressor of float arrays.

    Attributes:
        encode: one message that holds an array (n,) float32, which stays as it is. decode: the array; may be read-only.
        is_threaded: whether `n_threads` above 1 changes anything.
    """

    setting: str
    is_threaded: bool
    encode: Callable[[Floats], bytes]
    decode: Callable[[bytes], Floats]


def _zstd(n_threads: int) -> Both:
    import zstandard

    # 0 compresses on the calling thread; 1 would start a worker and only add its hand-over.
    compressor = zstandard.ZstdCompressor(level=1, threads=n_threads if n_threads > 1 else 0)
    return lambda array: compressor.compress(array.data), zstandard.ZstdDecompressor().decompress


def _lz4(n_threads: int) -> Both:
    import lz4.frame as lz4

    return lambda array: lz4.compress(array.data, compression_level=0), lz4.decompress


def _blosc2(n_threads: int) -> Both:
    """Separates the planes of the exponent before it matches."""
    import blosc2

    options = {"codec": blosc2.Codec.ZSTD, "clevel": 1, "filters": [blosc2.Filter.BITSHUFFLE], "nthreads": n_threads}
    return (
        lambda array: blosc2.compress2(array, typesize=array.itemsize, **options),
        lambda message: blosc2.decompress2(message, nthreads=n_threads),
    )


def _zipnn(n_threads: int) -> Both:
    """Huffman over the bytes of the exponent, made for models and gradients (Hershcovitch et al., 2024)."""
    import zipnn

    codec = zipnn.ZipNN(input_format="byte", bytearray_dtype="float32", threads=n_threads)
    # ZipNN reorders its input in place, so it gets a copy; any real user of it pays for that too.
    return lambda array: codec.compress(array.tobytes()), codec.decompress


def _pcodec(n_threads: int) -> Both:
    """A numeric codec that models columns of numbers."""
    from pcodec import ChunkConfig, standalone

    return lambda array: standalone.simple_compress(
        array, ChunkConfig(compression_level=1)
    ), standalone.simple_decompress


# name: (setting, whether threads change anything, what makes it). The first is the reference of every table: `zstd -1`.
_REGISTRY: dict[str, tuple[str, bool, Callable[[int], Both]]] = {
    "zstd": ("level 1", True, _zstd),
    "zlib": ("level 1", False, lambda n_threads: (lambda array: zlib.compress(array.data, level=1), zlib.decompress)),
    "lz4": ("frame, level 0", False, _lz4),
    "blosc2": ("bitshuffle + zstd level 1", True, _blosc2),
    "zipnn": ("byte input, float32", True, _zipnn),
    "pcodec": ("level 1", False, _pcodec),
}


def names() -> list[str]:
    """The baselines in the order of the tables."""
    return list(_REGISTRY)


def by_name(name: str, n_threads: int = 1) -> Baseline:
    """A new baseline. Raises: InvalidArgument (unknown name), Unsupported (its package is not installed)."""
    if name not in _REGISTRY:
        raise InvalidArgument(f"no baseline is called {name!r}; there are: {', '.join(names())}")
    setting, is_threaded, make = _REGISTRY[name]
    try:
        encode, decode = make(n_threads)
    except ImportError as error:
        raise Unsupported(f"baseline {name!r}: {error}; pip install 'gradwire[bench]'") from error
    return Baseline(setting, is_threaded, encode, lambda message: np.frombuffer(decode(message), np.float32))
