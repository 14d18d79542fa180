"""Workers that train in rounds on a simulated network.

A worker runs the forward pass block by block, each as soon as the block's gradients of the round before have been
synchronised, then the backward pass from the last block to the first, and hands every gradient to the scheme. Workers
that are alike and compute alike are one *group*, simulated once: its transfers have the weight of all its workers.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import simpy

from gradwire import checks
from gradwire.errors import InvalidArgument
from gradwire_lab.simulator.bandwidth import Trace
from gradwire_lab.simulator.metrics import Metrics
from gradwire_lab.simulator.network import SimulatedNetwork
from gradwire_lab.simulator.stage import Setting, Stage, Synchroniser, WorkerGroup
from gradwire_lab.simulator.topology import Topology


class Gates:
    """When every worker has all of a block: a count for every round and block, and an event at which it is full.

    Of each block rounds open in their order, perhaps before any worker comes to them.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._counts: dict[tuple[int, int], int] = {}
        self._events: dict[tuple[int, int], simpy.Event] = {}
        self._n_left: dict[int, int] = {}
        self._last_open = [-1] * len(simulation.setting.workload.blocks)

    def event(self, round_number: int, block: int) -> simpy.Event | None:
        """What a worker waits for before it uses `block` in the round after `round_number`; None: nothing."""
        if round_number <= self._last_open[block]:
            return None
        return self._events.setdefault((round_number, block), self._simulation.environment.event())

    def count(self, round_number: int, block: int, n_workers: int) -> None:
        """`n_workers` more have delivered `block` to everyone."""
        key = (round_number, block)
        self._counts[key] = self._counts.get(key, 0) + n_workers
        if self._counts[key] == self._simulation.setting.n_workers:
            self.open(round_number, block)

    def open(self, round_number: int, block: int) -> None:
        """Everybody has `block`."""
        self._last_open[block] = round_number
        waited_for = self._events.pop((round_number, block), None)
        if waited_for is not None:
            waited_for.succeed()
        self._counts.pop((round_number, block), None)
        left = self._n_left.get(round_number, len(self._simulation.setting.workload.blocks)) - 1
        self._n_left[round_number] = left
        if left == 0:
            del self._n_left[round_number]
            self._simulation.end_round(round_number)


