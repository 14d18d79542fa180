"""Schemes that reduce: collectives of all workers, in order on their lane, by the library's own cost model.

What a bucket takes of lane and wire, and what follows what, is `gradwire.schemes.auto.costs`, with which `auto` and `recommend`
predict; here its transfers go over simulated links, which others may use.
"""

import itertools
from collections.abc import Generator
from typing import Any

import simpy

from gradwire import checks
from gradwire.errors import InvalidArgument
from gradwire.registry import describe_choices
from gradwire.schemes.auto import costs
from gradwire.schemes.slimgc.threshold import SizeTimes, ThresholdTable, check_threshold
from gradwire_lab.simulator.network import FlowClass
from gradwire_lab.simulator.simulation import SchemeModel, Simulation, Tally, WorkerGroup

PLAIN = costs.CodecCost()
_VALUE_BYTES = 4
# Sizes of SlimGC's table: 4 KB to 256 MB, the span of tensors and of blocks of them.
_TABLE_BYTES = tuple(1 << power for power in range(12, 29, 2))


class Lanes(SchemeModel):
    """One lane for all workers: a collective begins when every one of them has come to it, for no hop can do without one."""

    patterns: tuple[str, ...] = costs.ALL_REDUCES  # collectives that it may be told to use

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation)
        self.machine = costs.SharedCores(self.setting.n_workers, 1, 2)
        self.link = self.setting.link
        self._lane = costs.Lane(self.link.rate)
        self._under_way: list[costs.Turn] = []
        self._joined = Tally(self.setting.n_workers)
        self._is_lane_busy = False
        self._flows: dict[str, FlowClass] = {}

    def load(
        self, n_values: int, shape: str = "sum", codec: costs.CodecCost = PLAIN, pattern: str | None = None
    ) -> costs.BucketLoad:
        """What a collective of so many values takes. Raises: InvalidArgument (no such pattern)."""
        racks = self.simulation.topology.rack_workers
        if pattern not in (None, *self.patterns):
            raise InvalidArgument(
                f"no collective is called {pattern!r}; {describe_choices(str(pattern), self.patterns)}"
            )
        if pattern == "two-level" and len(set(racks)) > 1:
            raise InvalidArgument(f"two-level needs racks of equally many workers, not {', '.join(map(str, racks))}")
        legs = None if pattern is None else costs.legs_of(pattern, self.setting.n_workers, racks[0])
        return costs.bucket_load(shape, n_values, codec, self.link, self.machine, legs)

    def join(self, key: tuple[Any, ...], group: WorkerGroup, load: costs.BucketLoad) -> None:
        """The workers of `group` have come to the collective `key`: its round, its block, and what else tells it apart."""
        if self._joined.completes(key, group.count):
            self._lane.hand_over(key, load)
            self._work()

    def finish(self, key: Any) -> None:
        """The collective is over, decoding and all."""
        raise NotImplementedError

    def _work(self) -> None:
        if not self._is_lane_busy:
            self._is_lane_busy = True
            self.environment.process(self._run_lane())

    def _run_lane(self) -> Generator[simpy.Event, Any, None]:
        lane = self._lane
        while lane.turns:
            turn, started_s, wire_s = lane.turns[0], self.environment.now, None
            if turn.phase == "wire":
                wire_s = yield from self._transfer(turn)
            left_s = turn.work_s - (self.environment.now - started_s)
            if turn.phase == "tail":
                left_s = turn.wait_s
            if left_s > 0:
                yield self.environment.timeout(left_s)
            lane.end_turn(wire_s)
            if turn.phase == "after":
                self.finish(turn.bucket)
            self._send_more()
        self._is_lane_busy = False

    def _send_more(self) -> None:
        for turn in [*itertools.islice(self._lane.sending, self.link.at_once)]:
            if turn not in self._under_way:
                self._under_way.append(turn)
                self.environment.process(self._send(turn))

    def _send(self, turn: costs.Turn) -> Generator[simpy.Event, Any, None]:
        yield from self._transfer(turn)
        self._under_way.remove(turn)
        self._lane.end_sending(turn)
        self._send_more()
        self._work()

    def _transfer(self, turn: costs.Turn) -> Generator[simpy.Event, Any, float]:
        """The stages of a collective, one after another; returns the seconds that its bytes took."""
        environment, wire_s = self.environment, 0.0
        for leg in turn.load.legs:
            started_s, bits = environment.now, 8 * turn.load.message_bytes * leg.share
            if bits:
                if leg.across not in self._flows:
                    self._flows[leg.across] = self.simulation.topology.even(leg.across)
                yield self.network.start(self._flows[leg.across], bits)
                wire_s += environment.now - started_s
            # Receives are posted ahead of the messages, so the chunks of a hop pay its latency once.
            latency_s = leg.hops * (self.setting.latency_s if leg.across == "inside" else turn.load.hop_s)
            if latency_s:
                yield environment.timeout(latency_s)
            round_number, block, *_ = turn.bucket
            name = f"{leg.across} {self.blocks[block].name}"
            for group in self.simulation.groups:
                self.simulation.metrics.add_transfer(group, round_number, bits, started_s, name)
        return wire_s

    def open_round(self, round_number: int) -> None:
        for index in range(len(self.blocks)):
            self.simulation.gates.open(round_number, index)


