"""ZipNN: Huffman over the bytes of the exponent, made for models and gradients (Hershcovitch et al., 2024)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import zipnn

from gradwire_lab.bench.baselines import Baseline


class ZipNN(Baseline):
    name = "zipnn"
    setting = "byte input, float32"
    is_threaded = True

    def __init__(self, n_threads: int = 1) -> None:
        super().__init__(n_threads)
        self._codec = zipnn.ZipNN(input_format="byte", bytearray_dtype="float32", threads=n_threads)

    def encode(self, array: npt.NDArray[np.float32]) -> bytes:
        # ZipNN reorders its input in place, so it gets a copy; any real user of it pays for that too.
        return self._codec.compress(array.tobytes())

    def decode(self, message: bytes) -> npt.NDArray[np.float32]:
        return np.frombuffer(self._codec.decompress(message), np.float32)
