"""Notes that ranks leave in their store: the first failure, so that all raise the same; who closed at which step, so that a
rank that closes alone is told, and told of."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from gradwire import errors
from gradwire.errors import GradwireError, PeerLost, RankMismatch

_CURE = "every rank calls close() between the same two steps, or ends its training after the same one"
# A failing rank writes its note before it breaks its connections, so the note is there when the break is felt; the wait
# only covers the store's own latency.
_WAIT_S = 2.0

Result = TypeVar("Result")


class Note(NamedTuple):
    rank: int  # the one that failed first
    cls: type[GradwireError]
    message: str


class Notes:
    def __init__(self, store: Any, name: str, rank: int, members: Sequence[int]) -> None:
        """`name`: the group's prefix in the store. `members`: its ranks among all."""
        self._store, self._name, self._rank, self._members = store, name, rank, members
        self._world_size = len(members)
        self._closed_at: int | None = None
        self._knows_failure = False

    def is_failure_left(self) -> bool:
        """True if any rank has failed, as far as the store can say."""
        return try_for(lambda: bool(self._store.check([self._name + "/failure"])), False)

    def leave_failure(self, failure: GradwireError) -> Note:
        """The note that stands: this failure, unless a peer has noted one before. One that no rank can have written is none."""
        self._knows_failure = True
        mine = json.dumps({"rank": self._rank, "type": type(failure).__name__, "message": str(failure)})

        def exchange() -> Note:
            note = self._store.compare_set(self._name + "/failure", "", mine)
            self._store.add(self._name + "/readers", 1)
            return _read(note, self._world_size)

        return try_for(exchange, _read(mine, self._world_size))

    def let_peers_read(self) -> None:
        """Wait until the others have read it, as who hosts the store does; not for one that died."""
        # It ends by itself: a thread that were left behind to poll would crash the interpreter on its way down.
        deadline = time.monotonic() + 0.9 * _WAIT_S

        def wait_for_readers() -> None:
            while self._store.add(self._name + "/readers", 0) < self._world_size and time.monotonic() < deadline:
                time.sleep(0.01)

        try_for(wait_for_readers, None)

    def tell_closing(self, step: int) -> None:
        """Note that this rank has closed its end after `step` reductions."""
        if self._closed_at is None:
            self._closed_at = step
            self._store.set(self._key(self._rank), str(step))

    def blame_closed(self, lost: PeerLost) -> PeerLost:
        """The error to raise in the place of `lost`: another one, if peers have closed their ends."""
        others = [
            rank for rank in range(self._world_size) if rank != self._rank and self._store.check([self._key(rank)])
        ]
        if not others:
            return lost
        closed = [
            f"rank {self._members[rank]} closed its attachment at step {self._store.get(self._key(rank)).decode()}"
            for rank in others
        ]
        better = PeerLost(f"{', '.join(closed)}, rank {self._members[self._rank]} did not: {_CURE}. Backend: {lost}")
        better.__cause__ = lost
        return better

    def wait_until_all_close(self, timeout_s: float) -> None:
        """For a rank that has closed its end and goes on without gradwire: RankMismatch if the others go on with it."""
        deadline = time.monotonic() + timeout_s
        alone = f"this rank closed its attachment at step {self._closed_at}, the others did not"
        try:
            while True:
                is_closed = self._store.check([self._key(rank) for rank in range(self._world_size)])
                # Who closes because it has lost this rank has noted that before.
                if not self._knows_failure and self._store.check([self._name + "/failure"]):
                    raise RankMismatch(f"{alone}: {_CURE}")
                if is_closed:
                    return
                if time.monotonic() > deadline:
                    raise PeerLost(
                        f"{alone}, and none has said anything for {timeout_s:g} s: look at their output for the cause"
                    )
                time.sleep(0.01)
        except RuntimeError as error:  # the store's host has failed of it, and gone
            raise RankMismatch(f"{alone}: {_CURE}. Backend: {error}") from error

    def _key(self, rank: int) -> str:
        return f"{self._name}/closed/{rank}"


def try_for(action: Callable[[], Result], otherwise: Result) -> Result:
    """The result of `action`, on a thread that is left behind after a while, as a store's host may hang; `otherwise` then, and
    where it fails. Where the host has died there is nobody to tell: the broken connections say enough."""
    result = [otherwise]

    def attempt() -> None:
        with contextlib.suppress(Exception):
            result.append(action())

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(_WAIT_S)
    return result[-1]


def _read(note: str | bytes, world_size: int) -> Note:
    """The note as it was written; PeerLost for an error that we do not know. Fails if it is no note of ours."""
    fields = json.loads(note)
    rank, cls = int(fields["rank"]), getattr(errors, str(fields["type"]), None)
    if not 0 <= rank < world_size:
        raise ValueError(f"no rank {rank}")
    if not (isinstance(cls, type) and issubclass(cls, GradwireError)):
        cls = PeerLost
    return Note(rank, cls, str(fields["message"]))
