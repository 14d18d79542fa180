"""What a group failed of, noted in the store by the rank that failed first, so that all ranks raise the same error."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from gradwire import errors
from gradwire.errors import GradwireError, PeerLost

# A failing rank writes its note before it breaks its connections, so the note is there when the break is felt; the wait
# only covers the store's own latency.
_WAIT_S = 2.0


class Note(NamedTuple):
    """The rank that failed first, the class of its error, and what it said."""

    rank: int
    cls: type[GradwireError]
    message: str


class FailureNote:
    """One rank's view of a group's note. `name`: the group's prefix in the store."""

    def __init__(self, store: Any, name: str, rank: int, world_size: int) -> None:
        self._store, self._name, self._rank, self._world_size = store, name, rank, world_size

    def is_left(self) -> bool:
        """Whether any rank has left one, as far as the store can say."""
        noted: list[bool] = []
        try_for(lambda: noted.append(self._store.check([self._name + "/failure"])))
        return any(noted)

    def leave(self, failure: GradwireError) -> Note:
        """Leave one unless a peer has left one before; returns the one that stands.

        One that no rank of ours can have written counts as none.
        """
        mine = json.dumps({"rank": self._rank, "type": type(failure).__name__, "message": str(failure)})
        standing = [_read(mine, self._world_size)]

        def exchange() -> None:
            note = self._store.compare_set(self._name + "/failure", "", mine)
            self._store.add(self._name + "/readers", 1)
            standing[0] = _read(note, self._world_size)

        try_for(exchange)
        return standing[0]

    def let_peers_read(self) -> None:
        """Wait until the others have read it, as who hosts the store does; not for one that died."""
        # It ends by itself: a thread that were left behind to poll would crash the interpreter on its way down.
        deadline = time.monotonic() + 0.9 * _WAIT_S

        def wait_for_readers() -> None:
            while self._store.add(self._name + "/readers", 0) < self._world_size and time.monotonic() < deadline:
                time.sleep(0.01)

        try_for(wait_for_readers)


def try_for(action: Callable[[], None], limit_s: float = _WAIT_S) -> None:
    """Run `action` on a thread of its own and leave it behind at the limit: a store whose host hangs holds up nothing.

    Where the host has died there is nobody to tell: the broken connections say enough.
    """

    def attempt() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(limit_s)


def _read(note: str | bytes, world_size: int) -> Note:
    """The note as it was written; PeerLost for an error that we do not know. Raises: Exception (no note of ours)."""
    fields = json.loads(note)
    rank, cls = int(fields["rank"]), getattr(errors, str(fields["type"]), None)
    if not 0 <= rank < world_size:
        raise ValueError(f"no rank {rank}")
    if not (isinstance(cls, type) and issubclass(cls, GradwireError)):
        cls = PeerLost
    return Note(rank, cls, str(fields["message"]))
