"""How long a step takes under a scheme that has not run on this network: three activities that share what there is.

The computation hands over buckets at known times. The lane encodes and decodes, one bucket after another; the wire is one
link, whoever uses it. Computation and lane share cores where ranks share a machine. Every number is "wall time while all
ranks do the same", which is how it is measured and how it is meant. Against 85 cells measured on 2026-11-22 (24 schemes,
two models, three networks): median error 9 %, 90th percentile 21 %. That is too much to decide by and enough to know what
to try.

Pure: no clock and no I/O. Seconds, bytes, and bytes a second of payload. Only + - * / and comparisons, so that ranks that
share the inputs share the outputs, but for `break_even_rate`, which is for people.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradwire.errors import InvalidArgument

__all__ = [
    "SHAPES",
    "BucketLoad",
    "CodecCost",
    "LinkCost",
    "SharedCores",
    "StepCost",
    "break_even_rate",
    "predict_s",
    "step_time_s",
]

# sum: the backend's all-reduce of the codec's output. agreed-sum: a small maximum over the ranks before it. ring, direct:
# frames, encoded and decoded while others travel. quantised: to the owners of the parts and back. gather: all to all.
SHAPES = ("sum", "agreed-sum", "ring", "direct", "quantised", "gather")

# As the collectives cut (exchange/parts.py); a floor may not import them, a test compares.
_CHUNK, _QUANTISED_CHUNK, _MIN_CHUNK = 1 << 17, 1 << 20, 1 << 16
_MIN_CHUNKS, _MIN_QUANTISED_CHUNKS = 5, 2

_NOTHING = 1e-9  # seconds: what rounding may leave of a time
_SLOWEST, _FASTEST = 1e5, 12.5e9  # bytes/s between which a break-even rate is looked for: 0.8 Mb/s to 100 Gb/s


@dataclass(frozen=True)
class SharedCores:
    """`n_local` of `n_ranks` ranks share `n_cores`."""

    n_ranks: int
    n_local: int
    n_cores: int

    @property
    def share(self) -> float:
        """Speed of each of a rank's two busy threads, relative to one alone."""
        return min(1.0, max(0.5, self.n_cores / self.n_local / 2))


@dataclass(frozen=True)
class LinkCost:
    """What messages cost.

    Attributes:
        rate: bytes/s that a rank sends, and receives, while all do.
        backend_hop_s: one of the 2 (N-1) hops of the backend's all-reduce, without its bytes.
        frame_hop_s: a message of frames that somebody waits for.
        message_s: processor time of each message of frames, both ends.
        gather_s: an all-gather of next to nothing.
        byte_s: processor time of a byte moved.
    """

    rate: float
    backend_hop_s: float
    frame_hop_s: float
    message_s: float
    gather_s: float
    byte_s: float = 0.0


@dataclass(frozen=True)
class StepCost:
    """A step without communication: how long it computes, and each bucket's (values, when it is ready)."""

    compute_s: float
    buckets: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class CodecCost:
    """Seconds a value to encode and to decode, bits a value on the wire, seconds a bucket whatever its size.

    `zero_bits`: of a value that is zero; None: as many as of any other.
    """

    encode_s: float = 0.0
    decode_s: float = 0.0
    bits: float = 32.0
    fixed_s: float = 0.0
    zero_bits: float | None = None

    def at(self, density: float) -> CodecCost:
        """The cost where a share `density` of the values is not zero."""
        if self.zero_bits is None:
            return self
        return replace(self, bits=density * self.bits + (1 - density) * self.zero_bits, zero_bits=None)


@dataclass(frozen=True)
class BucketLoad:
    """What one bucket asks for: the lane for `before_s`, then `wire_bytes` and `latency_s` of the wire with `beside_s` of
    lane work in `n_chunks` pieces meanwhile, then the lane for `after_s`. `is_async`: the lane is free meanwhile."""

    before_s: float
    wire_bytes: float
    latency_s: float
    beside_s: float
    n_chunks: int
    after_s: float
    is_async: bool


