"""A stopwatch, for those that time what they wait for and have no other business with clocks."""

from __future__ import annotations

import time


class Stopwatch:
    """Runs from when it is made, at `started_ns`."""

    def __init__(self) -> None:
        self.started_ns = time.perf_counter_ns()

    @property
    def elapsed_ns(self) -> int:
        """Nanoseconds since it was made."""
        return self.now_ns - self.started_ns

    @property
    def now_ns(self) -> int:
        """The same clock, now."""
        return time.perf_counter_ns()
