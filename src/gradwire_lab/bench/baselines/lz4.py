"""LZ4, frame format, default (fast) level: a byte matcher, which finds little in mantissas."""

from __future__ import annotations

import lz4.frame
import numpy as np
import numpy.typing as npt

from gradwire_lab.bench.baselines import Baseline


class Lz4(Baseline):
    name = "lz4"
    setting = "frame, level 0"

    def encode(self, array: npt.NDArray[np.float32]) -> bytes:
        return lz4.frame.compress(array.data, compression_level=0)

    def decode(self, message: bytes) -> npt.NDArray[np.float32]:
        return np.frombuffer(lz4.frame.decompress(message), np.float32)
