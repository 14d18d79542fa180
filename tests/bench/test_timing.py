"""Methods take turns, warm-up is dropped, and a sample is long enough."""

from __future__ import annotations

import pytest

from gradwire_lab.bench.driver import Task, Timing, time_interleaved


class _Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_methods_take_turns_round_by_round() -> None:
    clock, order = _Clock(), []

    def make(name: str) -> Task:
        def call() -> None:
            order.append(name)
            clock.now_s += 1.0

        return Task(call)

    time_interleaved({name: make(name) for name in "abc"}, n_rounds=3, n_warmup=1, clock=clock)
    assert "".join(order[6:]) == "abc" * 4  # two calls each go into the calibration


def test_warm_up_samples_are_dropped() -> None:
    clock, durations = _Clock(), iter([9.0, 9.0, 9.0, 1.0, 2.0, 3.0])

    def call() -> None:
        clock.now_s += next(durations)

    timing = time_interleaved({"a": Task(call)}, n_rounds=3, n_warmup=1, clock=clock)["a"]
    assert (timing.median_s, timing.low_s, timing.high_s, timing.n_samples) == (2.0, 1.0, 3.0, 3)


def test_short_call_is_repeated_until_a_sample_is_long_enough() -> None:
    clock = _Clock()

    def call() -> None:
        clock.now_s += 0.004

    timing = time_interleaved({"a": Task(call)}, n_rounds=2, min_sample_s=0.05, clock=clock)["a"]
    assert timing.n_repeats == 13
    assert timing.median_s == pytest.approx(0.004)


def test_preparation_and_verification_are_off_the_clock_and_happen_every_sample() -> None:
    clock, calls = _Clock(), []

    def wait(name: str, seconds: float) -> None:
        calls.append(name)
        clock.now_s += seconds

    task = Task(lambda: wait("call", 1.0), lambda: wait("before", 50.0), lambda: wait("after", 50.0))
    timing = time_interleaved({"a": task}, n_rounds=2, n_warmup=0, clock=clock)["a"]
    assert timing.median_s == 1.0
    assert calls == ["before", "call", "after"] * 4


def test_spread_is_the_quartiles() -> None:
    timing = Timing.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (timing.low_s, timing.median_s, timing.high_s) == (2.0, 3.0, 4.0)
