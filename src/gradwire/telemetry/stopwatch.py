"""The one clock. What takes time is timed by a `Stopwatch`, or counted as busy time by a record's `timing`."""

from __future__ import annotations

import time
from collections.abc import Callable

now_s = time.perf_counter


class Stopwatch:
    """Times laps: `with watch: ...`, or `begin` and `end`, which may be of different threads.

    Args:
        clock: nanoseconds.

    Attributes:
        start_ns, end_ns: of the last lap, by the clock.
        total_ns: all laps, since `take_ns`.
    """

    __slots__ = ("_clock", "end_ns", "start_ns", "total_ns")

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock
        self.start_ns = self.end_ns = clock()
        self.total_ns = 0

    def begin(self) -> None:
        """A lap begins."""
        self.start_ns = self._clock()

    def end(self) -> None:
        """The lap ends."""
        self.end_ns = self._clock()
        self.total_ns += self.end_ns - self.start_ns

    @property
    def elapsed_ns(self) -> int:
        """Since the lap began, or the watch was made."""
        return self._clock() - self.start_ns

    @property
    def elapsed_s(self) -> float:
        """The same in seconds."""
        return self.elapsed_ns / 1e9

    def take_ns(self) -> int:
        """The total, which begins anew."""
        taken, self.total_ns = self.total_ns, 0
        return taken

    def __enter__(self) -> Stopwatch:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def processor_watch() -> Stopwatch:
    """Times what all threads of this process compute."""
    return Stopwatch(time.process_time_ns)
