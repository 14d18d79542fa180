"""Predicts the time of a step under a scheme that has not run on this network, from the costs of machine, link and codec.

A step is three activities that share what there is. The computation hands over buckets at known times; the lane encodes and
decodes, one bucket after another; the wire is one link, whoever uses it. Every number is "wall time while all ranks do the
same", which is how it is measured and how it is meant. It errs too much to decide by, and little enough to know what to try
(docs/auto.md).

Seconds, bytes, and bytes a second of payload. Only + - * / and comparisons, so that ranks that share the inputs share the
outputs, but for `break_even_rate`, which is for people.
"""

import functools
import itertools
import math
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gradwire import checks, codecs
from gradwire.errors import GradwireError, InvalidArgument
from gradwire.exchange.parts import QUANTISED_CHUNK_ELEMENTS, QUANTISED_MIN_CHUNKS, count_chunks
from gradwire.registry import describe_choices, parse_spec
from gradwire.schemes.auto.fidelity import FidelityRow
from gradwire.telemetry.environment import machine_id
from gradwire.wire.communicator import Communicator, ring_bytes
from gradwire.wire.device_wire import DeviceWire, Reading, time_on
from gradwire.wire.link_probe import DEVICE_PROBE_ELEMENTS, PROBE_ELEMENTS, probe_link, processor_s
from gradwire.wire.wire import Wire

# sum: the backend's all-reduce of the codec's output. agreed-sum: a small maximum over the ranks before it. ring, direct:
# frames, encoded and decoded while others travel. quantised: to the owners of the parts and back. gather: all to all.
SHAPES = ("sum", "agreed-sum", "ring", "direct", "quantised", "gather")

_NOTHING = 1e-9  # seconds: what rounding may leave of a time
# A TCP connection of Linux as it comes: half of tcp_rmem's 6 MiB is window; a segment fills a frame of 1,500 bytes.
_WINDOW_BYTES, _SEGMENT_BYTES = 3 << 20, 1448
_SLOWEST, _FASTEST = 1e5, 12.5e9  # bytes/s between which a break-even rate is looked for: 0.8 Mb/s to 100 Gb/s

# Measured on 2 cores of an AMD EPYC: a message of frames costs a quarter of a millisecond of processor time, both ends
# together, and a hop of frames a third more than the backend's.
_MESSAGE_S, _FRAME_HOP = 0.25e-3, 1.33
_SAMPLE = 1 << 16  # values
_DEVICE_SAMPLE = 1 << 22  # on a device, where less is over before the next kernel can begin
_LAUNCHES_PER_MESSAGE = 2  # of a float format: one to make it, one to read it
_DENSITY_SAMPLE = 1 << 13
_SPARSE = 0.8
_NEVER_S = 60.0  # more than any step
_CAST_S = 0.5e-9  # a value: a cast is what a codec without a name does
_FORWARD_SHARE = 1 / 3  # of what a step computes, before the first gradient
_FIRST_BUCKET_BYTES, _BUCKET_BYTES = 1 << 20, 25 << 20  # DDP's own


# ---- the model


@dataclass(frozen=True)
class SharedCores:
    """`n_local` of `n_ranks` ranks share `n_cores`; `on_device`: the lane works on a device, beside the computation."""

    n_ranks: int
    n_local: int
    n_cores: int
    on_device: bool = False


@dataclass(frozen=True)
class LinkCost:
    rate: float  # bytes/s that a rank sends, and receives, while all do
    backend_hop_s: float  # one of the 2 (N-1) hops of the backend's all-reduce, without its bytes
    frame_hop_s: float  # a message of frames that somebody waits for
    message_s: float  # processor time of each message of frames, both ends
    gather_s: float  # an all-gather of next to nothing
    at_once: int = 1  # asynchronous collectives that are under way at a time; the others wait for them, in order

    def over(self, rtt_s: float, loss: float = 0.0, streams: int = 1) -> "LinkCost":
        """The same over a path with this round trip: half of it a hop, and no faster than its TCP connections."""
        later = {name: getattr(self, name) + rtt_s / 2 for name in ("backend_hop_s", "frame_hop_s", "gather_s")}
        return replace(self, rate=min(self.rate, connection_rate(rtt_s, loss, streams)), **later)


