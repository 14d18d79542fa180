"""A stopwatch, for those that time what they wait for and have no other business with clocks."""

from __future__ import annotations

import time


class Stopwatch:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self._started_ns = time.perf_counter_ns()

    @property
    def elapsed_ns(self) -> int:
        """Nanoseconds since it was made."""
        return time.perf_counter_ns() - self._started_ns
