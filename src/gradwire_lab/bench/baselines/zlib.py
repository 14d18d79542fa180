"""zlib at level 1, its fastest."""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

from gradwire_lab.bench.baselines import Baseline


class Zlib(Baseline):
    name = "zlib"
    setting = "level 1"

    def encode(self, array: npt.NDArray[np.float32]) -> bytes:
        return zlib.compress(array.data, level=1)

    def decode(self, message: bytes) -> npt.NDArray[np.float32]:
        return np.frombuffer(zlib.decompress(message), np.float32)
