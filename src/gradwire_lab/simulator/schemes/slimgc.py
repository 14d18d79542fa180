"""SlimGC: compression only of what is large enough, by gradwire's own threshold (gradwire.schemes.slimgc.threshold).

The live scheme measures its table in its first steps; here the same table is filled with what the same sizes take on the
simulated links, by the measured sizes and codec times of the compressed exchange.
"""

from __future__ import annotations

from gradwire.schemes.auto.costs import BucketLoad, CodecCost
from gradwire.schemes.slimgc.threshold import SizeTimes, ThresholdTable, check_threshold
from gradwire_lab.simulator.schemes.collective import Collective
from gradwire_lab.simulator.simulation import Simulation

_VALUE_BYTES = 4
# Sizes of the table: 4 KB to 256 MB, the span of tensors and of blocks of them.
_TABLE_BYTES = tuple(1 << power for power in range(12, 29, 2))


class SlimGc(Collective):
    """Blocks from the threshold on are compressed, the others sent as they are; owners sum and answer.

    Args:
        compressed: what the compressed exchange takes.
        threshold_bytes: None to derive it from the simulated links.
    """

    def __init__(self, simulation: Simulation, compressed: CodecCost, threshold_bytes: int | None = None) -> None:
        super().__init__(simulation, "quantised", compressed)
        self._codec = compressed
        self.threshold_bytes = self._find_threshold() if threshold_bytes is None else check_threshold(threshold_bytes)
        blocks = self.setting.workload.blocks
        self._loads = [
            self._load_of(block.n_values, _VALUE_BYTES * block.n_values >= self.threshold_bytes) for block in blocks
        ]

    def _load_of(self, n_values: int, is_compressed: bool) -> BucketLoad:
        return self.load(n_values, "quantised", self._codec) if is_compressed else self.load(n_values)

    def _find_threshold(self) -> int:
        if self.setting.n_workers == 1:
            return 0  # nothing is sent

        def time_s(n_bytes: int, is_compressed: bool) -> float:
            load = self._load_of(n_bytes // _VALUE_BYTES, is_compressed)
            return load.wire_bytes / self.link.rate + load.latency_s

        def codec_s(n_bytes: int) -> float:
            return (self._codec.encode_s + self._codec.decode_s) * n_bytes / _VALUE_BYTES

        return ThresholdTable(
            SizeTimes(size, time_s(size, False), time_s(size, True), codec_s(size)) for size in _TABLE_BYTES
        ).threshold_bytes()