def connection_rate(rtt_s: float, loss: float = 0.0, streams: int = 1) -> float:
    """Bytes/s of `streams` TCP connections: a window a round trip, and where a share `loss` of the packets is lost
    MSS / rtt sqrt(1.5 / loss) each (Mathis et al., 1997). Raises: InvalidArgument."""
    checks.finite("rtt_s", rtt_s, 0)
    checks.count("streams", streams)
    if not 0 <= loss < 1:
        raise InvalidArgument(f"loss={loss}: expected a share of packets from 0 to below 1")
    if rtt_s == 0:
        return math.inf
    per_trip = min(_WINDOW_BYTES, _SEGMENT_BYTES * math.sqrt(1.5 / loss) if loss else math.inf)
    return streams * per_trip / rtt_s


@dataclass(frozen=True)
class StepCost:
    """A step without communication: how long it computes, and each bucket's (values, when it is ready)."""

    compute_s: float
    buckets: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class CodecCost:
    """What a value costs under one codec."""

    encode_s: float = 0.0
    decode_s: float = 0.0
    bits: float = 32.0  # on the wire
    fixed_s: float = 0.0  # of a bucket whatever its size
    zero_bits: float | None = None  # of a value that is zero; None: as many as of any other
    densest: float = 1.0  # the largest share of other values at which it is thought of

    def at(self, density: float) -> "CodecCost":
        """The cost where a share `density` of the values is not zero; where that is too much, one that nothing can bear."""
        if density > self.densest:
            return replace(self, fixed_s=_NEVER_S, zero_bits=None)
        if self.zero_bits is None:
            return self
        return replace(self, bits=density * self.bits + (1 - density) * self.zero_bits, zero_bits=None)


class Leg(NamedTuple):
    """One stage of a collective."""

    across: str  # which links
    share: float  # of a message, that a rank sends
    hops: int  # messages that wait for each other


ALL_REDUCES = ("ring", "direct", "tree", "two-level")


def legs_of(pattern: str, n: int, inside: int = 1) -> tuple[Leg, ...]:
    """The stages of a collective of `n` ranks, one after the other; nothing among one.

    The patterns: a ring; direct: all pairs at once, twice; tree: two trees of half a message each, up and down; two-level:
    inside nodes of `inside` ranks, between nodes on each rank's share, inside; a gather of whole messages; FSDP2's halves of a
    ring; through servers. Raises: InvalidArgument (no such pattern, nodes that do not divide the ranks).
    """
    ring, nodes = 2 * (n - 1) / n, n // inside
    if pattern == "two-level" and n % inside:
        raise InvalidArgument(f"two-level needs nodes of equally many workers; {n} do not make nodes of {inside}")
    half, inner = Leg("ring", ring / 2, n - 1), Leg("inside", (inside - 1) / inside, inside - 1)
    legs = {
        "ring": (Leg("ring", ring, 2 * (n - 1)),),
        "direct": (Leg("exchange", ring, 2),),
        "tree": (Leg("ring", min(2.0, ring * n / 2), 2 * math.ceil(math.log2(n))),),
        "two-level": (inner, Leg("between", 2 * (nodes - 1) / (nodes * inside), 2 * (nodes - 1)), inner),
        "gather": (Leg("exchange", n - 1, 1),),
        "reduce-scatter": (half,),
        "all-gather": (half,),
        "parameter-server": (Leg("push", 1, 1), Leg("pull", 1, 1)),
    }
    if pattern not in legs:
        raise InvalidArgument(f"no collective is called {pattern!r}; {describe_choices(pattern, legs)}")
    return tuple(leg for leg in legs[pattern] if leg.hops) if n > 1 else ()


class BucketLoad(NamedTuple):
    """The demands of one bucket: the lane, then the wire for a message in `legs`, each hop `hop_s` late, then the lane."""

    before_s: float
    message_bytes: float
    legs: tuple[Leg, ...]
    hop_s: float
    beside_s: float  # of lane work while the message travels, in `n_chunks` pieces
    n_chunks: int
    after_s: float
    is_async: bool  # the lane is free meanwhile

    @property
    def wire_bytes(self) -> float:
        """A rank sends as much, and receives it."""
        return self.message_bytes * sum(leg.share for leg in self.legs)

    @property
    def latency_s(self) -> float:
        """Of all hops, which wait for each other."""
        return self.hop_s * sum(leg.hops for leg in self.legs)


