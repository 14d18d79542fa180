"""Who has closed its end of a group and when, noted in the store, so that a rank that closes alone is told, and told of."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from gradwire.errors import PeerLost, RankMismatch

_CURE = "every rank calls close() between the same two steps, or ends its training after the same one"


class Closing:
    """One rank's view of a group's end. `name`: the group's prefix in the store. `members`: its ranks among all."""

    def __init__(self, store: Any, name: str, rank: int, members: Sequence[int]) -> None:
        self._store, self._name, self._rank, self._members = store, name, rank, members
        self._step: int | None = None

    def tell(self, step: int) -> None:
        """Note that this rank has closed its end after `step` reductions."""
        if self._step is None:
            self._step = step
            self._store.set(self._key(self._rank), str(step))

    def blame(self, lost: PeerLost) -> list[PeerLost]:
        """What to raise in the place of `lost`, if peers have closed their ends."""
        others = [
            rank for rank in range(len(self._members)) if rank != self._rank and self._store.check([self._key(rank)])
        ]
        if not others:
            return []
        closed = [
            f"rank {self._members[rank]} closed its attachment at step {self._store.get(self._key(rank)).decode()}"
            for rank in others
        ]
        better = PeerLost(f"{', '.join(closed)}, rank {self._members[self._rank]} did not: {_CURE}. Backend: {lost}")
        better.__cause__ = lost
        return [better]

    def wait_for_all(self, timeout_s: float) -> None:
        """For a rank that has closed its end and goes on without gradwire.

        Raises: RankMismatch (the others go on with it), PeerLost (they neither close nor fail within `timeout_s`).
        """
        deadline = time.monotonic() + timeout_s
        alone = f"this rank closed its attachment at step {self._step}, the others did not"
        try:
            while not self._store.check([self._key(rank) for rank in range(len(self._members))]):
                if self._store.check([self._name + "/failure"]):
                    raise RankMismatch(f"{alone}: {_CURE}")
                if time.monotonic() > deadline:
                    raise PeerLost(
                        f"{alone}, and none has said anything for {timeout_s:g} s: look at their output for the cause"
                    )
                time.sleep(0.01)
        except RuntimeError as error:  # the store's host has failed of it, and gone
            raise RankMismatch(f"{alone}: {_CURE}. Backend: {error}") from error

    def _key(self, rank: int) -> str:
        return f"{self._name}/closed/{rank}"
