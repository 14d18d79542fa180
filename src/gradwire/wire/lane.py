"""The lane: the thread on which a rank talks to others, one task after another, in an order that all ranks share."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from gradwire.errors import GradwireError


class Continuation(NamedTuple):
    """What a task on the lane gives back if it has more to do, once peers have answered: the next task may go first."""

    finish: Callable[[], Any]


@dataclass
class _Task:
    future: torch.futures.Future
    run: Callable[[], Any]
    may_overtake: bool


class Lane:
    """Runs tasks in the order in which they are submitted.

    Args:
        check: called before each task; what it raises is the task's error.
        fail: makes a task's error that of the whole group, and returns what its future is to raise.
    """

    def __init__(self, check: Callable[[], None], fail: Callable[[Exception], GradwireError]) -> None:
        self._check, self._fail = check, fail
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="gradwire-lane", daemon=True)
        self._thread.start()

    def submit(self, task: Callable[..., Any], *args: Any, may_overtake: bool = False) -> torch.futures.Future:
        """See `Communicator.submit`."""
        future: torch.futures.Future = torch.futures.Future()
        self._tasks.put(_Task(future, functools.partial(task, *args), may_overtake))
        return future

    def is_running(self) -> bool:
        """Whether its end has not come yet."""
        return self._thread.is_alive()

    def end(self, limit_s: float | None = None) -> bool:
        """Finish what was submitted, unless a task itself asks; whether that is done within the limit."""
        self._tasks.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(limit_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        # A new thread takes torch's thread count over when it first asks for it. Before that torch.bmm wakes as many
        # threads as there are cores, and 2 us become 1,400 (3 x 24 x 24, two busy cores).
        torch.get_num_threads()
        begun: _Task | None = None  # has run, but for its rest
        is_open = True
        while is_open:
            task = None
            with contextlib.suppress(queue.Empty):
                task = self._tasks.get(block=begun is None)
                is_open = task is not None
            if begun is not None and (task is None or not task.may_overtake):
                begun = self._run_task(begun)
            following = None if task is None else self._run_task(task)
            if begun is not None:
                self._run_task(begun)
            begun = following
            del task, following  # nothing of a finished task may live until the next one comes

    def _run_task(self, task: _Task) -> _Task | None:
        """The task again, if a rest of it is left."""
        try:
            self._check()
            result = task.run()
        except Exception as error:
            task.future.set_exception(self._fail(error))
            return None
        if isinstance(result, Continuation):
            task.run = result.finish
            return task
        task.future.set_result(result)
        return None
