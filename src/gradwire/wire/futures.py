"""What follows when a future is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.futures import Future


def completed(value: Any) -> Future:
    """A future that is done."""
    done: Future = Future()
    done.set_result(value)
    return done


def then(first: Future, use: Callable[[Any], Any]) -> Future:
    """A future of `use(result)`, which runs where `first` is completed; an error of either keeps its type.

    Where the result is a future itself (a task of the lane that the lane need not wait for), it is that one's result.
    """
    done: Future = Future()

    def go_on(finished: Future) -> None:
        try:
            result = finished.wait()
            if isinstance(result, Future):
                result.add_done_callback(go_on)
                return
            used = use(result)
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(used)

    first.add_done_callback(go_on)
    return done
