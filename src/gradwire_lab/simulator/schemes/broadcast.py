"""Broadcast of every gradient to all: with a fixed number of bits a value, or in two stages by AQGB's own control law."""

import itertools
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import simpy

from gradwire.checks import share
from gradwire.errors import InvalidArgument
from gradwire.schemes.aqgb import law
from gradwire.schemes.auto.costs import CodecCost
from gradwire_lab.simulator.network import Flow, FlowClass
from gradwire_lab.simulator.simulation import SchemeModel, Simulation, WorkerGroup

PLAIN = CodecCost()
_MESSAGES = 8  # of a block: the ratio is decided anew for every one
_EXCHANGE_S = 0.02  # so old may be what a worker knows of when the others will need a block


def _decoded_s(free_s: float, started_s: float, now_s: float, work_s: float, last_s: float) -> float:
    """When a decoder that is free at `free_s` has done `work_s` on messages since `started_s`, `last_s` on what came
    now. By symmetry as much comes to a worker as it sends itself."""
    return max(max(free_s, started_s) + work_s, now_s + last_s)


def _classes_of(simulation: Simulation, is_fan_out: bool) -> list[FlowClass]:
    """Of each group's broadcasts; those of a site are one class."""
    classes = {id(site): simulation.topology.broadcasts(site, is_fan_out) for site in simulation.topology.sites}
    return [classes[id(group.site)] for group in simulation.groups]


@dataclass(eq=False)
class _Pending:
    """One block's gradient that is not everywhere; `flow`: the last that carried of it."""

    group: WorkerGroup
    round_number: int
    block: int
    left_bits: float
    started_s: float
    flow: Flow = field(init=False)


class FixedBroadcast(SchemeModel):
    """Every worker broadcasts each block when it has it; a newer block goes before the rest of an older one.

    The newest gradient is the first that the next forward pass needs (Luo et al., section 4.2). `codec`: on the sender before
    the transfer, and for each received copy after it; `is_fan_out`: a copy to every receiver instead of a multicast.
    """

    def __init__(
        self, simulation: Simulation, bits_per_value: float, codec: CodecCost = PLAIN, is_fan_out: bool = False
    ) -> None:
        super().__init__(simulation)
        if not 0 < bits_per_value < float("inf"):
            raise InvalidArgument(f"bits_per_value={bits_per_value}: expected more than 0")
        self._bits_per_value, self._codec = bits_per_value, codec
        self._classes = _classes_of(simulation, is_fan_out)
        self._decoded_s = [0.0] * len(simulation.groups)
        # Of each group the newest block, which is on its link, and before it the older ones, which wait where they stopped.
        self._stacks: list[list[_Pending]] = [[] for _ in simulation.groups]

    def on_gradient(self, group: WorkerGroup, round_number: int, block: int) -> None:
        n_values = self.blocks[block].n_values
        pending = _Pending(group, round_number, block, n_values * self._bits_per_value, self.environment.now)
        self.simulation.call_after(n_values * self._codec.encode_s, lambda: self._push(pending))

    def _push(self, pending: _Pending) -> None:
        stack = self._stacks[pending.group.index]
        if stack and not stack[-1].flow.is_over:  # over: its end comes later in this instant
            self._note(stack[-1], self.network.stop(stack[-1].flow))
        stack.append(pending)
        self._send(pending)

    def _send(self, pending: _Pending) -> None:
        group = pending.group
        pending.flow = self.network.start(self._classes[group.index], pending.left_bits, group.count)
        pending.flow.callbacks.append(lambda _: self._end(pending))

    def _end(self, pending: _Pending) -> None:
        self._note(pending, 0.0)
        stack = self._stacks[pending.group.index]
        is_newest = pending is stack[-1]
        stack.remove(pending)
        self._deliver(pending)
        if is_newest and stack:
            self._send(stack[-1])

    def _note(self, pending: _Pending, left_bits: float) -> None:
        """Its flow has carried all but so many bits."""
        sent_bits, pending.left_bits = pending.left_bits - left_bits, left_bits
        name, started_s = f"broadcast {self.blocks[pending.block].name}", pending.flow.started_s
        self.simulation.metrics.add_transfer(pending.group, pending.round_number, sent_bits, started_s, name)

    def _deliver(self, pending: _Pending) -> None:
        """Everybody has the block's bits of this group; what remains is the way and the decoding."""
        group, one_s = pending.group, self.blocks[pending.block].n_values * self._codec.decode_s
        copies, now_s, free_s = self.setting.n_workers - 1, self.environment.now, self._decoded_s[group.index]
        end_s = _decoded_s(free_s, pending.started_s, now_s, copies * one_s, min(copies, 1) * one_s)
        self._decoded_s[group.index] = end_s
        delay_s = self.setting.link.frame_hop_s + end_s - now_s
        gates = self.simulation.gates
        self.simulation.call_after(delay_s, lambda: gates.count(pending.round_number, pending.block, group.count))


