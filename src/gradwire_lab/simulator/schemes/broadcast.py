"""Broadcast of every gradient to all, last come first served, with a fixed number of bits a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gradwire.errors import InvalidArgument
from gradwire.schemes.auto.costs import CodecCost
from gradwire_lab.simulator.network import Flow, FlowClass
from gradwire_lab.simulator.simulation import SchemeModel, Simulation, WorkerGroup

PLAIN = CodecCost()


class Decoder:
    """One worker's, for all that it receives, as fast as it comes if it can; by symmetry as much comes as it sends itself."""

    def __init__(self) -> None:
        self._free_s = 0.0

    def end_s(self, started_s: float, now_s: float, work_s: float, last_s: float) -> float:
        """When `work_s` on messages that have come since `started_s` is done, `last_s` of it on what came last, now."""
        self._free_s = max(max(self._free_s, started_s) + work_s, now_s + last_s)
        return self._free_s


@dataclass
class _Pending:
    round_number: int
    block: int
    left_bits: float
    started_s: float


class FixedBroadcast(SchemeModel):
    """Every worker broadcasts each block when it has it; a newer block goes before the rest of an older one.

    The newest gradient is the first that the next forward pass needs (Luo et al., section 4.2).

    Args:
        bits_per_value: what is sent of each value.
        codec: seconds on the sender before, and for each received copy after the transfer.
        is_fan_out: a copy to every receiver instead of a multicast.
    """

    def __init__(
        self, simulation: Simulation, bits_per_value: float, codec: CodecCost = PLAIN, is_fan_out: bool = False
    ) -> None:
        super().__init__(simulation)
        if not 0 < bits_per_value < float("inf"):
            raise InvalidArgument(f"bits_per_value={bits_per_value}: expected more than 0")
        self._bits_per_value = bits_per_value
        self._encode_s, self._decode_s = codec.encode_s, codec.decode_s
        classes = {id(site): simulation.topology.broadcasts(site, is_fan_out) for site in simulation.topology.sites}
        self._decoders = [Decoder() for _ in simulation.groups]
        self._senders = [_Sender(self, group, classes[id(group.site)]) for group in simulation.groups]

    def on_gradient(self, group: WorkerGroup, round_number: int, block: int) -> None:
        n_values = self.simulation.setting.workload.blocks[block].n_values
        pending = _Pending(round_number, block, n_values * self._bits_per_value, self.environment.now)
        sender = self._senders[group.index]
        self.simulation.call_after(n_values * self._encode_s, lambda: sender.push(pending))

    def deliver(self, group: WorkerGroup, pending: _Pending) -> None:
        """Everybody has the block's bits of this group; what remains is the way and the decoding."""
        one_s = self.simulation.setting.workload.blocks[pending.block].n_values * self._decode_s
        copies, now_s = self.simulation.setting.n_workers - 1, self.environment.now
        end_s = self._decoders[group.index].end_s(pending.started_s, now_s, copies * one_s, min(copies, 1) * one_s)
        delay_s = self.simulation.setting.hop_s + end_s - now_s
        gates = self.simulation.gates
        self.simulation.call_after(delay_s, lambda: gates.count(pending.round_number, pending.block, group.count))


class _Sender:
    """One group's link: the newest block is on it, older ones wait where they were stopped."""

    def __init__(self, scheme: FixedBroadcast, group: WorkerGroup, flow_class: FlowClass) -> None:
        self._scheme, self._group, self._flow_class = scheme, group, flow_class
        self._waiting: list[_Pending] = []
        self._current: tuple[Flow, _Pending] | None = None

    def push(self, pending: _Pending) -> None:
        """A block to send, before all others."""
        if self._current is not None and not self._current[0].is_over:  # over: its end comes later in this instant
            flow, older = self._current
            left_bits = self._scheme.network.stop(flow)
            self._note(flow, older, older.left_bits - left_bits)
            older.left_bits = left_bits
            self._waiting.append(older)
        self._send(pending)

    def _send(self, pending: _Pending) -> None:
        flow = self._scheme.network.start(self._flow_class, pending.left_bits, self._group.count)
        self._current = (flow, pending)
        flow.callbacks.append(self._end(flow, pending))

    def _end(self, flow: Flow, pending: _Pending) -> Callable[[object], None]:
        def end(_: object) -> None:
            self._note(flow, pending, pending.left_bits)
            pending.left_bits = 0.0
            if self._current is not None and self._current[0] is flow:
                self._current = None
            self._scheme.deliver(self._group, pending)
            if self._current is None and self._waiting:
                self._send(self._waiting.pop())

        return end

    def _note(self, flow: Flow, pending: _Pending, bits: float) -> None:
        name = self._scheme.simulation.setting.workload.blocks[pending.block].name
        self._scheme.simulation.metrics.add_transfer(
            self._group, pending.round_number, bits, flow.started_s, f"broadcast {name}"
        )
