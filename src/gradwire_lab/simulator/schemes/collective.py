"""Schemes that reduce: every block is a bucket whose mean everybody waits for before the next forward pass begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal

import simpy

from gradwire.errors import InvalidArgument
from gradwire.exchange.parts import count_chunks
from gradwire_lab.simulator.network import FlowClass
from gradwire_lab.simulator.schemes.base import SchemeModel
from gradwire_lab.simulator.simulation import Simulation
from gradwire_lab.simulator.stage import WorkerGroup

Lane = Literal["pipelined", "in turn", "asynchronous"]
LANES: tuple[Lane, ...] = ("pipelined", "in turn", "asynchronous")


@dataclass(frozen=True)
class Cost:
    """What the reduction of a bucket takes on each of N workers.

    Attributes:
        sent_bits_per_value: on a worker's link, each way, all hops together.
        encode_s_per_value, decode_s_per_value: of the bucket's values, all hops together.
        n_hops: messages that wait for each other; each pays the latency.
        lane: "pipelined" if chunks are encoded, sent and decoded side by side; "in turn" if a bucket is encoded, sent and
            decoded before the next; "asynchronous" if the next bucket is encoded while this one is sent.
    """

    sent_bits_per_value: float
    encode_s_per_value: float = 0.0
    decode_s_per_value: float = 0.0
    n_hops: int = 0
    lane: Lane = "asynchronous"

    def __post_init__(self) -> None:
        for name in ("sent_bits_per_value", "encode_s_per_value", "decode_s_per_value", "n_hops"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidArgument(f"{name}={getattr(self, name)}: expected 0 or more")
        if self.lane not in LANES:
            raise InvalidArgument(f"lane={self.lane!r}: expected one of {', '.join(LANES)}")


class Collective(SchemeModel):
    """All-reduce of one bucket after the other, in the order in which their gradients appear.

    A bucket begins when its gradient is there on all workers, for no hop can go round without one of them.

    Args:
        pattern: "ring", or "exchange" between all pairs (`Topology`).
    """

    def __init__(self, simulation: Simulation, cost: Cost, pattern: str = "ring") -> None:
        super().__init__(simulation)
        if pattern not in ("ring", "exchange"):
            raise InvalidArgument(f"pattern={pattern!r}: expected ring or exchange")
        self.cost = cost
        topology = simulation.topology
        self._flow_class = topology.ring() if pattern == "ring" else topology.exchange()
        self._joined: dict[tuple[int, int], int] = {}
        self._waiting: deque[tuple[int, int]] = deque()
        self._is_lane_busy = False
        self._n_left: dict[int, int] = {}

    def on_gradient(self, group: WorkerGroup, round_number: int, block: int) -> None:
        key = (round_number, block)
        self._joined[key] = self._joined.get(key, 0) + group.count
        if self._joined[key] == self.simulation.setting.n_workers:
            del self._joined[key]
            self._waiting.append(key)
            if not self._is_lane_busy:
                self._is_lane_busy = True
                self.environment.process(self._run_lane())

    def cost_of(self, block: int) -> Cost:
        """What the reduction of `block` takes."""
        return self.cost

    def _run_lane(self) -> Generator[simpy.Event, Any, None]:
        while self._waiting:
            round_number, block = self._waiting.popleft()
            cost = self.cost_of(block)
            if cost.lane == "pipelined":
                yield from self._reduce_pipelined(round_number, block)
                continue
            encode_s = cost.encode_s_per_value * self._n_values(block)
            if encode_s:
                yield self.environment.timeout(encode_s)
            if cost.lane == "in turn":
                yield from self._send_and_decode(round_number, block)
            else:
                self.environment.process(self._send_and_decode(round_number, block))
        self._is_lane_busy = False

    def _reduce_pipelined(self, round_number: int, block: int) -> Generator[simpy.Event, Any, None]:
        """Codec and wire side by side; what cannot overlap is one chunk's share of the shorter of the two."""
        cost, started_s = self.cost_of(block), self.environment.now
        codec_s = (cost.encode_s_per_value + cost.decode_s_per_value) * self._n_values(block)
        yield from self._send(round_number, block)
        wire_s = self.environment.now - started_s
        n_chunks = self._n_chunks(block)
        yield self.environment.timeout(max(0.0, codec_s - wire_s) + min(codec_s, wire_s) / n_chunks)
        self._finish(round_number, block)

    def _send_and_decode(self, round_number: int, block: int) -> Generator[simpy.Event, Any, None]:
        yield from self._send(round_number, block)
        decode_s = self.cost_of(block).decode_s_per_value * self._n_values(block)
        if decode_s:
            yield self.environment.timeout(decode_s)
        self._finish(round_number, block)

    def _send(self, round_number: int, block: int) -> Generator[simpy.Event, Any, None]:
        cost, started_s = self.cost_of(block), self.environment.now
        bits = cost.sent_bits_per_value * self._n_values(block)
        yield self.network.start(self._flow_class, bits).done
        # Receives are posted ahead of the messages, so the chunks of a hop pay its latency once.
        latency_s = cost.n_hops * self.simulation.setting.latency_s
        if latency_s:
            yield self.environment.timeout(latency_s)
        self._note(round_number, block, bits, started_s, "reduce")

    def _finish(self, round_number: int, block: int) -> None:
        # DDP's backward pass ends with the last bucket: no block of the next round starts before.
        n_blocks = len(self.simulation.setting.workload.blocks)
        left = self._n_left.get(round_number, n_blocks) - 1
        self._n_left[round_number] = left
        if left == 0:
            del self._n_left[round_number]
            for index in range(n_blocks):
                self.simulation.gates.open(round_number, index)

    def _n_chunks(self, block: int) -> int:
        part_values = -(-self._n_values(block) // self.simulation.setting.n_workers)
        return count_chunks(part_values)

    def _n_values(self, block: int) -> int:
        return self.simulation.setting.workload.blocks[block].n_values

    def _note(self, round_number: int, block: int, bits: float, started_s: float, what: str) -> None:
        name = f"{what} {self.simulation.setting.workload.blocks[block].name}"
        for group in self.simulation.groups:
            self.simulation.metrics.add_transfer(group, round_number, bits, started_s, name)


class ParameterServer(Collective):
    """Every worker pushes its gradient to servers, which sum, and pulls the mean; in float32.

    Args:
        n_servers: they share the parameters, and have links of `rate_bps` of their own.
    """

    def __init__(self, simulation: Simulation, n_servers: int = 1, rate_bps: float | None = None) -> None:
        super().__init__(simulation, Cost(32.0, n_hops=2))
        rate_bps = rate_bps if rate_bps is not None else simulation.setting.rate_bps
        self._push, self._pull = simulation.topology.parameter_server(n_servers, rate_bps)

    def _send(self, round_number: int, block: int) -> Generator[simpy.Event, Any, None]:
        bits = self.cost.sent_bits_per_value * self._n_values(block)
        stages: tuple[tuple[str, FlowClass], ...] = (("push", self._push), ("pull", self._pull))
        for what, flow_class in stages:
            started_s = self.environment.now
            yield self.network.start(flow_class, bits).done
            if self.simulation.setting.latency_s:
                yield self.environment.timeout(self.simulation.setting.latency_s)
            self._note(round_number, block, bits, started_s, what)
