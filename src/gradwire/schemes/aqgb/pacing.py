"""The live side of AQGB's control law: keeps the time, what peers acknowledge, and the deadlines; says how many bits.

Thread-safe: the training thread notes events, the receiver what heads say, the lane asks for bits.
"""

import itertools
import logging
import math
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradwire.checks import share
from gradwire.errors import InvalidArgument
from gradwire.schemes.aqgb import law

_log = logging.getLogger(__name__)

Clock = Callable[[], float]
# How long threads of this process ran, and waited for a core although they could run, in seconds since some moment; None
# where the system does not tell.
CoreTimes = Callable[[], tuple[float, float] | None]

# Times and rates vary from round to round; planning with all of the estimated rate would miss every second deadline.
DEFAULT_CONFIDENCE = 0.8
_TASKS = "/proc/self/task"


def read_core_times() -> tuple[float, float] | None:
    """Add up over the threads that live now; None where the system has no such numbers (not Linux). Cost: 10 to 20 us each."""
    running_ns = waiting_ns = 0
    try:
        for task in os.listdir(_TASKS):
            try:
                with open(f"{_TASKS}/{task}/schedstat", encoding="ascii") as file:
                    running, waiting, _ = file.read().split()
            except FileNotFoundError:
                continue  # it has ended since
            running_ns += int(running)
            waiting_ns += int(waiting)
    except (OSError, ValueError):
        return None
    return running_ns / 1e9, waiting_ns / 1e9


@dataclass(frozen=True)
class PacingLimits:
    """The shares that a rank plans by, each above 0 and at most 1.

    Attributes:
        floor, ceiling: the least and the largest share of its 32 bits that a value is sent with.
        confidence: the share of the estimated rate that is planned with.
        max_contention: of the time in which threads could run, the share that they may wait for a core before fewer bits
            are sent (law.BitCeiling); 1: bits are bounded by the network alone, as in the paper.
    Raises: InvalidArgument.
    """

    floor: float = law.DEFAULT_FLOOR
    ceiling: float = 1.0
    confidence: float = DEFAULT_CONFIDENCE
    max_contention: float = law.DEFAULT_MAX_CONTENTION

    def __post_init__(self) -> None:
        for name in ("floor", "ceiling", "confidence", "max_contention"):
            share(name, getattr(self, name))
        if self.floor > self.ceiling or law.WORD_BITS * self.ceiling < law.MIN_BITS:
            raise InvalidArgument(
                f"floor={self.floor} and ceiling={self.ceiling} leave no number of bits from {law.MIN_BITS} to 32"
            )

    @property
    def most_bits(self) -> int:
        return int(law.WORD_BITS * self.ceiling)


