"""Methods take turns, warm-up is dropped, and a sample is long enough."""

import pytest

from gradwire_lab.bench import driver
from gradwire_lab.bench.driver import Task, Timing, time_interleaved


class _Clock:
    """Goes on by what is spent, of which it keeps the names."""

    def __init__(self) -> None:
        self.now_s, self.spent = 0.0, []

    def __call__(self) -> float:
        return self.now_s

    def spend(self, seconds: float, name: str = "") -> None:
        self.spent.append(name)
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    made = _Clock()
    monkeypatch.setattr(driver.time, "perf_counter", made)
    return made


def test_methods_take_turns_round_by_round(clock: _Clock) -> None:
    tasks = {name: Task(lambda name=name: clock.spend(1.0, name)) for name in "abc"}
    time_interleaved(tasks, n_rounds=3, n_warmup=1)
    assert "".join(clock.spent[6:]) == "abc" * 4  # two calls each go into the calibration


def test_warm_up_samples_are_dropped(clock: _Clock) -> None:
    durations = iter([9.0, 9.0, 9.0, 1.0, 2.0, 3.0])
    task = Task(lambda: clock.spend(next(durations)))
    timing = time_interleaved({"a": task}, n_rounds=3, n_warmup=1)["a"]
    assert (timing.median_s, timing.low_s, timing.high_s, timing.n_samples) == (2.0, 1.0, 3.0, 3)


def test_short_call_is_repeated_until_a_sample_is_long_enough(clock: _Clock) -> None:
    task = Task(lambda: clock.spend(0.004))
    timing = time_interleaved({"a": task}, n_rounds=2, min_sample_s=0.05)["a"]
    assert timing.n_repeats == 13
    assert timing.median_s == pytest.approx(0.004)


def test_preparation_and_verification_are_off_the_clock_and_happen_every_sample(clock: _Clock) -> None:
    before, after = lambda: clock.spend(50.0, "before"), lambda: clock.spend(50.0, "after")
    task = Task(lambda: clock.spend(1.0, "call"), before, after)
    timing = time_interleaved({"a": task}, n_rounds=2, n_warmup=0)["a"]
    assert timing.median_s == 1.0
    assert clock.spent == ["before", "call", "after"] * 4


def test_spread_is_the_quartiles() -> None:
    timing = Timing.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (timing.low_s, timing.median_s, timing.high_s) == (2.0, 3.0, 4.0)
