"""pcodec at level 1: a numeric codec that models columns of numbers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from pcodec import ChunkConfig, standalone

from gradwire_lab.bench.baselines import Baseline


class Pcodec(Baseline):
    name = "pcodec"
    setting = "level 1"

    def encode(self, array: npt.NDArray[np.float32]) -> bytes:
        return standalone.simple_compress(array, ChunkConfig(compression_level=1))

    def decode(self, message: bytes) -> npt.NDArray[np.float32]:
        return np.asarray(standalone.simple_decompress(message), np.float32)
