"""Blosc2 with bit shuffle and zstd level 1: separates the planes of the exponent before it matches."""

from __future__ import annotations

import blosc2
import numpy as np
import numpy.typing as npt

from gradwire_lab.bench.baselines import Baseline


class Blosc2(Baseline):
    name = "blosc2"
    setting = "bitshuffle + zstd level 1"
    is_threaded = True

    def encode(self, array: npt.NDArray[np.float32]) -> bytes:
        return blosc2.compress2(
            array,
            typesize=array.itemsize,
            codec=blosc2.Codec.ZSTD,
            clevel=1,
            filters=[blosc2.Filter.BITSHUFFLE],
            nthreads=self.n_threads,
        )

    def decode(self, message: bytes) -> npt.NDArray[np.float32]:
        return np.frombuffer(blosc2.decompress2(message, nthreads=self.n_threads), np.float32)