def bucket_load(
    shape: str,
    n_values: int,
    codec: CodecCost,
    link: LinkCost,
    machine: SharedCores,
    legs: tuple[Leg, ...] | None = None,
) -> BucketLoad:
    """The demands of a bucket of `n_values`; `legs`: another way than the shape's own. Raises: InvalidArgument (no shape)."""
    n = machine.n_ranks
    if shape not in SHAPES:
        raise InvalidArgument(f"a communication shape is one of {', '.join(SHAPES)}, not {shape!r}")
    if n == 1:
        return BucketLoad(0, 0, (), 0, 0, 1, 0, True)
    legs = legs or legs_of({"sum": "ring", "agreed-sum": "ring", "quantised": "direct"}.get(shape, shape), n)
    message_bytes = n_values * codec.bits / 8
    encode_s = codec.encode_s * n_values + codec.fixed_s
    decode_s = codec.decode_s * n_values
    part = -(-n_values // n)
    if shape in ("sum", "agreed-sum"):
        if shape == "agreed-sum":  # a maximum of next to nothing goes the same way before
            legs = (*(leg._replace(share=0.0) for leg in legs), *legs)
        return BucketLoad(encode_s, message_bytes, legs, link.backend_hop_s, 0, 1, decode_s, shape == "sum")
    if shape == "gather":
        if legs[0].share != n - 1:
            raise InvalidArgument("whole messages of all ranks are gathered by all: no other collective carries them")
        return BucketLoad(encode_s, message_bytes, legs, link.gather_s, 0, 1, decode_s, False)
    if shape == "quantised":
        chunks = count_chunks(part, QUANTISED_CHUNK_ELEMENTS, QUANTISED_MIN_CHUNKS)
        messages_s = (n - 1) * (2 * chunks + 2) * link.message_s
        legs = (Leg(legs[0].across, 0.0, 1), *legs)  # the owners' sums are agreed on
        after_s = encode_s / 2 + decode_s
        return BucketLoad(encode_s / 2, message_bytes, legs, link.frame_hop_s, messages_s, chunks, after_s, False)
    chunks = count_chunks(part)
    beside_s = encode_s + decode_s + 2 * (n - 1) * chunks * link.message_s
    if machine.on_device:  # the messages of a part, or of all, are made in the launches of one, then sent, then read
        chunks, beside_s = 1, encode_s + decode_s + (n if shape == "ring" else 3) * link.message_s
    return BucketLoad(0, message_bytes, legs, link.frame_hop_s, beside_s, chunks, 0, False)


@dataclass(eq=False)
class Turn:
    """A bucket's turn: processor work, beside it the wire and then its latency."""

    bucket: Any
    load: BucketLoad
    phase: str  # before, wire, tail or after on the lane; sending on the wire alone
    work_s: float = 0.0
    wire_s: float = 0.0
    wait_s: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.work_s <= _NOTHING and self.wire_s <= _NOTHING and self.wait_s <= _NOTHING


class Lane:
    """The order of a rank's buckets: encoded, sent and decoded one after another; asynchronous ones are sent beside the next
    one's encoding, themselves in order. Predictions run it here, the simulator on its networks; they say what is over."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self.turns: deque[Turn] = deque()  # on the lane, of which the first is under way
        self.sending: deque[Turn] = deque()  # on the wire; as many of the first as it takes at once

    def hand_over(self, bucket: Any, load: BucketLoad) -> None:
        self.turns.append(Turn(bucket, load, "before", load.before_s))

    def end_turn(self, wire_s: float | None = None) -> None:
        """The first turn is over, of which the wire took `wire_s` (its bytes by the link's rate)."""
        ended = self.turns.popleft()
        load = ended.load
        by_rate_s = load.wire_bytes / self._rate
        if ended.phase == "before" and load.is_async:
            self.sending.append(Turn(ended.bucket, load, "sending", 0.0, by_rate_s, load.latency_s))
        elif ended.phase == "before":
            self.turns.appendleft(Turn(ended.bucket, load, "wire", load.beside_s, by_rate_s, load.latency_s))
        elif ended.phase == "wire":
            # The first chunk cannot travel before it is encoded, nor the last be decoded before it is there.
            tail_s = min(by_rate_s if wire_s is None else wire_s, load.beside_s) / load.n_chunks
            self.turns.appendleft(Turn(ended.bucket, load, "tail", wait_s=tail_s))
        elif ended.phase == "tail":
            self.turns.appendleft(Turn(ended.bucket, load, "after", load.after_s))

    def end_sending(self, sent: Turn) -> None:
        """It has arrived, and its turn to be decoded comes after those that wait for the lane already."""
        self.sending.remove(sent)
        self.turns.append(Turn(sent.bucket, sent.load, "after", sent.load.after_s))


def predict_s(shape: str, codec: CodecCost, step: StepCost, link: LinkCost, machine: SharedCores) -> float:
    """Predict the time of a step under a scheme of this shape and codec. Raises: InvalidArgument (no such shape)."""
    to_come = deque((ready_s, bucket_load(shape, n, codec, link, machine)) for n, ready_s in step.buckets)
    lane = Lane(link.rate)
    # The speed of each of a rank's two busy threads, relative to one alone.
    share = min(1.0, max(0.5, machine.n_cores / machine.n_local / 2))
    now = computed = 0.0
    while True:  # from event to event
        is_computing = computed < step.compute_s - _NOTHING
        while to_come and not (is_computing and computed < to_come[0][0] - _NOTHING):
            lane.hand_over(None, to_come.popleft()[1])
        _pass_on(lane, link.at_once)
        if not is_computing and not lane.turns and not lane.sending:
            return now
        head = [*itertools.islice(lane.turns, 1)]
        under_way = [*head, *itertools.islice(lane.sending, link.at_once)]
        works = [turn for turn in head if turn.work_s > _NOTHING]
        on_wire = [turn for turn in under_way if turn.wire_s > _NOTHING]
        late = [turn for turn in under_way if turn.wire_s <= _NOTHING < turn.wait_s]
        speed = share if works else 1.0
        lane_speed = share if is_computing else 1.0
        wire_speed = 1 / max(1, len(on_wire))  # one link for all
        ends = [turn.work_s / lane_speed for turn in works]
        ends += [turn.wire_s / wire_speed for turn in on_wire]
        ends += [turn.wait_s for turn in late]
        if is_computing:
            ends.append((step.compute_s - computed) / speed)
            if to_come:
                ends.append(max(0.0, (to_come[0][0] - computed) / speed))
        passed = min(ends, default=0.0)  # until whatever ends next
        now += passed
        if is_computing:
            computed += passed * speed
        for turn in works:
            turn.work_s -= passed * lane_speed
        for turn in on_wire:
            turn.wire_s -= passed * wire_speed
        for turn in late:
            turn.wait_s -= passed
        _pass_on(lane, link.at_once)


def _pass_on(lane: Lane, at_once: int) -> None:
    """Replace whatever has ended by what follows it."""
    for turn in [*itertools.islice(lane.sending, at_once)]:
        if turn.is_over:
            lane.end_sending(turn)
    while lane.turns and lane.turns[0].is_over:
        lane.end_turn()


def break_even_rate(
    shape: str, codec: CodecCost, step: StepCost, link: LinkCost, machine: SharedCores, margin: float = 1.0
) -> float | None:
    """The link rate in bytes/s from which on the scheme is no longer `margin` times as fast as plain: None if it never is, inf
    if it always is."""

    def gain_s(rate: float) -> float:
        there = replace(link, rate=rate)
        plain_s = predict_s("sum", CodecCost(), step, there, machine)
        return plain_s - margin * predict_s(shape, codec, step, there, machine)

    low, high = _SLOWEST, _FASTEST * (100 if machine.on_device else 1)  # a bus between GPUs carries more
    if gain_s(low) <= 0:
        return None
    return math.inf if gain_s(high) > 0 else last_rate(lambda rate: gain_s(rate) > 0, low, high, 1.001)


def last_rate(holds: Callable[[float], bool], low: float, high: float, within: float) -> float:
    """The highest rate at which something holds that does at `low` and not at `high`, within a factor."""
    while high / low > within:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


# ---- what predictions rest on


@dataclass(frozen=True)
class CostProfile:
    """Everything that predictions rest on, but for what a step computes. The same on all ranks."""

    machine: SharedCores
    link: LinkCost
    codecs: Mapping[str, CodecCost]  # by spec, as `shapes`
    shapes: Mapping[str, str]
    buckets: tuple[int, ...]  # values of each of DDP's buckets, the first ready first
    density: float = 1.0  # the share of a gradient's values that is not zero

    def family_of(self, spec: str) -> str:
        """Schemes whose predictions err alike. Of sparse gradients what is shortened by zeros errs by itself."""
        shape, codec = self.shapes.get(spec, spec), self.codecs.get(spec, CodecCost())
        return f"{shape} of few" if codec.zero_bits is not None and self.density < _SPARSE else shape

    @cached_property
    def costs(self) -> dict[str, CodecCost]:
        """`codecs` with the bits that they need for gradients as dense as these."""
        return {spec: codec.at(self.density) for spec, codec in self.codecs.items()}

    def step(self, compute_s: float) -> StepCost:
        """A step that computes so long; buckets are ready as the backward pass comes to them."""
        total, done, buckets = max(1, sum(self.buckets)), 0, []
        for n_values in self.buckets:
            done += n_values
            buckets.append((n_values, compute_s * (_FORWARD_SHARE + (1 - _FORWARD_SHARE) * done / total)))
        return StepCost(compute_s, tuple(buckets))

    def predict_s(self, compute_s: float) -> dict[str, float]:
        """Seconds a step under every scheme, where one computes `compute_s`."""
        step = self.step(compute_s)
        return {
            spec: predict_s(self.shapes[spec], codec, step, self.link, self.machine)
            for spec, codec in self.costs.items()
        }

    def predict_us(self, computing_us: int) -> dict[str, int]:
        return {spec: int(1e6 * took_s) for spec, took_s in self.predict_s(computing_us / 1e6).items()}

    def with_transfer(self, transfer_us: int) -> "CostProfile":
        """The same, with the link as `probe_transfer_us` found it on the slowest rank."""
        n = self.machine.n_ranks
        hops_s = 2 * (n - 1) * self.link.backend_hop_s
        n_values = DEVICE_PROBE_ELEMENTS if self.machine.on_device else PROBE_ELEMENTS
        return self.at_rate(ring_bytes(4 * n_values, n) / max(transfer_us / 1e6 - hops_s, 1e-6))

    def at_rate(self, rate: float) -> "CostProfile":
        """The same on a link of another rate."""
        return replace(self, link=replace(self.link, rate=rate))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"buckets": list(self.buckets)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "CostProfile":
        """Read what `as_dict` gave. Raises: KeyError, TypeError (not that)."""
        return cls(
            SharedCores(**saved["machine"]),
            LinkCost(**saved["link"]),
            {spec: CodecCost(**codec) for spec, codec in saved["codecs"].items()},
            dict(saved["shapes"]),
            tuple(saved["buckets"]),
            float(saved.get("density", 1.0)),
        )


def measure_profile(wire: Wire, rows: Sequence[FidelityRow], parameters: Sequence[torch.Tensor]) -> CostProfile:
    """Measure the link and the codecs of `rows`, schemes that run on this wire, as all ranks at once: collective, under a
    second, on the lane. Raises: PeerLost."""
    communicator = wire.communicator
    if isinstance(wire, DeviceWire):
        message_s, copy_s, speeds = _speeds_on(wire, rows)
    else:
        message_s, copy_s, speeds = _MESSAGE_S, _copy_s(parameters), [codec_speed(row.codec) for row in rows]
    facts = [*probe_link(wire), message_s, copy_s, *itertools.chain(*speeds)]
    slowest = torch.tensor(facts, dtype=torch.float64, device="cpu")
    if communicator.world_size > 1:
        communicator.all_reduce(slowest, dist.ReduceOp.MAX)
    hop_s, byte_s, message_s, copy_s, *flat = slowest.tolist()
    codecs = {
        row.spec: CodecCost(
            encode_s + copy_s, decode_s + copy_s, row.bits, zero_bits=row.zero_bits, densest=row.densest
        )
        for row, encode_s, decode_s in zip(rows, flat[::2], flat[1::2], strict=True)
    }
    frame_hop_s = hop_s if wire.on_device else _FRAME_HOP * hop_s
    link = LinkCost(1 / max(byte_s, 1e-12), hop_s, frame_hop_s, message_s, hop_s * communicator.world_size)
    machine = SharedCores(communicator.world_size, 1, 1, True) if wire.on_device else _machine_of(communicator)
    return CostProfile(machine, link, codecs, {row.spec: row.shape for row in rows}, bucket_sizes(parameters))


def codec_speed(spec: str) -> tuple[float, float]:
    """Processor seconds (to encode, to decode) a value, of numbers distributed as gradients are: most of them small."""
    return _speed(spec, _sample(_SAMPLE), _CAST_S, processor_s)


def _speeds_on(wire: DeviceWire, rows: Sequence[FidelityRow]) -> tuple[float, float, list[tuple[float, float]]]:
    """On the lane, in seconds of the device that wait for it: a message, from one small kernel to the next; a copy, of which
    there is none; `codec_speed` of kernels."""
    with wire.at_work():
        sample, word = wire.place(_sample(_DEVICE_SAMPLE)), wire.scratch("word", 1)
        takes_s = functools.partial(_device_s, wire.device)
        message_s = takes_s(lambda: [word.zero_() for _ in range(_LAUNCHES_PER_MESSAGE)])
        cast_s = takes_s(lambda: sample.to(torch.bfloat16)) / _DEVICE_SAMPLE
        return message_s, 0.0, [_speed(row.codec, sample, cast_s, takes_s) for row in rows]


def _speed(
    spec: str, sample: torch.Tensor, cast_s: float, takes_s: Callable[[Callable[[], object]], float]
) -> tuple[float, float]:
    if not spec:
        return cast_s, cast_s
    name, options = parse_spec(spec)
    n = sample.numel()
    try:
        codec = codecs.by_name(name, **options)
        room = torch.empty(codec.max_encoded_bytes(n, torch.float32), dtype=torch.uint8, device=sample.device)
        n_bytes = codec.encode(sample, room)  # on a device nobody knows it yet
        message = room if isinstance(n_bytes, torch.Tensor) else room[:n_bytes]
        out = torch.empty_like(sample)
        return takes_s(lambda: codec.encode(sample, room)) / n, takes_s(lambda: codec.decode(message, out)) / n
    except GradwireError:  # one that cannot be tried by itself: a trial will tell
        return cast_s, cast_s


def _sample(n_values: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = torch.exp2(-8 * torch.rand(n_values, generator=generator, dtype=torch.float32, device="cpu"))
    return torch.randn(n_values, generator=generator, dtype=torch.float32, device="cpu") * shape


def _device_s(device: torch.device, work: Callable[[], object]) -> float:
    """The device's seconds for what `work` enqueues, the best of three after a first one that loads the kernels."""
    work()
    return min(time_on(device, work) for _ in range(3))


def _copy_s(parameters: Sequence[torch.Tensor]) -> float:
    """Seconds a value from the device to pinned memory: on the lane, which waits. 0 where all are on the CPU."""
    if all(parameter.device.type == "cpu" for parameter in parameters):
        return 0.0
    on_device = torch.zeros(_DEVICE_SAMPLE, dtype=torch.float32, device=parameters[0].device)
    pinned = torch.empty(_DEVICE_SAMPLE, dtype=torch.float32, pin_memory=True, device="cpu")
    return _device_s(on_device.device, lambda: pinned.copy_(on_device, non_blocking=True)) / _DEVICE_SAMPLE


def _machine_of(communicator: Communicator) -> SharedCores:
    """Find how many ranks share how many cores, where it is worst; on the lane, every rank."""
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if communicator.world_size == 1:
        return SharedCores(1, 1, n_cores)
    host = int.from_bytes(machine_id().encode()[:7], "little")
    mine = torch.tensor([host, n_cores], dtype=torch.int64, device="cpu")
    hosts = communicator.all_gather(mine).tolist()
    n_on = Counter(name for name, _ in hosts)
    name, n_cores = min(hosts, key=lambda host: (host[1] / n_on[host[0]], host))
    return SharedCores(communicator.world_size, n_on[name], n_cores)


def look_for_zeros(gradients: Iterable[torch.Tensor | None]) -> Callable[[], float]:
    """The share of the values that is not zero, by a sample spread over all of them; 1 where there is none to look at. Returns
    what says it, and waits for a device if gradients are on one, as this does not."""
    dense = [g.detach().view(-1) for g in gradients if g is not None and not g.is_sparse and g.is_contiguous()]
    stride = max(1, sum(values.numel() for values in dense) // _DENSITY_SAMPLE)
    samples = [values[::stride] for values in dense if values.numel()]
    n_values = sum(sample.numel() for sample in samples)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for sample in samples:
        by_device.setdefault(sample.device, []).append(torch.count_nonzero(sample))
    found = [Reading(torch.stack(counts).sum()) for counts in by_device.values()]
    return lambda: sum(int(reading.wait()) for reading in found) / n_values if n_values else 1.0


def bucket_sizes(parameters: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Values in DDP's buckets, as it cuts them: from the last parameter on, the first bucket small."""
    sizes, n_values, cap = [], 0, _FIRST_BUCKET_BYTES
    for parameter in reversed(list(parameters)):
        n_values += parameter.numel()
        if 4 * n_values >= cap:
            sizes.append(n_values)
            n_values, cap = 0, _BUCKET_BYTES
    if n_values or not sizes:
        sizes.append(n_values)
    return tuple(sizes)
