"""Zstandard at level 1, what `zstd -1` runs: the reference of the tables."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import zstandard

from gradwire_lab.bench.baselines import Baseline


class Zstd(Baseline):
    name = "zstd"
    setting = "level 1"
    is_threaded = True

    def __init__(self, n_threads: int = 1) -> None:
        super().__init__(n_threads)
        # 0 compresses on the calling thread; 1 would start a worker and only add its hand-over.
        self._compressor = zstandard.ZstdCompressor(level=1, threads=n_threads if n_threads > 1 else 0)
        self._decompressor = zstandard.ZstdDecompressor()

    def encode(self, array: npt.NDArray[np.float32]) -> bytes:
        return self._compressor.compress(array.data)

    def decode(self, message: bytes) -> npt.NDArray[np.float32]:
        return np.frombuffer(self._decompressor.decompress(message), np.float32)
