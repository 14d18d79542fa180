"""AQGB's control law: how many bits of each value to broadcast, so that communication is not waited for and no more.

Luo et al., "Approximate gradient synchronization with adaptive quantized gradient broadcast", sections 3 and 4. Where the
printed formulas contradict the paper's own examples, the examples are followed: the ratio is rate x time / size (4.3.1
prints a division by the time), the bound that the paper calls upper is a floor, and the second stage has none.

All sizes are in bits, all times in seconds on the caller's clock. Hosts' clocks differ, so ranks tell each other how much
time *remains*, never a moment. No I/O and no clock: the live scheme and the simulator run the same law. Arguments are
trusted; options are checked where users give them.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

WORD_BITS = 32
MIN_BITS = 2  # a sign and one more: section 4.4
DEFAULT_FLOOR = 0.125  # 4 bits of 32, the paper's default
# Of the observed rate, what an observation of this many seconds leaves of those before it: 1/e. Long enough to average
# over a few messages, short enough to follow a link that changes within a round or two.
HORIZON_S = 0.5
# Rounds that the timetable is the median of: two odd ones among them change nothing.
PROFILED_ROUNDS = 5
# Two ranks of the small GPT with a core each, few bits: 0.26 to 0.37, for their communication's threads must wait for the
# training's core. There 12 bits a value took 172 ms a step and 4 took 123. Ranks with cores to spare are far below it.
DEFAULT_MAX_CONTENTION = 0.25
_INCREASE_BITS, _DECREASE = 2, 2
# Of what was seen before, the share that a new round leaves: single rounds jump, three of them do not.
_KEPT = 0.5


# ---- ratios and bits


def first_stage_ratio(
    rate_bps: float, remaining_s: float | None, undelivered_bits: float, floor: float = DEFAULT_FLOOR
) -> float:
    """q1, in [floor, 1]: the share of its bits that each value is sent with before the next block appears (section 4.3.1).

    `rate_bps` is b(t), what every receiver gets of this sender; `remaining_s` the time until the next block appears, negative
    if it is late, None if none will; `undelivered_bits` u(t), the original size of what was generated and not delivered.
    """
    if remaining_s is None or remaining_s <= 0:
        return floor
    return max(floor, _share_in_time(rate_bps, remaining_s, undelivered_bits))


def second_stage_ratio(rate_bps: float, remaining_s: float, remaining_bits: float) -> float:
    """q2, in [0, 1]: the share of u(g_j^S), a block's remaining bits, that is sent before its forward pass (section
    4.3.2). Without a floor: where no time is left, nothing is sent."""
    return 0.0 if remaining_s <= 0 else _share_in_time(rate_bps, remaining_s, remaining_bits)


def second_stage_bits(rate_bps: float, remaining_s: float, n_values: int, sent_bits: int) -> int:
    """ceil(q2 (32 - L_F)): how many bits more of each of a block's `n_values` to send, in 0..32 - sent_bits."""
    left_bits = WORD_BITS - sent_bits
    return math.ceil(second_stage_ratio(rate_bps, remaining_s, n_values * left_bits) * left_bits)


def bits_of_ratio(ratio: float) -> int:
    """L_F = ceil(32 ratio), at least MIN_BITS."""
    return max(MIN_BITS, math.ceil(WORD_BITS * ratio))


def _share_in_time(rate_bps: float, seconds: float, bits: float) -> float:
    """The share of `bits` that passes in `seconds`, at most 1."""
    passing = rate_bps * seconds
    return 1.0 if passing >= bits else passing / bits


class RateEstimate:
    """b(t): bits a second that every receiver acknowledges, from bursts in which the sender had enough to send.

    Feed it what the *slowest* receiver acknowledges; a fan-out by unicast is slower by the number of receivers all by
    itself. Older bursts fade as newer ones come, by their duration: idle time does not count.
    """

    def __init__(self) -> None:
        self._bits = self._seconds = 0.0

    def observe(self, acknowledged_bits: float, duration_s: float) -> None:
        """One burst. A burst of no duration (a clock too coarse for it) is left out."""
        if duration_s > 0:
            kept = math.exp(-duration_s / HORIZON_S)
            self._bits = kept * self._bits + acknowledged_bits
            self._seconds = kept * self._seconds + duration_s

    @property
    def rate_bps(self) -> float:
        """0 as long as nothing is known, with which the ratios fall to their floors."""
        return self._bits / self._seconds if self._seconds > 0 else 0.0


# ---- deadlines


