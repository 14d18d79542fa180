"""What `attach` returns where one process trains a model that nothing wraps: there is no rank to exchange anything with."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from gradwire.reducer import Reducer
from gradwire.schemes import Scheme

_log = logging.getLogger("gradwire")


class Alone(Reducer):
    """An attachment that does nothing, so that a script for several ranks runs unchanged on one.

    `state_dict` is empty, and `load_state_dict` takes whatever other runs have saved, of which one rank needs nothing.
    """

    def __init__(self, scheme: Scheme) -> None:
        self.scheme, self.step, self.closed = scheme, 0, False
        _log.warning("attach: one rank has nothing to exchange, so scheme %r does nothing here", scheme.name)

    def stats(self) -> dict[str, Any]:
        return {"scheme": self.scheme.name, "world_size": 1}

    def wait_until_idle(self) -> None:
        """There is nothing to wait for."""

    flush = wait_until_idle

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> None:
        """Nothing of it concerns one rank."""

    def switch(self, scheme: Scheme | str) -> None:
        """Nor does any scheme."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """As the doors of modules have it."""
        yield

    def close(self) -> None:
        self.closed = True


def is_alone() -> bool:
    """Whether this process is the only one of its training: without process groups as long as no launcher says otherwise."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() == 1
    return int(os.environ.get("WORLD_SIZE") or 1) == 1
