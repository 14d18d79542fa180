"""What a step has learnt of each bucket: it counts from the next step on, and only if this one was finite everywhere."""

from __future__ import annotations

from typing import Any

from gradwire.core.bucket import Bucket

# Plain, if index and values together would take more than this share of it.
_MAX_SHARE = 0.9
# A bucket that was too dense is tried again in every so many steps: an index that tells nothing new costs 3 %.
_STEPS_BETWEEN_TRIES = 16


class NumberByBucket:
    """One number of every bucket, by its key; 0 where none was learnt."""

    def __init__(self) -> None:
        self._current: dict[str, int] = {}
        self._learnt: dict[str, int] = {}

    def of(self, key: str) -> int:
        """The number that counts."""
        return self._current.get(key, 0)

    def learn(self, key: str, number: int) -> None:
        """Let `number` count after this step."""
        self._learnt[key] = number

    def end_step(self, is_finite: bool) -> None:
        """Keep what the step has learnt, or forget it."""
        if is_finite:
            self._current.update(self._learnt)
        self._learnt.clear()

    def state_dict(self) -> dict[str, int]:
        """A copy of what counts."""
        return dict(self._current)

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take what `state_dict` gave and `are_counts` has checked."""
        self._current = dict(state)
        self._learnt.clear()


class DenseBuckets(NumberByBucket):
    """In how many steps a bucket that was too dense is tried again."""

    def note(self, key: str) -> None:
        """It was too dense."""
        self.learn(key, _STEPS_BETWEEN_TRIES)

    def is_known(self, key: str) -> bool:
        """Whether it is sent plainly in this step; asked once a step."""
        steps = self.of(key)
        self.learn(key, max(0, steps - 1))
        return steps > 1


def is_too_dense(bucket: Bucket, cell_bytes: int, n_cells: int) -> bool:
    """Whether an index and so many cells are no gain on the bucket itself."""
    return n_cells > 0 and cell_bytes * n_cells + bucket.n_elements / 8 > _MAX_SHARE * bucket.original_bytes


def are_counts(by_bucket: Any, of_lists: bool) -> bool:
    """Whether a checkpoint holds counts, or lists of them, by bucket."""
    return isinstance(by_bucket, dict) and all(
        isinstance(key, str) and isinstance(value, list) == of_lists
        and all(isinstance(one, int) and one >= 0 for one in (value if of_lists else [value]))
        for key, value in by_bucket.items()
    )  # fmt: skip