def bucket_load(shape: str, n_values: int, codec: CodecCost, link: LinkCost, machine: SharedCores) -> BucketLoad:
    """What a bucket of `n_values` asks for. Raises: InvalidArgument (no such shape)."""
    n = machine.n_ranks
    if shape not in SHAPES:
        raise InvalidArgument(f"a communication shape is one of {', '.join(SHAPES)}, not {shape!r}")
    if n == 1:
        return BucketLoad(0, 0, 0, 0, 1, 0, True)
    message_bytes = n_values * codec.bits / 8
    ring_bytes = 2 * (n - 1) / n * message_bytes
    encode_s = codec.encode_s * n_values + codec.fixed_s
    decode_s = codec.decode_s * n_values
    part = -(-n_values // n)
    if shape == "sum":
        return BucketLoad(encode_s, ring_bytes, 2 * (n - 1) * link.backend_hop_s, 0, 1, decode_s, True)
    if shape == "agreed-sum":
        return BucketLoad(encode_s, ring_bytes, 4 * (n - 1) * link.backend_hop_s, 0, 1, decode_s, False)
    if shape == "gather":
        return BucketLoad(encode_s, (n - 1) * message_bytes, link.gather_s, 0, 1, decode_s, False)
    if shape == "quantised":
        chunks = _count_chunks(part, _QUANTISED_CHUNK, _MIN_QUANTISED_CHUNKS)
        messages_s = (n - 1) * (2 * chunks + 2) * link.message_s
        after_s = encode_s / 2 + decode_s
        return BucketLoad(encode_s / 2, ring_bytes, 3 * link.frame_hop_s, messages_s, chunks, after_s, False)
    chunks = _count_chunks(part, _CHUNK, _MIN_CHUNKS)
    beside_s = encode_s + decode_s + 2 * (n - 1) * chunks * link.message_s
    hops = 2 * (n - 1) if shape == "ring" else 2
    return BucketLoad(0, ring_bytes, hops * link.frame_hop_s, beside_s, chunks, 0, False)


def _count_chunks(part: int, chunk: int, at_least: int) -> int:
    return max(1, -(-part // chunk), min(at_least, part // _MIN_CHUNK))


@dataclass
class _OnLane:
    """A bucket's turn on the lane: processor work, and of the wire what the lane waits for."""

    bucket: int
    phase: str  # before, wire, tail, after
    work_s: float
    wire_s: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.work_s <= _NOTHING and self.wire_s <= _NOTHING


class _Run:
    """One step, from event to event."""

    def __init__(self, step: StepCost, loads: Sequence[BucketLoad], link: LinkCost, machine: SharedCores) -> None:
        self.step, self.loads, self.link = step, loads, link
        self.share = machine.share
        # Where cores are shared, moving bytes takes the computation's time.
        self.drag = min(0.9, link.byte_s * link.rate) if self.share < 1 else 0.0
        self.now = self.computed = 0.0
        self.n_handed_over = 0
        self.lane: deque[_OnLane] = deque()
        self.wire: deque[list[float]] = deque()  # of async buckets: [seconds left, bucket]
        self.compute_ended: float | None = None

    def finish(self) -> tuple[float, float]:
        while True:
            is_computing = self.computed < self.step.compute_s - _NOTHING
            if not is_computing and self.compute_ended is None:
                self.compute_ended = self.now
            self._hand_over(is_computing)
            self._pass_on()
            if not is_computing and not self.lane and not self.wire:
                assert self.compute_ended is not None
                return self.now, self.now - self.compute_ended
            self._advance(is_computing)
            self._pass_on()

    def _hand_over(self, is_computing: bool) -> None:
        while self.n_handed_over < len(self.loads):
            ready_s = min(self.step.buckets[self.n_handed_over][1], self.step.compute_s)
            if is_computing and self.computed < ready_s - _NOTHING:
                return
            self.lane.append(_OnLane(self.n_handed_over, "before", self.loads[self.n_handed_over].before_s))
            self.n_handed_over += 1

    def _advance(self, is_computing: bool) -> None:
        """To whatever ends next."""
        head = self.lane[0] if self.lane else None
        works = head is not None and head.work_s > _NOTHING
        lane_waits = head is not None and head.wire_s > _NOTHING
        is_busy = lane_waits or bool(self.wire)
        speed = (self.share if works else 1.0) * (1 - self.drag if is_busy else 1.0)
        lane_speed = self.share if is_computing else 1.0
        wire_speed = 0.5 if lane_waits and self.wire else 1.0  # one link for both
        ends = []
        if is_computing:
            ends.append((self.step.compute_s - self.computed) / speed)
            if self.n_handed_over < len(self.loads):
                ends.append(max(0.0, (self.step.buckets[self.n_handed_over][1] - self.computed) / speed))
        if head is not None and works:
            ends.append(head.work_s / lane_speed)
        if head is not None and lane_waits:
            ends.append(head.wire_s / wire_speed)
        if self.wire:
            ends.append(self.wire[0][0] / wire_speed)
        passed = min(ends, default=0.0)
        self.now += passed
        if is_computing:
            self.computed += passed * speed
        if head is not None and works:
            head.work_s -= passed * lane_speed
        if head is not None and lane_waits:
            head.wire_s -= passed * wire_speed
        if self.wire:
            self.wire[0][0] -= passed * wire_speed

    def _pass_on(self) -> None:
        """Whatever has ended makes room for what follows it."""
        while self.wire and self.wire[0][0] <= _NOTHING:
            bucket = int(self.wire.popleft()[1])
            self.lane.append(_OnLane(bucket, "after", self.loads[bucket].after_s))
        while self.lane and self.lane[0].is_over:
            ended = self.lane.popleft()
            load = self.loads[ended.bucket]
            if ended.phase == "before":
                wire_s = load.wire_bytes / self.link.rate
                if load.is_async:
                    self.wire.append([wire_s + load.latency_s, float(ended.bucket)])
                    continue
                self.lane.appendleft(_OnLane(ended.bucket, "wire", load.beside_s, wire_s + load.latency_s))
            elif ended.phase == "wire":
                # The first chunk cannot travel before it is encoded, nor the last be decoded before it is there.
                tail_s = min(load.wire_bytes / self.link.rate, load.beside_s) / load.n_chunks
                self.lane.appendleft(_OnLane(ended.bucket, "tail", 0.0, tail_s))
            elif ended.phase == "tail":
                self.lane.appendleft(_OnLane(ended.bucket, "after", load.after_s))


def step_time_s(
    step: StepCost, loads: Sequence[BucketLoad], link: LinkCost, machine: SharedCores
) -> tuple[float, float]:
    """(how long the step takes, how much of it comes after the computation)."""
    return _Run(step, loads, link, machine).finish()


def predict_s(shape: str, codec: CodecCost, step: StepCost, link: LinkCost, machine: SharedCores) -> float:
    """How long the step takes under a scheme of this shape and codec. Raises: InvalidArgument (no such shape)."""
    loads = [bucket_load(shape, n_values, codec, link, machine) for n_values, _ in step.buckets]
    return step_time_s(step, loads, link, machine)[0]


def break_even_rate(
    shape: str, codec: CodecCost, step: StepCost, link: LinkCost, machine: SharedCores, margin: float = 1.0
) -> float | None:
    """The link rate in bytes/s from which on the scheme is no longer `margin` times as fast as plain.

    None: it never is; inf: it always is.
    """

    def gain_s(rate: float) -> float:
        there = replace(link, rate=rate)
        return predict_s("sum", CodecCost(), step, there, machine) - margin * predict_s(
            shape, codec, step, there, machine
        )

    low, high = _SLOWEST, _FASTEST
    if gain_s(low) <= 0:
        return None
    if gain_s(high) > 0:
        return math.inf
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain_s(middle) > 0 else (low, middle)
    return low