class AqgbModel(SchemeModel):
    """Adaptive quantised gradient broadcast (Luo et al., section 4).

    Args:
        floor: the least share of its bits that a value is sent with in the first stage.
        overhead_bits_per_value: what the codec adds (headers, shared exponents).
        codec: of each message, whatever its bits: before it is sent, and for each copy.
        confidence: the share of the estimated rate that is planned with; the live scheme's default is 0.8, the paper's 1.
        has_owners: an all-reduce instead: to every receiver its part of a block, and the sum of the own part. An answer is sent
            with the part and not after all others' parts: as if all workers were equally far.
    """

    def __init__(
        self,
        simulation: Simulation,
        floor: float = law.DEFAULT_FLOOR,
        overhead_bits_per_value: float = 0.0,
        is_fan_out: bool = False,
        has_owners: bool = False,
        codec: CodecCost = PLAIN,
        confidence: float = 1.0,
    ) -> None:
        super().__init__(simulation)
        self.share = 2 / self.setting.n_workers if has_owners else 1.0  # of a value, to each receiver
        self.n_hops = 2 if has_owners else 1
        self.floor = share("floor", floor)
        self.overhead_bits_per_value = overhead_bits_per_value
        self.confidence = share("confidence", confidence)
        self.codec = codec
        # Of every value: everybody's copies, or the parts that a worker owns and the sums that it gets.
        self.decode_s = codec.decode_s * (2 if has_owners else self.setting.n_workers - 1)
        self.deadlines = law.Deadlines(len(simulation.groups))
        both = zip(simulation.groups, _classes_of(simulation, is_fan_out or has_owners), strict=True)
        self._workers = [_Worker(self, group, flow_class) for group, flow_class in both]
        self._board: list[tuple[float, float | None]] = [(-1.0, None)] * len(self.blocks)

    def on_forward(self, group: WorkerGroup, round_number: int, block: int) -> None:
        self._workers[group.index].start_forward(block)

    def on_forward_end(self, group: WorkerGroup) -> None:
        self._workers[group.index].end_forward()

    def on_gradient(self, group: WorkerGroup, round_number: int, block: int) -> None:
        self._workers[group.index].take_gradient(round_number, block)

    def remaining_s(self, block: int) -> float | None:
        """Until the last worker needs `block`, as all were told at the last exchange."""
        now_s = self.environment.now
        told_s, moment_s = self._board[block]
        # One look serves all workers until the next exchange: else asking would cost as many steps as there are workers.
        if told_s < 0 or now_s - told_s >= _EXCHANGE_S:
            remaining_s = self.deadlines.remaining_s(block, now_s)
            moment_s = None if remaining_s is None else now_s + remaining_s
            self._board[block] = (now_s, moment_s)
        return None if moment_s is None else moment_s - now_s


@dataclass
class _Run:
    """Values of one block that have been sent with the same number of bits."""

    n_values: float
    sent_bits: int


@dataclass
class _Sending:
    """One block's gradient on its way: values not sent yet, and runs of those that were."""

    round_number: int
    block: int
    left_values: float
    message_values: float
    runs: list[_Run] = field(default_factory=list)


