"""The lane's order: one task after the other, except that one may go before what another has deferred, where it is in time."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from gradwire.errors import RankMismatch
from gradwire.wire.communicator import Communicator
from ranks import on_ranks


class Log:
    """Tasks of a lane that say when they ran."""

    def __init__(self) -> None:
        self.communicator = Communicator()
        self.lines: list[str] = []

    def task(self, name: str, defers: bool = False) -> Callable[[], Any]:
        def run() -> Any:
            self.lines.append(name)
            if defers:
                self.communicator.defer(lambda: self.lines.append(f"rest of {name}"))
            return name

        return run


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        ([("a", True, True), ("b", True, True), ("c", True, True)], "a, b, rest of a, c, rest of b, rest of c"),
        ([("a", True, True), ("b", False, False), ("c", True, True)], "a, rest of a, b, c, rest of c"),
        ([("a", True, False), ("b", False, True), ("c", False, True)], "a, b, rest of a, c"),
        ([("a", False, True), ("b", False, True)], "a, b"),
    ],
)
@on_ranks(1)
def test_only_what_may_overtakes_what_is_deferred(rank: int, world_size: int, tasks: list[Any], expected: str) -> None:
    """Tasks (name, defers some of it, may overtake) that are all there before the first one ends."""
    log, is_open = Log(), threading.Event()
    log.communicator.submit(is_open.wait)
    futures = [log.communicator.submit(log.task(name, defers), may_overtake=may) for name, defers, may in tasks]
    is_open.set()
    assert [future.wait() for future in futures] == [name for name, _, _ in tasks]
    log.communicator.close()
    assert log.lines == expected.split(", ")


@on_ranks(1)
def test_what_is_deferred_waits_for_no_other_task_and_is_run_before_the_lane_ends(rank: int, world_size: int) -> None:
    log = Log()
    assert log.communicator.submit(log.task("a", defers=True)).wait() == "a"  # nothing comes after it
    last = log.communicator.submit(log.task("b", defers=True), may_overtake=True)
    log.communicator.close()
    assert last.wait() == "b"
    assert log.lines == ["a", "rest of a", "b", "rest of b"]


@on_ranks(1)
def test_an_error_in_what_is_deferred_is_the_tasks_error_and_ends_the_group(rank: int, world_size: int) -> None:
    communicator, is_open = Communicator(), threading.Event()

    def fail() -> None:
        raise ValueError("spilt")

    communicator.submit(is_open.wait)
    futures = [communicator.submit(communicator.defer, fail, may_overtake=True) for _ in range(2)]
    is_open.set()
    for future in futures:
        with pytest.raises(RankMismatch, match="spilt"):
            future.wait()
    communicator.close()
