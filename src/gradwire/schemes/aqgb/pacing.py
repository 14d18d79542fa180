"""The live side of AQGB's control law: keeps the time, what peers acknowledge, and the deadlines; says how many bits.

Thread-safe: the training thread notes events, receivers what heads say, the lane asks for bits.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradwire.control.checks import finite, share
from gradwire.control.contention import DEFAULT_MAX_CONTENTION, BitCeiling
from gradwire.control.quantisation import (
    DEFAULT_FLOOR,
    MIN_BITS,
    WORD_BITS,
    Deadlines,
    Profile,
    RateEstimate,
    Timetable,
    bits_of_ratio,
    first_stage_bits,
    second_stage_bits,
)
from gradwire.errors import InvalidArgument
from gradwire.schemes.aqgb.core_times import CoreTimes

_log = logging.getLogger(__name__)

Clock = Callable[[], float]

# Times and rates vary from round to round; planning with all of the estimated rate would miss every second deadline.
DEFAULT_CONFIDENCE = 0.8


@dataclass(frozen=True)
class PacingLimits:
    """The shares that a rank plans by, each above 0 and at most 1.

    Attributes:
        floor, ceiling: the least and the largest share of its 32 bits that a value is sent with.
        confidence: of the estimated rate, what is counted on.
        max_contention: see BitCeiling.
    Raises: InvalidArgument.
    """

    floor: float = DEFAULT_FLOOR
    ceiling: float = 1.0
    confidence: float = DEFAULT_CONFIDENCE
    max_contention: float = DEFAULT_MAX_CONTENTION

    def __post_init__(self) -> None:
        for name in ("floor", "ceiling", "confidence", "max_contention"):
            share(name, getattr(self, name))
        if self.floor > self.ceiling or WORD_BITS * self.ceiling < MIN_BITS:
            raise InvalidArgument(
                f"floor={self.floor} and ceiling={self.ceiling} leave no number of bits from {MIN_BITS} to 32"
            )


class Pacing:
    """Decides for one rank.

    Args:
        clock: seconds; must not run backwards.
        initial_bps: the rate to begin with; None: the floor, until one is known.
        core_times: how long threads ran and waited for a core; without it, or where it knows nothing, bits are bounded by
            the network alone.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        block_elements: Sequence[int],
        clock: Clock,
        limits: PacingLimits = PacingLimits(),
        initial_bps: float | None = None,
        core_times: CoreTimes | None = None,
    ) -> None:
        self._rank, self._world_size, self._sizes = rank, world_size, tuple(block_elements)
        self._clock, self._limits = clock, limits
        n_blocks = len(self._sizes)
        self._lock = threading.RLock()
        self._rates = {peer: RateEstimate(initial_bps) for peer in range(world_size) if peer != rank}
        self._acknowledged = dict.fromkeys(self._rates, (0, 0))  # bytes, microseconds
        self._profile = Profile(n_blocks)
        self._deadlines = Deadlines(n_blocks, world_size)
        self._last_s = 0.0
        self._sent_bits = 0  # to each receiver, since attaching
        self._busy_until_s = 0.0  # when what was sent will have arrived, as far as we know
        self.order = list(range(n_blocks))  # blocks in the order of use
        self._appeared: list[tuple[int, float]] = []
        self._forward: list[tuple[int, float, float]] = []  # block, arrival, waited
        self._forward_began: float | None = None
        self._last_gradient_s: float | None = None
        self._core_times = core_times
        self._core_times_before = None if core_times is None else core_times()
        self._processors: BitCeiling | None = None
        if self._core_times_before is not None:
            floor_bits = min(bits_of_ratio(limits.floor), self.most_bits)
            self._processors = BitCeiling(floor_bits, self.most_bits, limits.max_contention)
        self._told_ceilings: dict[int, int] = {}
        self.ceiling_bits = self._lowest_ceiling()
        self._n_rounds_held = 0

    def now(self) -> float:
        """The clock's time. Raises: InvalidArgument (it ran backwards, or is not finite)."""
        with self._lock:
            now_s = finite("the clock", self._clock())
            if now_s < self._last_s:
                raise InvalidArgument(
                    f"the clock jumped back from {self._last_s:.6f} s to {now_s:.6f} s: pass one that does not, such as "
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
            if self._forward_began is not None and all(block != noted for noted, _, _ in self._forward):
                self._forward.append((block, arrived_s, waited_s))

    def note_gradient(self, block: int) -> None:
        """This rank's gradient of `block` is there."""
        with self._lock:
            now_s = self.now()
            self._appeared.append((block, now_s))
            self._last_gradient_s = now_s

    def begin_step(self) -> None:
        """The first gradient of a round is about to appear: the round before is complete."""
        with self._lock:
            self._learn_round()
            self._learn_contention()
            self._appeared, self._forward, self._forward_began = [], [], None

    def _learn_round(self) -> None:
        n_blocks = len(self._sizes)
        if len(self._appeared) < n_blocks or len(self._forward) < n_blocks or self._forward_began is None:
            return
        moments = [moment for _, moment in self._appeared]
        turnaround_s = self._forward_began - moments[-1]
        if turnaround_s < 0:
            return
        self.order = [block for block, _, _ in self._forward]
        # Computation from one block to the next; the last one's end is not seen, and nothing depends on it.
        ends = [arrived for _, arrived, _ in self._forward[1:]] + [self._forward[-1][1] + self._forward[-1][2]]
        forward_s = [
            max(0.0, end - arrived - waited) for (_, arrived, waited), end in zip(self._forward, ends, strict=True)
        ]
        backward_s = [0.0] + [b - a for a, b in itertools.pairwise(moments)]
        self._profile.add(Timetable(tuple(backward_s), turnaround_s, tuple(forward_s)))

    def _learn_contention(self) -> None:
        """How the processors fared in the round that is over, and how many bits this one may have of them."""
        if self._processors is None or self._core_times is None or self._core_times_before is None:
            return
        now = self._core_times()
        if now is not None:
            running_s, waiting_s = (max(0.0, b - a) for a, b in zip(self._core_times_before, now, strict=True))
            self._processors.observe(running_s, waiting_s, self.ceiling_bits)
            self._core_times_before = now
        self.ceiling_bits = self._lowest_ceiling()
        self._note_if_held()

    def _note_if_held(self) -> None:
        """Count rounds whose bits processors bound and not the network; the first one is told."""
        assert self._processors is not None
        if self.ceiling_bits >= self.most_bits or self._processors.contention <= self._limits.max_contention:
            return
        if not self._n_rounds_held:
            _log.warning(
                "gradwire aqgb: threads that could run wait for a core (%.0f %% of their time, max_contention is %.0f %%), so "
                "at most %d bits of a value are sent; give ranks cores of their own, or raise max_contention",
                100 * self._processors.contention, 100 * self._limits.max_contention, self.ceiling_bits,
            )  # fmt: skip
        self._n_rounds_held += 1

    def _lowest_ceiling(self) -> int:
        return min([self.own_ceiling_bits, *self._told_ceilings.values()])

    @property
    def own_ceiling_bits(self) -> int:
        """How many bits of a value this rank's processors have time for; all ranks use the lowest, `ceiling_bits`."""
        return self.most_bits if self._processors is None else self._processors.bits

    def figures(self) -> dict[str, float]:
        """What bounds the bits: b, the ceiling of all ranks, and this rank's contention for cores (see BitCeiling)."""
        contention = 0.0 if self._processors is None else self._processors.contention
        return {
            "acknowledged_bps": self.rate_bps,
            "ceiling_bits": float(self.ceiling_bits),
            "contention": contention,
            "rounds_held": float(self._n_rounds_held),
        }

    # ---- what peers say

    def hear(
        self,
        peer: int,
        received_bytes: int,
        receiving_us: int,
        remaining_s: Sequence[float] | None,
        ceiling_bits: int = WORD_BITS,
    ) -> None:
        """What a head of `peer` acknowledges of this rank's bodies, when `peer` needs its blocks, and its own ceiling."""
        with self._lock:
            self._told_ceilings[peer] = max(ceiling_bits, MIN_BITS)
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
        """What is on its way takes as long as the new rate says, and is no more than what was not acknowledged."""
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
        """How long the network is busy with what was sent, as far as we know."""
        with self._lock:
            return max(0.0, self._busy_until_s - self.now())

    # ---- decisions

    def bits_now(self, unsent_elements: int) -> int:
        """L_F of the next message, where `unsent_elements` values of all blocks wait to be sent."""
        with self._lock:
            now_s = self.now()
            remaining_s = None
            timetable = self._profile.timetable()
            if timetable is not None and self._last_gradient_s is not None:
                remaining_s = timetable.until_next_gradient(len(self._appeared), now_s - self._last_gradient_s)
            if remaining_s is not None:
                remaining_s -= max(0.0, self._busy_until_s - now_s)
            rate = self._limits.confidence * self.rate_bps
            bits = first_stage_bits(rate, remaining_s, WORD_BITS * unsent_elements, self._limits.floor)
            return min(bits, self.ceiling_bits)

    def more_bits(self, block: int, sent_bits: int, extra_bytes: int = 0) -> int:
        """How many bits more of `block` pass until it is needed, after `extra_bytes` that are about to be sent."""
        with self._lock:
            now_s, rate = self.now(), self._limits.confidence * self.rate_bps
            mine = self.remaining_s()
            if mine is None or rate <= 0 or sent_bits >= self.ceiling_bits:
                return 0
            self._deadlines.tell(self._rank, mine, now_s)
            remaining_s = self._deadlines.remaining_s(block, now_s)
            assert remaining_s is not None  # this rank has spoken
            remaining_s -= max(0.0, self._busy_until_s - now_s) + 8 * extra_bytes / rate
            more = second_stage_bits(rate, remaining_s, self._sizes[block], sent_bits)
            return min(more, self.ceiling_bits - sent_bits)

    def told_remaining_s(self) -> list[float] | None:
        """`remaining_s` as it will be when a head that is sent now arrives, behind what is on its way before it.

        Receivers count from its arrival: without this a full queue puts every deadline off by its own length.
        """
        with self._lock:
            remaining, ahead_s = self.remaining_s(), self.ahead_s()
            return None if remaining is None else [seconds - ahead_s for seconds in remaining]

    @property
    def most_bits(self) -> int:
        """Bits of a value that are ever sent."""
        return int(WORD_BITS * self._limits.ceiling)

    def remaining_s(self) -> list[float] | None:
        """[block] until this rank's next forward pass needs it; None before the first whole round."""
        with self._lock:
            timetable = self._profile.timetable()
            if timetable is None or self._last_gradient_s is None:
                return None
            in_order = timetable.until_forward(len(self._appeared), self.now() - self._last_gradient_s)
            remaining = [0.0] * len(in_order)
            for block, seconds in zip(self.order, in_order, strict=True):
                remaining[block] = seconds
            return remaining
