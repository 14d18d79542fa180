"""What a simulated scheme is told, and what it has to do."""

from __future__ import annotations

from abc import ABC, abstractmethod

from gradwire_lab.simulator.simulation import Simulation
from gradwire_lab.simulator.stage import WorkerGroup


class SchemeModel(ABC):
    """Synchronises gradients: takes each as it appears, and opens the gates when every worker has them all."""

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
