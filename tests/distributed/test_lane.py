"""The lane's order: one task after the other, except that a task may go before another's rest where it is in time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from gradwire.errors import RankMismatch
from gradwire.wire.communicator import Communicator
from gradwire.wire.lane import Continuation
from ranks import on_ranks


class Log:
    """Tasks that say when they ran."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def task(self, name: str, has_rest: bool = False) -> Callable[[], Any]:
        def rest() -> str:
            self.lines.append(f"rest of {name}")
            return name

        def run() -> Any:
            self.lines.append(name)
            return Continuation(rest) if has_rest else name

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
def test_only_a_task_that_may_overtake_goes_before_a_rest(
    rank: int, world_size: int, tasks: list[tuple[str, bool, bool]], expected: str
) -> None:
    """Tasks (name, has a rest, may overtake) that are all there before the first one ends."""
    communicator, log, is_open = Communicator(), Log(), threading.Event()
    communicator.submit(is_open.wait)
    futures = [
        communicator.submit(log.task(name, has_rest), may_overtake=may_overtake)
        for name, has_rest, may_overtake in tasks
    ]
    is_open.set()
    assert [future.wait() for future in futures] == [name for name, _, _ in tasks]
    communicator.close()
    assert log.lines == expected.split(", ")


@on_ranks(1)
def test_a_rest_waits_for_no_other_task_and_is_run_before_the_lane_ends(rank: int, world_size: int) -> None:
    communicator, log = Communicator(), Log()
    assert communicator.submit(log.task("a", has_rest=True)).wait() == "a"  # nothing comes after it
    last = communicator.submit(log.task("b", has_rest=True), may_overtake=True)
    communicator.close()
    assert last.wait() == "b"
    assert log.lines == ["a", "rest of a", "b", "rest of b"]


@on_ranks(1)
def test_an_error_in_a_rest_is_the_tasks_error_and_ends_the_group(rank: int, world_size: int) -> None:
    communicator, is_open = Communicator(), threading.Event()

    def fail() -> None:
        raise ValueError("spilt")

    communicator.submit(is_open.wait)
    futures = [communicator.submit(lambda: Continuation(fail), may_overtake=True) for _ in range(2)]
    is_open.set()
    for future in futures:
        with pytest.raises(RankMismatch, match="spilt"):
            future.wait()
    communicator.close()
