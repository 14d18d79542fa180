"""Whether a scheme at work takes another time than it did: looks at windows of its steps. Pure, as `racing.py` is."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.control.race import Limits
from gradwire.control.samples import is_beyond_noise, median, noise_of

_JUMP = 3  # steps in a row


@dataclass(frozen=True)
class Look:
    """What a window of steps says.

    Attributes:
        now_us, was_us: a step, and a step before.
        n_steps: how many of the last steps `now_us` is of.
        is_off: `now_us` is far off, which may be chance.
        has_drifted: it is no chance.
    """

    now_us: int
    was_us: int
    n_steps: int
    is_off: bool
    has_drifted: bool


class Drift:
    """Compares windows of one scheme's steps with what it took before.

    Attributes:
        reference_us: what a step takes, as far as known; 0 if it is not.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.begin(0)

    def begin(self, reference_us: int) -> None:
        """Another scheme is at work, or another network."""
        self.reference_us = reference_us
        self._window: list[int] = []
        self._last_window: list[int] = []
        self._n_off = self._n_sudden = 0

    def observe(self, time_us: int, look_now: bool) -> Look | None:
        """One more step; a look once a window is full, after a jump, or if asked for."""
        limits = self._limits
        self._window.append(time_us)
        is_sudden = self._has_jumped(time_us)
        if len(self._window) < limits.window and not look_now and not is_sudden:
            return None
        window, self._window, self._last_window = self._window, [], self._window
        now_us = median(window[-_JUMP:] if is_sudden else window)
        was_us = self.reference_us = self.reference_us or now_us
        off_us = abs(now_us - was_us)
        is_off = off_us * 1000 > limits.drift * was_us and is_beyond_noise(off_us, noise_of(window))
        self._n_off = self._n_off + 1 if is_off else 0
        has_drifted = self._n_off >= 2 or is_sudden or look_now
        if not is_off and not has_drifted:
            self.reference_us = (3 * was_us + now_us) // 4
        return Look(now_us, was_us, _JUMP if is_sudden else limits.window, is_off, has_drifted)

    def _has_jumped(self, time_us: int) -> bool:
        """Whether this is the third step in a row that is slower, or faster, than any of the last window."""
        reference_us, sudden, last = self.reference_us, self._limits.sudden, self._last_window
        up = reference_us and time_us * 1000 > sudden * reference_us and time_us > max(last, default=0)
        down = reference_us and time_us * sudden < 1000 * reference_us and time_us < min(last, default=time_us + 1)
        direction = 1 if up else -1 if down else 0
        self._n_sudden = self._n_sudden + direction if direction * self._n_sudden >= 0 and direction else direction
        return abs(self._n_sudden) >= _JUMP