class Collective(Lanes):
    """All-reduce of one bucket after the other, in the order in which their gradients appear, as behind DDP: no block of the
    next round starts before the last bucket is there.

    Args:
        shape, codec: how it communicates and what it costs; decoding of all that arrives.
        collective: another way than the shape's own (`costs.legs_of`).
        every: only each so many-th round sends, everything at once; between them workers do not wait for each other.
    """

    def __init__(
        self,
        simulation: Simulation,
        shape: str = "sum",
        codec: costs.CodecCost = PLAIN,
        collective: str | None = None,
        every: int = 1,
    ) -> None:
        super().__init__(simulation)
        self.period = checks.count("every", every)
        self._loads = [self.load(block.n_values, shape, codec, collective) for block in self.blocks]
        self._finished = Tally(len(self.blocks))
        self._opened = -1

    def on_gradient(self, group: WorkerGroup, round_number: int, block: int) -> None:
        if (round_number + 1) % self.period == 0:
            self.join((round_number, block), group, self._loads[block])
        elif round_number > self._opened:
            self._opened = round_number
            self.open_round(round_number)

    def finish(self, key: tuple[int, int]) -> None:
        round_number, _ = key
        if self._finished.completes(round_number):
            self.open_round(round_number)


class SlimGc(Collective):
    """SlimGC: blocks from the threshold on are compressed, the others sent as they are; owners sum and answer.

    Args:
        compressed: what the compressed exchange takes.
        threshold_bytes: None: by the live scheme's table, filled with what its sizes take on the simulated links.
    """

    def __init__(self, simulation: Simulation, compressed: costs.CodecCost, threshold_bytes: int | None = None) -> None:
        super().__init__(simulation, "quantised", compressed)
        self._codec = compressed
        self.threshold_bytes = self._find_threshold() if threshold_bytes is None else check_threshold(threshold_bytes)
        sizes = [block.n_values for block in self.blocks]
        self._loads = [self._load_of(n_values, _VALUE_BYTES * n_values >= self.threshold_bytes) for n_values in sizes]

    def _load_of(self, n_values: int, is_compressed: bool) -> costs.BucketLoad:
        return self.load(n_values, "quantised", self._codec) if is_compressed else self.load(n_values)

    def _find_threshold(self) -> int:
        if self.setting.n_workers == 1:
            return 0  # nothing is sent

        def times(n_bytes: int) -> SizeTimes:
            loads = [self._load_of(n_bytes // _VALUE_BYTES, is_compressed) for is_compressed in (False, True)]
            plain_s, compressed_s = (load.wire_bytes / self.link.rate + load.latency_s for load in loads)
            codec_s = (self._codec.encode_s + self._codec.decode_s) * n_bytes / _VALUE_BYTES
            return SizeTimes(n_bytes, plain_s, compressed_s, codec_s)

        return ThresholdTable(map(times, _TABLE_BYTES)).threshold_bytes()


class ParameterServer(Collective):
    """Every worker pushes its gradient to a server, which sums, and pulls the mean; in float32, all links alike."""

    patterns = ("parameter-server",)

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation, collective="parameter-server")
        topology, rate_bps = simulation.topology, self.setting.rate_bps
        self._flows = {direction: topology.parameter_server(direction, rate_bps) for direction in ("push", "pull")}


class LocalSteps(Lanes):
    """Workers step alone; parts of the model are exchanged in turn, each every `every` rounds (gradwire.doors.local_sgd).

    Args:
        bits: a value, in the exchange of pseudo-gradients.
        fragments: parts; their exchanges end evenly spread over the rounds.
        delay: rounds that an exchange may take beside them.
    """

    def __init__(
        self,
        simulation: Simulation,
        every: int = 500,
        fragments: int = 1,
        delay: int = 0,
        bits: float = 32.0,
        collective: str | None = None,
    ) -> None:
        super().__init__(simulation)
        if not 1 <= fragments <= every or not 0 <= delay < every // fragments:
            raise InvalidArgument(
                "every must be at least fragments, that at least 1, and delay from 0 to every // fragments - 1, got "
                f"every={every}, fragments={fragments}, delay={delay}"
            )
        self.period, self._delay = every, delay
        self._ends = [every * (number + 1) // fragments for number in range(fragments)]
        n_values = -(-self.setting.workload.n_values // fragments)
        self._load = self.load(n_values, "sum", costs.CodecCost(bits=checks.finite("bits", bits, 0)), collective)
        self._n_open = 0  # rounds after which everybody may go on

    def on_gradient(self, group: WorkerGroup, round_number: int, block: int) -> None:
        if block:
            return
        done = round_number + 1  # steps: the last gradient of this one has appeared
        last = done + self._delay - 1  # the round that an exchange begun now ends with
        if last % self.period + 1 in self._ends:
            self.join((last, 0), group, self._load)
        while self._n_open < done and self._n_open % self.period + 1 not in self._ends:  # others wait for an exchange
            self._open_next()

    def finish(self, key: tuple[int, int]) -> None:
        while self._n_open <= key[0]:
            self._open_next()

    def _open_next(self) -> None:
        self.open_round(self._n_open)
        self._n_open += 1


class FullyShard(Lanes):
    """FSDP2: the weights of a block are gathered while the block before it computes, in either pass, and dropped; its gradient
    is reduced and scattered after its backward pass. The last block's weights are kept from one pass to the other.

    Args:
        weights, gradients: bits of a value.
        reshard: False keeps the weights of all blocks for the backward pass (`reshard_after_forward`).
    """

    patterns = ("all-gather", "reduce-scatter")

    def __init__(
        self, simulation: Simulation, weights: float = 32.0, gradients: float = 32.0, reshard: bool = True
    ) -> None:
        super().__init__(simulation)
        self._reshard = reshard
        self._gathers, self._scatters = (
            [self.load(block.n_values, "sum", costs.CodecCost(bits=checks.finite("bits", bits, 0)), pattern)
             for block in self.blocks]
            for bits, pattern in ((weights, "all-gather"), (gradients, "reduce-scatter"))
        )  # fmt: skip
        self._scattered = Tally(len(self._scatters))
        self._gathered: dict[tuple[int, int], simpy.Event] = {}  # for a backward pass that is not over

    def on_forward(self, group: WorkerGroup, round_number: int, block: int) -> None:
        if round_number and block + 1 < len(self._gathers):
            self.join((round_number, block + 1, "forward"), group, self._gathers[block + 1])

    def on_backward(self, group: WorkerGroup, round_number: int, block: int) -> simpy.Event | None:
        if not self._reshard:
            return None
        if block:
            self.join((round_number, block - 1, "backward"), group, self._gathers[block - 1])
        if block + 1 == len(self._gathers):  # kept from the forward pass
            return None
        gathered = self._event_of((round_number, block))
        return None if gathered.processed else gathered

    def on_gradient(self, group: WorkerGroup, round_number: int, block: int) -> None:
        self.join((round_number, block, "gradient"), group, self._scatters[block])

    def finish(self, key: tuple[int, int, str]) -> None:
        round_number, block, what = key
        if what == "forward":
            self.simulation.gates.open(round_number - 1, block)
        elif what == "backward":
            self._event_of((round_number, block)).succeed()
        else:
            self._gathered.pop((round_number, block), None)
            if self._scattered.completes(round_number):  # the optimizer steps
                self._lane.hand_over((round_number + 1, 0, "forward"), self._gathers[0])

    def _event_of(self, key: tuple[int, int]) -> simpy.Event:
        return self._gathered.setdefault(key, simpy.Event(self.environment))
