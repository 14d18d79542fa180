"""SlimGC: compression only of what is large enough, by gradwire's own threshold (gradwire.schemes.slimgc.threshold).

The live scheme measures its table in its first steps; here the same table is filled with what the same sizes take on the
simulated links, by the measured sizes and codec times of the compressed exchange.
"""

from __future__ import annotations

from gradwire.schemes.slimgc.threshold import SizeTimes, ThresholdTable, check_threshold
from gradwire_lab.simulator.schemes.collective import Collective, Cost
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

    def __init__(self, simulation: Simulation, compressed: Cost, threshold_bytes: int | None = None) -> None:
        super().__init__(simulation, compressed, "exchange")
        n_workers = simulation.setting.n_workers
        self._raw = Cost(64.0 * (n_workers - 1) / n_workers, n_hops=2, lane=compressed.lane)
        self.threshold_bytes = self._find_threshold() if threshold_bytes is None else check_threshold(threshold_bytes)

    def _find_threshold(self) -> int:
        setting = self.simulation.setting
        if setting.n_workers == 1:
            return 0  # nothing is sent
        rate_bps = min(setting.rates_bps or (setting.rate_bps,))

        def time_s(cost: Cost, n_bytes: int) -> float:
            bits = cost.sent_bits_per_value * n_bytes / _VALUE_BYTES
            return bits / rate_bps + cost.n_hops * setting.latency_s

        def codec_s(n_bytes: int) -> float:
            return (self.cost.encode_s_per_value + self.cost.decode_s_per_value) * n_bytes / _VALUE_BYTES

        return ThresholdTable(
            SizeTimes(size, time_s(self._raw, size), time_s(self.cost, size), codec_s(size)) for size in _TABLE_BYTES
        ).threshold_bytes()

    def cost_of(self, block: int) -> Cost:
        is_compressed = _VALUE_BYTES * self._n_values(block) >= self.threshold_bytes
        return self.cost if is_compressed else self._raw