class Simulation(Stage):
    """One run of one scheme.

    Args:
        make_scheme: builds the scheme on this simulation's network.
        keep_spans: record what every group computed and sent, for a trace.
        on_round: called after each round with their number so far and the simulated time.
    """

    def __init__(
        self,
        setting: Setting,
        make_scheme: Callable[[Simulation], Synchroniser],
        keep_spans: bool = False,
        on_round: Callable[[int, float], None] | None = None,
    ) -> None:
        self.setting = setting
        self.environment = simpy.Environment()
        self.network = SimulatedNetwork(self.environment)
        traced = set(setting.traced_workers if setting.traced_workers is not None else range(setting.n_workers))
        rates = list(setting.rates_bps or [setting.rate_bps] * setting.n_workers)
        self.topology = Topology(
            self.network,
            rates,
            setting.racks,
            setting.core_bps,
            kinds=[worker in traced for worker in range(setting.n_workers)] if setting.trace else None,
            connection_bps=setting.connection_bps,
        )
        self.groups = list(self._make_groups())
        self.gates = Gates(self)
        self.metrics = Metrics(self, keep_spans)
        self.n_rounds = 0  # that every worker has computed
        self._n_computed: dict[int, int] = {}
        self.round_ends_s: list[float] = []
        self._on_round = on_round
        self._last_round: int | None = None
        self._is_over = self.environment.event()
        self._factors: dict[int, Sequence[float]] = {}
        self.scheme = make_scheme(self)

    def run(self, seconds: float | None = None, rounds: int | None = None) -> Metrics:
        """Run for so many simulated seconds or rounds, whichever is first. Raises: InvalidArgument."""
        if seconds is None and rounds is None:
            raise InvalidArgument("say how long to simulate: seconds=... or rounds=...")
        if seconds is not None and not 0 < seconds < float("inf"):
            raise InvalidArgument(f"{seconds} seconds: expected a time above 0")
        if rounds is not None:
            checks.count("rounds", rounds)
        self._last_round = rounds
        for group in self.groups:
            self.environment.process(self._train(group))
        if self.setting.trace:
            self.environment.process(self._follow_trace(self.setting.trace))
        if seconds is not None:
            self.environment.process(self._stop_at(seconds))
        gc.freeze()  # what the program holds besides: collections would go over torch's objects again and again
        try:
            self.environment.run(self._is_over)
        finally:
            gc.unfreeze()
        self.network.finish()
        return self.metrics

    def end_round(self, round_number: int) -> None:
        """Every worker has every block of the round."""
        self.round_ends_s.append(self.environment.now)
        if len(self.round_ends_s) == self._last_round and not self._is_over.triggered:
            self._is_over.succeed()

    def _count_computed(self, group: WorkerGroup, round_number: int) -> None:
        """Workers have done both passes of a round; a round counts when all have."""
        n_workers = self._n_computed.pop(round_number, 0) + group.count
        if n_workers < self.setting.n_workers:
            self._n_computed[round_number] = n_workers
            return
        self.n_rounds += 1
        self._factors.pop(round_number - 1, None)
        if self._on_round:
            self._on_round(self.n_rounds, self.environment.now)

    def call_after(self, delay_s: float, function: Callable[[], None]) -> None:
        """Call `function` when `delay_s` have passed; at once for 0."""
        if delay_s <= 0:
            function()
            return
        self.environment.timeout(delay_s).callbacks.append(lambda _: function())

    def _make_groups(self) -> Iterator[WorkerGroup]:
        index, are_alike = itertools.count(), self.setting.shares_groups and self.setting.jitter.is_common
        speeds = self.setting.speeds or [1.0] * self.setting.n_workers
        for site in self.topology.sites:
            workers = range(site.first_worker, site.first_worker + site.n_workers)
            for _, alike in itertools.groupby(workers, speeds.__getitem__ if are_alike else None):
                first, *others = alike
                yield WorkerGroup(next(index), first, 1 + len(others), site)

    def _train(self, group: WorkerGroup) -> Generator[simpy.Event, Any, None]:
        environment, scheme, metrics = self.environment, self.scheme, self.metrics
        blocks = self.setting.workload.blocks
        round_number = 0
        while True:
            factor = self._factor(round_number, group)
            for index, block in enumerate(blocks):
                gate = self.gates.event(round_number - 1, index)
                if gate is not None:
                    since_s = environment.now
                    yield gate
                    metrics.add_wait(group, since_s, environment.now)
                scheme.on_forward(group, round_number, index)
                started_s = environment.now
                yield environment.timeout(block.forward_s * factor)
                metrics.add_compute(group, started_s, environment.now, "forward", block.name)
                scheme.on_forward_end(group, round_number, index)
            if round_number:
                metrics.end_forward(group, round_number - 1, self.round_ends_s[round_number - 1])
            metrics.start_backward(group)
            for index in range(len(blocks) - 1, -1, -1):
                gate = scheme.on_backward(group, round_number, index)
                started_s = environment.now
                if gate is not None:
                    yield gate
                    metrics.add_wait(group, started_s, environment.now)
                    started_s = environment.now
                yield environment.timeout(blocks[index].backward_s * factor)
                metrics.add_compute(group, started_s, environment.now, "backward", blocks[index].name)
                metrics.note_gradient(round_number)
                scheme.on_gradient(group, round_number, index)
            self._count_computed(group, round_number)
            round_number += 1

    def _factor(self, round_number: int, group: WorkerGroup) -> float:
        if round_number not in self._factors:
            self._factors[round_number] = self.setting.jitter.factors(round_number, self.setting.n_workers).tolist()
        factors = self._factors[round_number]
        factor = factors[0] if len(factors) == 1 else factors[group.first_worker]
        return factor / self.setting.speeds[group.first_worker] if self.setting.speeds else factor

    def _follow_trace(self, trace: Trace) -> Generator[simpy.Event, Any, None]:
        traced = self.setting.traced_workers
        for at_s, rate_bps in trace:
            yield self.environment.timeout(at_s - self.environment.now)
            for site in self.topology.sites:
                if traced is None or site.first_worker in traced:
                    self.network.set_capacity(site.up, rate_bps)
                    self.network.set_capacity(site.down, rate_bps)

    def _stop_at(self, seconds: float) -> Generator[simpy.Event, Any, None]:
        yield self.environment.timeout(seconds)
        if not self._is_over.triggered:
            self._is_over.succeed()
