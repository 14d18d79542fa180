"""What simulated schemes are made of."""

from __future__ import annotations

from gradwire.schemes.auto.costs import CodecCost
from gradwire_lab.simulator.simulation import Simulation
from gradwire_lab.simulator.stage import Synchroniser

PLAIN = CodecCost()


class Decoder:
    """One worker's, for all that it receives, as fast as it comes if it can; by symmetry as much comes as it sends itself."""

    def __init__(self) -> None:
        self._free_s = 0.0

    def end_s(self, started_s: float, now_s: float, work_s: float, last_s: float) -> float:
        """When `work_s` on messages that have come since `started_s` is done, `last_s` of it on what came last, now."""
        self._free_s = max(max(self._free_s, started_s) + work_s, now_s + last_s)
        return self._free_s


class SchemeModel(Synchroniser):
    """Synchronises gradients: takes each as it appears, and opens the gates when every worker has them all."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.environment = simulation.environment
        self.network = simulation.network
