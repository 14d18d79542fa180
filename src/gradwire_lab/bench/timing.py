"""Timing against noise: methods take turns (A B C A B C), warm-up rounds are dropped, a sample lasts long enough."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from gradwire import _native
from gradwire.errors import InvalidArgument
from gradwire_lab.results.captions import duration

# Below some 50 ms a sample is at the mercy of one scheduler tick (4 ms) or one page-fault storm.
MIN_SAMPLE_S = 0.05
_SAID_EVERY_S = 5.0


@dataclass(frozen=True)
class Task:
    """One method: `call` is timed; `before` and `after` run outside the clock, once a sample (poison, verify)."""

    call: Callable[[], object]
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Timing:
    """Seconds a call: the median of the samples and their quartiles."""

    median_s: float
    low_s: float
    high_s: float
    n_samples: int
    n_repeats: int  # calls in one sample

    @staticmethod
    def of(samples_s: list[float], n_repeats: int = 1) -> Timing:
        """Summarise samples; with fewer than four the spread is the whole range."""
        if len(samples_s) < 4:
            low, high = min(samples_s), max(samples_s)
        else:
            low, _, high = statistics.quantiles(samples_s, n=4, method="inclusive")
        return Timing(statistics.median(samples_s), low, high, len(samples_s), n_repeats)

    def fields(self, name: str, scale: float = 1.0) -> dict[str, float]:
        """For a record: `name`, and its quartiles as `name_low` and `name_high`."""
        return {name: self.median_s * scale, f"{name}_low": self.low_s * scale, f"{name}_high": self.high_s * scale}


def time_interleaved(
    tasks: Mapping[str, Task],
    n_rounds: int,
    n_warmup: int = 1,
    min_sample_s: float = MIN_SAMPLE_S,
    clock: Callable[[], float] = time.perf_counter,
    what: str = "samples",
) -> dict[str, Timing]:
    """Time every task once a round, in the mapping's order, for `n_warmup` dropped and `n_rounds` counted rounds."""
    progress = Progress(what, len(tasks) * (n_warmup + n_rounds))
    repeats = {name: _calibrate(task, min_sample_s, clock) for name, task in tasks.items()}
    samples: dict[str, list[float]] = {name: [] for name in tasks}
    for round_index in range(n_warmup + n_rounds):
        for name, task in tasks.items():
            elapsed_s = _sample(task, repeats[name], clock)
            if round_index >= n_warmup:
                samples[name].append(elapsed_s / repeats[name])
            progress.advance()
    return {name: Timing.of(samples[name], repeats[name]) for name in tasks}


def _sample(task: Task, n_repeats: int, clock: Callable[[], float]) -> float:
    task.before()
    start = clock()
    for _ in range(n_repeats):
        task.call()
    elapsed_s = clock() - start
    task.after()
    return elapsed_s


def _calibrate(task: Task, min_sample_s: float, clock: Callable[[], float]) -> int:
    """How many calls make a sample of at least `min_sample_s`; the first, cold call does not count."""
    _sample(task, 1, clock)
    once_s = max(_sample(task, 1, clock), 1e-7)
    return max(1, -int(-min_sample_s // once_s))


class Progress:
    """Says how far a measurement of `n` pieces is, and about how long the rest takes: every five seconds, on standard output.

    Args: is_silent: says nothing, as on all ranks but the first.
    """

    def __init__(self, what: str, n: int, is_silent: bool = False) -> None:
        self._what, self._n, self._done, self._is_silent = what, n, 0, is_silent
        self._began_s = self._said_s = time.monotonic()

    def advance(self, n_pieces: int = 1) -> None:
        """So many pieces more are done."""
        self.reach(self._done + n_pieces)

    def reach(self, done: int) -> None:
        """So many pieces are done in all."""
        self._done, now_s = done, time.monotonic()
        if not self._is_silent and now_s - self._said_s >= _SAID_EVERY_S and 0 < done < self._n:
            self._said_s = now_s
            left_s = (now_s - self._began_s) / done * (self._n - done)
            print(f"  {self._what}: {done} of {self._n}, about {duration(left_s)} left", flush=True)


@contextlib.contextmanager
def threads(n_threads: int) -> Iterator[None]:
    """Inside, gradwire's codecs and torch's own operations use so many threads. Raises: InvalidArgument (below 1)."""
    if n_threads < 1:
        raise InvalidArgument(f"{n_threads} threads: they count from 1")
    before = _native.thread_count(), torch.get_num_threads()
    _native.set_thread_count(n_threads)
    torch.set_num_threads(n_threads)
    try:
        yield
    finally:
        _native.set_thread_count(before[0])
        torch.set_num_threads(before[1])