class Pacing:
    """Decides for one rank.

    Without `core_times`, or where it knows nothing, bits are bounded by the network alone.

    Attributes:
        order: blocks in the order of use.
        sizes: `block_elements`, the values of each block that pass to a receiver.
        ceiling_bits: the lowest ceiling of all ranks, as of the beginning of this step.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        block_elements: Sequence[int],
        clock: Clock,
        limits: PacingLimits = PacingLimits(),
        core_times: CoreTimes | None = None,
    ) -> None:
        self._rank, self.sizes = rank, tuple(block_elements)
        self._clock, self._limits = clock, limits
        self._lock = threading.RLock()
        self._rates = {peer: law.RateEstimate() for peer in range(world_size) if peer != rank}
        self._acknowledged = dict.fromkeys(self._rates, (0, 0))  # bytes, microseconds
        self._profile = law.Profile()
        self._deadlines = law.Deadlines(world_size)
        self._last_s = 0.0
        self._sent_bits = 0  # to each receiver, since attaching
        self._busy_until_s = 0.0  # when what was sent will have arrived, as far as we know
        self.order = list(range(len(self.sizes)))
        self._appeared: list[float] = []  # when gradients did
        # By block: when its forward pass came to it, and how long it waited.
        self._forward: dict[int, tuple[float, float]] = {}
        self._forward_began: float | None = None
        self._last_gradient_s: float | None = None
        self._core_times = core_times
        self._core_times_before = None if core_times is None else core_times()
        is_bounded = self._core_times_before is not None
        floor_bits = min(law.bits_of_ratio(limits.floor), limits.most_bits) if is_bounded else limits.most_bits
        self._processors = law.BitCeiling(floor_bits, limits.most_bits, limits.max_contention)
        self._told_ceilings: dict[int, int] = {}
        self.ceiling_bits = self.own_ceiling_bits
        self.n_rounds_held = 0

    def now(self) -> float:
        """The clock's time. Raises: InvalidArgument (it ran backwards, or is not finite)."""
        with self._lock:
            now_s = self._clock()
            if not math.isfinite(now_s) or now_s < self._last_s:
                raise InvalidArgument(
                    f"the clock jumped from {self._last_s:.6f} s to {now_s:.6f} s: pass one that does not, such as "
                    "time.perf_counter"
                )
            self._last_s = now_s
            return now_s

    # ---- events of a round

    def begin_forward(self) -> None:
        """A forward pass in training begins; of several in one round (accumulation) the first one counts."""
        with self._lock:
            if self._forward_began is None:
                self._forward_began = self.now()

    def note_forward(self, block: int, arrived_s: float, waited_s: float) -> None:
        """The forward pass came to `block`, and stood still for it."""
        with self._lock:
            if self._forward_began is not None:
                self._forward.setdefault(block, (arrived_s, waited_s))

    def note_gradient(self) -> None:
        with self._lock:
            self._last_gradient_s = self.now()
            self._appeared.append(self._last_gradient_s)

    def begin_step(self) -> None:
        """The first gradient of a round is about to appear: the round before is complete."""
        with self._lock:
            self._learn_round()
            self._learn_contention()
            self._appeared, self._forward, self._forward_began = [], {}, None

    def _learn_round(self) -> None:
        moments, n_blocks = self._appeared, len(self.sizes)
        if len(moments) < n_blocks or len(self._forward) < n_blocks or self._forward_began is None:
            return
        turnaround_s = self._forward_began - moments[-1]
        if turnaround_s < 0:
            return
        self.order = list(self._forward)
        # Computation from one block to the next; the last one's end is not seen, and nothing depends on it.
        forward = list(self._forward.values())
        last_arrived, last_waited = forward[-1]
        ends = [arrived for arrived, _ in forward[1:]] + [last_arrived + last_waited]
        forward_s = [max(0.0, end - arrived - waited) for (arrived, waited), end in zip(forward, ends, strict=True)]
        backward_s = [0.0] + [b - a for a, b in itertools.pairwise(moments)]
        self._profile.add(law.Timetable(tuple(backward_s), turnaround_s, tuple(forward_s)))

    def _learn_contention(self) -> None:
        """Take in how the processors fared in the round that is over; the bits of this one follow."""
        if self._core_times is None or self._core_times_before is None:
            return
        now = self._core_times()
        if now is not None:
            running_s, waiting_s = (max(0.0, b - a) for a, b in zip(self._core_times_before, now, strict=True))
            self._processors.observe(running_s, waiting_s, self.ceiling_bits)
            self._core_times_before = now
        self.ceiling_bits = min([self.own_ceiling_bits, *self._told_ceilings.values()])
        contention = self._processors.contention
        if self.ceiling_bits >= self._limits.most_bits or contention <= self._limits.max_contention:
            return
        if not self.n_rounds_held:
            _log.warning(
                "gradwire aqgb: threads that could run wait for a core (%.0f %% of their time, max_contention is %.0f %%), so "
                "at most %d bits of a value are sent; give ranks cores of their own, or raise max_contention",
                100 * contention, 100 * self._limits.max_contention, self.ceiling_bits,
            )  # fmt: skip
        self.n_rounds_held += 1

    @property
    def own_ceiling_bits(self) -> int:
        """The bits of a value that this rank's processors have time for; all ranks use the lowest, `ceiling_bits`."""
        return self._processors.bits

    def figures(self) -> dict[str, float]:
        """The bounds of the bits: b, the ceiling of all ranks, and this rank's contention for cores (see law.BitCeiling)."""
        return {
            "acknowledged_bps": self.rate_bps,
            "ceiling_bits": float(self.ceiling_bits),
            "contention": self._processors.contention,
            "rounds_held": float(self.n_rounds_held),
        }

    # ---- what peers say

    def hear(
        self,
        peer: int,
        received_bytes: int,
        receiving_us: int,
        remaining_s: Sequence[float] | None,
        ceiling_bits: int = law.WORD_BITS,
    ) -> None:
        """Take in a head of `peer`: what it has received of this rank's bodies, when it needs its blocks, its own ceiling."""
        with self._lock:
            self._told_ceilings[peer] = max(ceiling_bits, law.MIN_BITS)
            now_s = self.now()
            before_bytes, before_us = self._acknowledged[peer]
            if received_bytes >= before_bytes and receiving_us > before_us:
                rate_before = self.rate_bps
                self._rates[peer].observe(8 * (received_bytes - before_bytes), (receiving_us - before_us) / 1e6)
                self._acknowledged[peer] = (received_bytes, receiving_us)
                self._correct_busy(now_s, rate_before)
            if remaining_s is not None:
                self._deadlines.tell(peer, remaining_s, now_s)

    def _correct_busy(self, now_s: float, rate_before: float) -> None:
        """Have what is on its way take as long as the new rate says, and be no more than what was not acknowledged."""
        rate, left_s = self.rate_bps, max(0.0, self._busy_until_s - now_s)
        if rate > 0 and rate_before > 0:
            left_s *= rate_before / rate
            unacknowledged = self._sent_bits - 8 * min(n_bytes for n_bytes, _ in self._acknowledged.values())
            left_s = min(left_s, max(0, unacknowledged) / rate)
        self._busy_until_s = now_s + left_s

    @property
    def rate_bps(self) -> float:
        """b: what the slowest receiver gets."""
        with self._lock:
            return min((estimate.rate_bps for estimate in self._rates.values()), default=0.0)

    def sent(self, n_bytes: int) -> None:
        """A body was handed to the network, for every receiver."""
        with self._lock:
            now_s, rate = self.now(), self.rate_bps
            self._sent_bits += 8 * n_bytes
            if rate > 0:
                self._busy_until_s = max(self._busy_until_s, now_s) + 8 * n_bytes / rate

    def ahead_s(self) -> float:
        """Seconds that the network is busy with what was sent, as far as we know."""
        with self._lock:
            return max(0.0, self._busy_until_s - self.now())

    # ---- decisions

    def first_bits(self, unsent_elements: int) -> int:
        """Choose L_F, the bits of each value to send first, where `unsent_elements` values of all blocks wait to be sent."""
        with self._lock:
            now_s, timetable = self.now(), self._profile.timetable
            remaining_s = None
            if timetable is not None and self._last_gradient_s is not None:
                remaining_s = timetable.until_next_gradient(len(self._appeared), now_s - self._last_gradient_s)
            if remaining_s is not None:
                remaining_s -= max(0.0, self._busy_until_s - now_s)
            rate = self._limits.confidence * self.rate_bps
            ratio = law.first_stage_ratio(rate, remaining_s, law.WORD_BITS * unsent_elements, self._limits.floor)
            return min(law.bits_of_ratio(ratio), self.ceiling_bits)

    def more_bits(self, block: int, sent_bits: int, extra_bytes: int = 0) -> int:
        """Choose the bits more of `block` that pass until it is needed, after `extra_bytes` that are about to be sent."""
        with self._lock:
            now_s, rate = self.now(), self._limits.confidence * self.rate_bps
            mine = self.remaining_s()
            if mine is None or rate <= 0 or sent_bits >= self.ceiling_bits:
                return 0
            self._deadlines.tell(self._rank, mine, now_s)
            remaining_s = self._deadlines.remaining_s(block, now_s)
            assert remaining_s is not None  # this rank has spoken
            remaining_s -= max(0.0, self._busy_until_s - now_s) + 8 * extra_bytes / rate
            more = law.second_stage_bits(rate, remaining_s, self.sizes[block], sent_bits)
            return min(more, self.ceiling_bits - sent_bits)

    def told_remaining_s(self) -> list[float] | None:
        """`remaining_s` as it will be when a head that is sent now arrives, behind what is on its way before it.
        Receivers count from its arrival: without this a full queue puts every deadline off by its own length."""
        with self._lock:
            remaining, ahead_s = self.remaining_s(), self.ahead_s()
            return None if remaining is None else [seconds - ahead_s for seconds in remaining]

    def remaining_s(self) -> list[float] | None:
        """[block] until this rank's next forward pass needs it; None before the first whole round."""
        with self._lock:
            timetable = self._profile.timetable
            if timetable is None or self._last_gradient_s is None:
                return None
            in_order = timetable.until_forward(len(self._appeared), self.now() - self._last_gradient_s)
            remaining = [0.0] * len(in_order)
            for block, seconds in zip(self.order, in_order, strict=True):
                remaining[block] = seconds
            return remaining
