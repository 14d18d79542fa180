"""AQGB's control law: how many bits of each value to broadcast, so that communication is not waited for and no more.

Luo et al., "Approximate gradient synchronization with adaptive quantized gradient broadcast", sections 3 and 4. Where the
printed formulas contradict the paper's own examples, the examples are followed: the ratio is rate x time / size (4.3.1
prints a division by the time), the bound that the paper calls upper is a floor, and the second stage has none.

All sizes are in bits, all times in seconds on the caller's clock. Hosts' clocks differ, so ranks tell each other how much
time *remains*, never a moment.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from gradwire.control.checks import finite, share, whole
from gradwire.errors import InvalidArgument

WORD_BITS = 32
MIN_BITS = 2  # a sign and one more: section 4.4
DEFAULT_FLOOR = 0.125  # 4 bits of 32, the paper's default
# Of the observed rate, what an observation of this many seconds leaves of those before it: 1/e. Long enough to average
# over a few messages, short enough to follow a link that changes within a round or two.
DEFAULT_HORIZON_S = 0.5
# Rounds that the timetable is the median of: two odd ones among them change nothing.
PROFILED_ROUNDS = 5


# ---- ratios and bits


def first_stage_ratio(
    rate_bps: float, remaining_s: float | None, undelivered_bits: float, floor: float = DEFAULT_FLOOR
) -> float:
    """q1: which share of its bits each value is sent with before the next block appears (section 4.3.1).

    Args:
        rate_bps: b(t), bits a second that every receiver gets of this sender; 0 if nothing arrives.
        remaining_s: until the next block appears, negative if it is late; None if none will: the floor then.
        undelivered_bits: u(t), the original size of what has been generated and not delivered.
        floor: the least share, in (0, 1].
    Returns: in [floor, 1].
    Raises: InvalidArgument.
    """
    floor = share("floor", floor)
    rate_bps = finite("rate_bps", rate_bps, 0)
    undelivered_bits = finite("undelivered_bits", undelivered_bits, 0)
    if remaining_s is None or finite("remaining_s", remaining_s) <= 0:
        return floor
    return max(floor, _share_in_time(rate_bps, remaining_s, undelivered_bits))


def first_stage_bits(
    rate_bps: float, remaining_s: float | None, undelivered_bits: float, floor: float = DEFAULT_FLOOR
) -> int:
    """L_F = ceil(32 q1), in MIN_BITS..WORD_BITS. Arguments, errors: as `first_stage_ratio`."""
    return bits_of_ratio(first_stage_ratio(rate_bps, remaining_s, undelivered_bits, floor))


def second_stage_ratio(rate_bps: float, remaining_s: float, remaining_bits: float) -> float:
    """q2: which share of a block's remaining bits is sent before its forward pass (section 4.3.2).

    Without a floor: where no time is left, nothing is sent. Args: `remaining_bits`: u(g_j^S), what the first stage left
    out of the block. Returns: in [0, 1]. Raises: InvalidArgument.
    """
    rate_bps = finite("rate_bps", rate_bps, 0)
    remaining_bits = finite("remaining_bits", remaining_bits, 0)
    if finite("remaining_s", remaining_s) <= 0:
        return 0.0
    return _share_in_time(rate_bps, remaining_s, remaining_bits)


def second_stage_bits(rate_bps: float, remaining_s: float, n_values: int, sent_bits: int) -> int:
    """ceil(q2 (32 - L_F)): how many more bits of each of a block's `n_values` to send, in 0..32 - sent_bits.

    Raises: InvalidArgument.
    """
    n_values = whole("n_values", n_values, 0, 1 << 62)
    left_bits = WORD_BITS - whole("sent_bits", sent_bits, 0, WORD_BITS)
    return math.ceil(second_stage_ratio(rate_bps, remaining_s, n_values * left_bits) * left_bits)


def bits_of_ratio(ratio: float) -> int:
    """ceil(32 ratio), at least MIN_BITS. Raises: InvalidArgument (ratio not in (0, 1])."""
    return max(MIN_BITS, math.ceil(WORD_BITS * share("ratio", ratio)))


def _share_in_time(rate_bps: float, seconds: float, bits: float) -> float:
    """How much of `bits` passes in `seconds`, at most 1."""
    passing = rate_bps * seconds
    return 1.0 if passing >= bits else passing / bits


# ---- the rate


class RateEstimate:
    """b(t): bits a second that every receiver acknowledges, from bursts in which the sender had enough to send.

    Feed it what the *slowest* receiver acknowledges; a fan-out by unicast is slower by the number of receivers all by
    itself. Older bursts fade as newer ones come, by their duration: idle time does not count.
    """

    def __init__(self, initial_bps: float | None = None, horizon_s: float = DEFAULT_HORIZON_S) -> None:
        """Raises: InvalidArgument (a rate or horizon that is not positive)."""
        if initial_bps is not None and finite("initial_bps", initial_bps, 0) == 0:
            raise InvalidArgument("initial_bps must be positive, got 0; leave it out to begin with the floor")
        if finite("horizon_s", horizon_s, 0) == 0:
            raise InvalidArgument("horizon_s must be positive, got 0")
        self._horizon_s = horizon_s
        self._initial_bps = initial_bps
        self._bits = self._seconds = 0.0

    def observe(self, acknowledged_bits: float, duration_s: float) -> None:
        """One burst. A burst of no duration (a clock too coarse for it) is left out.

        Raises: InvalidArgument (negative or not finite: a clock that ran backwards).
        """
        finite("acknowledged_bits", acknowledged_bits, 0)
        if finite("duration_s", duration_s, 0) == 0:
            return
        kept = math.exp(-duration_s / self._horizon_s)
        self._bits = kept * self._bits + acknowledged_bits
        self._seconds = kept * self._seconds + duration_s

    @property
    def is_known(self) -> bool:
        """Whether anything was observed, or given to begin with."""
        return self._seconds > 0 or self._initial_bps is not None

    @property
    def rate_bps(self) -> float:
        """The estimate; 0 as long as nothing is known, with which the ratios fall to their floors."""
        if self._seconds > 0:
            return self._bits / self._seconds
        return self._initial_bps or 0.0


# ---- deadlines


@dataclass(frozen=True)
class Timetable:
    """How long a rank computes from one event of a round to the next; waiting for communication is not in it.

    Attributes:
        backward_s: [k] until the k-th block's gradient appears, from the one before; [0] from the start of the backward
            pass. In the order in which gradients appear.
        turnaround_s: from the last gradient to the start of the next forward pass.
        forward_s: [j] from the start of the j-th block's forward pass to the next block's; in the order of use.
    """

    backward_s: tuple[float, ...]
    turnaround_s: float
    forward_s: tuple[float, ...]

    def __post_init__(self) -> None:
        for seconds in (*self.backward_s, self.turnaround_s, *self.forward_s):
            finite("a duration of the timetable", seconds, 0)

    def until_next_gradient(self, n_appeared: int, since_last_s: float) -> float | None:
        """Seconds until the next gradient, `since_last_s` after the last one; negative if late, None if all appeared."""
        whole("n_appeared", n_appeared, 0, len(self.backward_s))
        finite("since_last_s", since_last_s)
        return None if n_appeared == len(self.backward_s) else self.backward_s[n_appeared] - since_last_s

    def until_forward(self, n_appeared: int, since_last_s: float) -> list[float]:
        """Seconds until each block's forward pass, in the order of use, if nothing is waited for."""
        whole("n_appeared", n_appeared, 0, len(self.backward_s))
        start_s = sum(self.backward_s[n_appeared:]) + self.turnaround_s - finite("since_last_s", since_last_s)
        return [start_s + sum(self.forward_s[:j]) for j in range(len(self.forward_s))]


