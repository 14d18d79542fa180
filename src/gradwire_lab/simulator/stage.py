"""What is simulated: the setting, groups of workers that are alike, and what a simulation shows of itself while it runs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Protocol

import simpy

from gradwire import checks
from gradwire.errors import InvalidArgument
from gradwire_lab.simulator.bandwidth import Trace
from gradwire_lab.simulator.jitter import Jitter, Uniform
from gradwire_lab.simulator.network import SimulatedNetwork
from gradwire_lab.simulator.topology import Site, Topology
from gradwire_lab.simulator.workloads import WorkloadTimes


@dataclass(frozen=True)
class Setting:
    """What is simulated, but for the scheme.

    Attributes:
        rate_bps: of every worker's link, both ways.
        rates_bps: of each worker's, instead.
        trace: rates from given times on; of all links, or of those of `traced_workers`.
        racks, core_bps: a two-level tree instead of one switch (`Topology`).
        latency_s: from a sender to a receiver, paid by every message that somebody waits for.
        shares_groups: simulate workers that are alike once; False lists them singly, for tests.
    """

    workload: WorkloadTimes
    n_workers: int
    rate_bps: float
    rates_bps: tuple[float, ...] | None = None
    trace: Trace | None = None
    traced_workers: tuple[int, ...] | None = None
    jitter: Jitter = field(default_factory=Uniform)
    racks: int = 1
    core_bps: float | None = None
    latency_s: float = 0.0
    shares_groups: bool = True

    def __post_init__(self) -> None:
        checks.count("n_workers", self.n_workers)
        if self.rates_bps is not None and len(self.rates_bps) != self.n_workers:
            raise InvalidArgument(f"{len(self.rates_bps)} rates for {self.n_workers} workers")
        for rate_bps in self.rates_bps or (self.rate_bps,):
            if not 0 < rate_bps < float("inf"):
                raise InvalidArgument(f"a link rate of {rate_bps} bits a second: expected more than 0")
        if not 0 <= self.latency_s < float("inf"):
            raise InvalidArgument(f"latency_s={self.latency_s}: expected 0 or more")
        for worker in self.traced_workers or ():
            if not 0 <= worker < self.n_workers:
                raise InvalidArgument(f"a trace for worker {worker}: there are workers 0 to {self.n_workers - 1}")

    def replace(self, **changes: Any) -> Setting:
        """The same with `changes`. Raises: InvalidArgument."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class WorkerGroup:
    """Workers simulated as one: `count` of them from `first_worker` on, all of one site."""

    index: int
    first_worker: int
    count: int
    site: Site


class Stage:
    """What metrics read of a simulation."""

    setting: Setting
    environment: simpy.Environment
    network: SimulatedNetwork
    topology: Topology
    groups: list[WorkerGroup]
    round_ends_s: list[float]
    n_rounds: int


class Synchroniser(Protocol):
    """What a simulation calls of a scheme; see `schemes.base.Scheme`."""

    def on_gradient(self, group: WorkerGroup, round_number: int, block: int) -> None: ...

    def on_forward(self, group: WorkerGroup, round_number: int, block: int) -> None: ...

    def on_forward_end(self, group: WorkerGroup, round_number: int, block: int) -> None: ...
