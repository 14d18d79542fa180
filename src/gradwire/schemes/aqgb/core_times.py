"""How long this process's threads ran, and how long they waited for a core although they could run."""

from __future__ import annotations

import os
from collections.abc import Callable

# Seconds since some moment; None where the system does not tell.
CoreTimes = Callable[[], tuple[float, float] | None]

_TASKS = "/proc/self/task"


def read_core_times() -> tuple[float, float] | None:
    """(running_s, waiting_s), sums over the threads that live now; None where the system has no such numbers (not Linux).

    Cost: 10 to 20 us a thread.
    """
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