class _Worker:
    """One group: what it profiles and tells, and its sender with stage 1 while gradients appear, then stage 2."""

    def __init__(self, scheme: AqgbModel, group: WorkerGroup, flow_class: FlowClass) -> None:
        self._scheme, self._group, self._flow_class = scheme, group, flow_class
        self._n_blocks = len(scheme.blocks)
        self._rate = law.RateEstimate()
        self._profile = law.Profile()
        self._stack: list[_Sending] = []  # the newest gradient last, and sent first
        self._sent: dict[int, _Sending] = {}
        self._decoded_s = 0.0  # when everybody has decoded what has been sent
        self._is_sending = False
        self._n_appeared = 0
        self._last_s = 0.0
        self._backward_s: list[float] = []
        self._forward_s: list[float] = []

    def start_forward(self, block: int) -> None:
        """It begins a block's forward pass, and knows when it will need the next ones."""
        self._last_s = self._scheme.environment.now
        self._tell_from(block)

    def end_forward(self) -> None:
        """It ends a block's forward pass; after the last one, the backward pass begins."""
        self._forward_s.append(self._scheme.environment.now - self._last_s)
        self._last_s = self._scheme.environment.now
        self._n_appeared = 0

    def take_gradient(self, round_number: int, block: int) -> None:
        now_s = self._scheme.environment.now
        self._backward_s.append(now_s - self._last_s)
        self._last_s = now_s
        self._n_appeared += 1
        if (timetable := self._profile.timetable) is not None:
            self._scheme.deadlines.tell(self._group.index, timetable.until_forward(self._n_appeared, 0.0), now_s)
        if self._n_appeared == self._n_blocks:
            self._profile.add(law.Timetable(tuple(self._backward_s), 0.0, tuple(self._forward_s)))
            self._backward_s, self._forward_s = [], []
        n_values = self._scheme.blocks[block].n_values
        self._stack.append(_Sending(round_number, block, n_values, n_values / _MESSAGES))
        if not self._is_sending:
            self._is_sending = True
            self._scheme.environment.process(self._send())

    def _tell_from(self, block: int) -> None:
        """Tell when each block is needed, if the forward pass of `block` begins now."""
        if (timetable := self._profile.timetable) is not None:
            ahead_s = [0.0] * block + [*itertools.accumulate(timetable.forward_s[block:-1], initial=0.0)]
            self._scheme.deadlines.tell(self._group.index, ahead_s, self._scheme.environment.now)

    def _send(self) -> Generator[simpy.Event, Any, None]:
        scheme = self._scheme
        while self._stack:
            sending = self._stack[-1]  # one message of the newest gradient
            n_values = min(sending.message_values, sending.left_values)
            n_bits = self._first_stage_bits()
            yield from self._transfer(sending, n_values, n_bits + scheme.overhead_bits_per_value, "stage 1")
            sending.left_values -= n_values
            if sending.runs and sending.runs[-1].sent_bits == n_bits:
                sending.runs[-1].n_values += n_values
            else:
                sending.runs.append(_Run(n_values, n_bits))
            if sending.left_values < 0.5:
                self._stack.remove(sending)
                self._sent[sending.block] = sending
            if not self._stack and self._n_appeared == self._n_blocks:
                self._tell_from(0)  # its own first stage is over: nothing of its own keeps it from going on
                for block in range(self._n_blocks):
                    yield from self._refine(self._sent.pop(block))
        self._is_sending = False

    def _first_stage_bits(self) -> int:
        scheme, now_s = self._scheme, self._scheme.environment.now
        table = self._profile.timetable
        until_next_s = None if table is None else table.until_next_gradient(self._n_appeared, now_s - self._last_s)
        undelivered_bits = law.WORD_BITS * scheme.share * sum(sending.left_values for sending in self._stack)
        rate_bps = scheme.confidence * self._rate.rate_bps
        ratio = law.first_stage_ratio(rate_bps, until_next_s, undelivered_bits, scheme.floor)
        if self._group.index == 0:
            scheme.simulation.metrics.ratios.append((now_s, ratio))
        return law.bits_of_ratio(ratio)

    def _refine(self, sending: _Sending) -> Generator[simpy.Event, Any, None]:
        """Stage 2 of one block, until it is needed; then all of it has been sent."""
        runs = sending.runs
        while runs:
            run = runs[0]
            n_bits = self._second_stage_bits(sending.block, runs)
            if n_bits == 0:
                break
            n_values = min(sending.message_values, run.n_values)
            yield from self._transfer(sending, n_values, n_bits, "stage 2")
            run.n_values -= n_values
            if run.n_values < 0.5:
                runs.pop(0)
        simulation = self._scheme.simulation
        hops_s = self._scheme.n_hops * self._scheme.setting.link.frame_hop_s
        simulation.call_after(
            hops_s + max(0.0, self._decoded_s - simulation.environment.now),
            lambda: simulation.gates.count(sending.round_number, sending.block, self._group.count),
        )

    def _second_stage_bits(self, block: int, runs: list[_Run]) -> int:
        """More bits for the values of the first of `runs`, such that all of them are refined alike in time."""
        remaining_s = self._scheme.remaining_s(block)
        left_bits = law.WORD_BITS - runs[0].sent_bits
        if remaining_s is None or left_bits == 0:
            return 0
        undelivered_bits = sum(run.n_values * (law.WORD_BITS - run.sent_bits) for run in runs)
        # As many values of the first run's kind as have all the runs' bits to come.
        n_values = round(self._scheme.share * undelivered_bits / left_bits)
        rate_bps = self._scheme.confidence * self._rate.rate_bps
        return law.second_stage_bits(rate_bps, remaining_s, n_values, runs[0].sent_bits)

    def _transfer(
        self, sending: _Sending, n_values: float, n_bits: float, stage: str
    ) -> Generator[simpy.Event, Any, None]:
        scheme, bits = self._scheme, n_values * n_bits
        encode_s = n_values * scheme.codec.encode_s
        flow = scheme.network.start(self._flow_class, scheme.share * bits, self._group.count, encode_s)
        yield flow
        now_s = scheme.environment.now
        self._rate.observe(flow.bits, now_s - flow.started_s)
        if scheme.decode_s:
            work_s, last_s = n_values * scheme.decode_s, n_values * scheme.codec.decode_s
            self._decoded_s = _decoded_s(self._decoded_s, flow.started_s, now_s, work_s, last_s)
        name = f"{stage} {scheme.blocks[sending.block].name} x {n_bits:g} bits"
        scheme.simulation.metrics.add_transfer(self._group, sending.round_number, bits, flow.started_s, name)
