"""What a simulated scheme is told, and what it has to do."""

from __future__ import annotations

from abc import ABC, abstractmethod

import simpy

from gradwire.schemes.auto.costs import CodecCost
from gradwire_lab.simulator.simulation import Simulation
from gradwire_lab.simulator.stage import WorkerGroup

PLAIN = CodecCost()


class Decoder:
    """One worker's, for all that it receives, as fast as it comes if it can; by symmetry as much comes as it sends itself."""

    def __init__(self) -> None:
        self._free_s = 0.0

    def end_s(self, started_s: float, now_s: float, work_s: float, last_s: float) -> float:
        """When `work_s` on messages that have come since `started_s` is done, `last_s` of it on what came last, now."""
        self._free_s = max(max(self._free_s, started_s) + work_s, now_s + last_s)
        return self._free_s


class SchemeModel(ABC):
    """Synchronises gradients: takes each as it appears, and opens the gates when every worker has them all.

    Attributes:
        period: rounds after which it does the same again.
    """

    period = 1

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.environment = simulation.environment
        self.network = simulation.network

    @abstractmethod
    def on_gradient(self, group: WorkerGroup, round_number: int, block: int) -> None:
        """The workers of `group` have the gradient of `block` (index in the order of the forward pass)."""

    def on_forward(self, group: WorkerGroup, round_number: int, block: int) -> None:
        """The workers of `group` begin the forward pass of `block`."""

    def on_forward_end(self, group: WorkerGroup, round_number: int, block: int) -> None:
        """They end it."""

    def on_backward(self, group: WorkerGroup, round_number: int, block: int) -> simpy.Event | None:
        """They come to its backward pass, and wait for what is returned; None: for nothing."""
        return None