class Profile:
    """The timetable of the last rounds: the median of each duration, so that one odd round changes nothing."""

    def __init__(self, n_blocks: int, n_rounds: int = PROFILED_ROUNDS) -> None:
        """`n_rounds`: how many to look back on. Raises: InvalidArgument."""
        whole("n_rounds", n_rounds, 1, 1 << 20)
        self._n_blocks = whole("n_blocks", n_blocks, 1, 1 << 20)
        self._rounds: deque[Timetable] = deque(maxlen=n_rounds)

    @property
    def n_rounds(self) -> int:
        """Rounds that are looked back on now."""
        return len(self._rounds)

    def add(self, measured: Timetable) -> None:
        """Take one round's durations. Raises: InvalidArgument (another number of blocks)."""
        if (len(measured.backward_s), len(measured.forward_s)) != (self._n_blocks, self._n_blocks):
            raise InvalidArgument(
                f"a timetable of {len(measured.backward_s)} gradients and {len(measured.forward_s)} forward passes "
                f"does not fit {self._n_blocks} blocks"
            )
        self._rounds.append(measured)

    def timetable(self) -> Timetable | None:
        """Medians; None before the first round."""
        if not self._rounds:
            return None
        backward = zip(*(one.backward_s for one in self._rounds), strict=True)
        forward = zip(*(one.forward_s for one in self._rounds), strict=True)
        return Timetable(
            tuple(median(seconds) for seconds in backward),
            median(one.turnaround_s for one in self._rounds),
            tuple(median(seconds) for seconds in forward),
        )


class Deadlines:
    """t_j^FP of every block: the latest of all ranks' estimates, each told as the time that remains."""

    def __init__(self, n_blocks: int, n_ranks: int) -> None:
        """Raises: InvalidArgument."""
        self._n_blocks = whole("n_blocks", n_blocks, 1, 1 << 20)
        whole("n_ranks", n_ranks, 1, 1 << 20)
        self._moments: list[list[float] | None] = [None] * n_ranks

    def tell(self, rank: int, remaining_s: Sequence[float], now_s: float) -> None:
        """What `rank` said at `now_s`; its latest word counts. Raises: InvalidArgument."""
        whole("rank", rank, 0, len(self._moments) - 1)
        finite("now_s", now_s)
        if len(remaining_s) != self._n_blocks:
            raise InvalidArgument(f"{len(remaining_s)} remaining times do not fit {self._n_blocks} blocks")
        self._moments[rank] = [now_s + finite("remaining_s", seconds) for seconds in remaining_s]

    def remaining_s(self, block: int, now_s: float) -> float | None:
        """Seconds until the last rank needs `block`, negative if all should have it; None if no rank has spoken."""
        whole("block", block, 0, self._n_blocks - 1)
        finite("now_s", now_s)
        moments = [moment[block] for moment in self._moments if moment is not None]
        return max(moments) - now_s if moments else None