@dataclass(frozen=True)
class Timetable:
    """The times that a rank computes from one event of a round to the next; waiting for communication is not in them.

    Attributes:
        backward_s: [k] until the k-th block's gradient appears, from the one before; [0] from the start of the backward
            pass. In the order in which gradients appear.
        turnaround_s: from the last gradient to the start of the next forward pass.
        forward_s: [j] from the start of the j-th block's forward pass to the next block's; in the order of use.
    """

    backward_s: tuple[float, ...]
    turnaround_s: float
    forward_s: tuple[float, ...]

    @cached_property
    def _until_start_s(self) -> list[float]:
        """[k] from the k-th gradient to the start of the next forward pass; [0] from the start of the backward pass."""
        return [sum(self.backward_s[k:]) + self.turnaround_s for k in range(len(self.backward_s) + 1)]

    @cached_property
    def _after_start_s(self) -> list[float]:
        return [sum(self.forward_s[:j]) for j in range(len(self.forward_s))]

    def until_next_gradient(self, n_appeared: int, since_last_s: float) -> float | None:
        """Seconds until the next gradient, `since_last_s` after the last one; negative if late, None if all appeared."""
        return None if n_appeared == len(self.backward_s) else self.backward_s[n_appeared] - since_last_s

    def until_forward(self, n_appeared: int, since_last_s: float) -> list[float]:
        """Seconds until each block's forward pass, in the order of use, if nothing is waited for."""
        start_s = self._until_start_s[n_appeared] - since_last_s
        return [start_s + seconds for seconds in self._after_start_s]


class Profile:
    """The timetable of the last rounds: the median of each duration, so that one odd round changes nothing."""

    def __init__(self) -> None:
        self._rounds: deque[Timetable] = deque(maxlen=PROFILED_ROUNDS)
        self.timetable: Timetable | None = None  # before the first round

    def add(self, measured: Timetable) -> None:
        """Take one round's durations; of as many blocks as the rounds before."""
        self._rounds.append(measured)
        backward = zip(*(one.backward_s for one in self._rounds), strict=True)
        forward = zip(*(one.forward_s for one in self._rounds), strict=True)
        self.timetable = Timetable(
            tuple(map(median, backward)),
            median(one.turnaround_s for one in self._rounds),
            tuple(map(median, forward)),
        )


class Deadlines:
    """t_j^FP of every block: the latest of all ranks' estimates, each told as the time that remains."""

    def __init__(self, n_ranks: int) -> None:
        self._moments: list[list[float] | None] = [None] * n_ranks

    def tell(self, rank: int, remaining_s: Sequence[float], now_s: float) -> None:
        """Take what `rank` said at `now_s` of every block; its latest word counts."""
        self._moments[rank] = [now_s + seconds for seconds in remaining_s]

    def remaining_s(self, block: int, now_s: float) -> float | None:
        """Seconds until the last rank needs `block`, negative if all should have it; None if no rank has spoken."""
        moments = [moment[block] for moment in self._moments if moment is not None]
        return max(moments) - now_s if moments else None


# ---- cores


class BitCeiling:
    """Bounds the bits of a value to those that the ranks' processors have time for; the paper has no such bound.

    AQGB fills the network and takes bytes to cost nothing else. Where ranks share cores, encoding, adding and copying them
    takes time away from the training itself. The sign of it is threads that could run and wait for a core, which the operating
    system counts. Unlike a longer step it needs no reference and says what the cause is: a slow network, or another rank, lets
    threads sleep instead.

    The ceiling begins at the floor and doubles every round until contention is met, so that nothing is overrun in the first
    rounds; from then on it halves where contention is above `max_contention` (with 1 nothing is ever too much), and rises by
    two bits where it is not. All ranks use the lowest of their ceilings.
    """

    def __init__(
        self, floor_bits: int, most_bits: int = WORD_BITS, max_contention: float = DEFAULT_MAX_CONTENTION
    ) -> None:
        self._floor_bits, self._most_bits, self._max_contention = floor_bits, most_bits, max_contention
        self._contention: float | None = None
        self._has_met = self._is_settling = False
        self.bits = floor_bits

    @property
    def contention(self) -> float:
        """The share of the time in which threads could run that they waited for a core; 0 as long as nothing is known."""
        return self._contention or 0.0

    def observe(self, running_s: float, waiting_s: float, agreed_bits: int) -> None:
        """One round, that was sent with at most `agreed_bits`, the lowest ceiling of all ranks: how long threads of this rank
        ran, and waited for a core although they could run."""
        if running_s + waiting_s > 0:
            seen = waiting_s / (running_s + waiting_s)
            self._contention = seen if self._contention is None else _KEPT * self._contention + (1 - _KEPT) * seen
        # From what was really sent: a rank that saw no contention must not run away from those that did.
        bits = min(self.bits, agreed_bits)
        if bits < self.bits:
            self._has_met = True
        if self._is_settling:  # what was sent before the last decrease is still in this round
            self._is_settling = False
        elif self.contention > self._max_contention:
            self._has_met = self._is_settling = True
            bits //= _DECREASE
        else:
            bits = min(self._most_bits, bits + _INCREASE_BITS if self._has_met else _DECREASE * bits)
        self.bits = max(self._floor_bits, bits)
