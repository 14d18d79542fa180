"""Facts that steps learn of buckets: non-zeros to expect, the salt that peels, and which are too dense to gain."""

import copy
from collections.abc import Callable
from typing import Any

from gradwire.core.bucket import Bucket
from gradwire.core.checkpoint import not_the_state

COUNTS_KEPT = 8  # steps
# Plain, if index and values together would take more than this share of it.
_MAX_SHARE = 0.9
# A bucket that was too dense is tried again in every so many steps: an index that tells nothing new costs 3 %.
_STEPS_BETWEEN_TRIES = 16


class Learnt:
    """Values by name and bucket. What a step learns counts from the next step on, and only if it was finite everywhere.

    Names, as in checkpoints: "n_nonzeros", of the union in the last steps; "dense_for_steps", until a bucket that was too
    dense is tried again; "attempts", the salt with which it peeled last; "tables", its batches of so many values, and of each
    of its blocks the non-zeros in the last steps.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._current: dict[str, dict[str, Any]] = {name: {} for name in _CHECKS}
        self._staged: dict[tuple[str, str], Any] = {}

    def of(self, name: str, key: str) -> Any:
        """What counts for a bucket; None where nothing was learnt."""
        return self._current[name].get(key)

    def learn(self, name: str, key: str, value: Any) -> None:
        """Let `value` count after this step; None: nothing."""
        self._staged[name, key] = value

    def commit(self) -> None:
        for (name, key), value in self._staged.items():
            if value is None:
                self._current[name].pop(key, None)
            else:
                self._current[name][key] = value
        self._staged.clear()

    def discard(self) -> None:
        self._staged.clear()

    def count(self, key: str, n_nonzeros: int) -> None:
        """Note how many non-zeros a union had; in a step the first count counts."""
        if ("n_nonzeros", key) not in self._staged:
            self.learn("n_nonzeros", key, [*(self.of("n_nonzeros", key) or []), n_nonzeros][-COUNTS_KEPT:])

    def note_dense(self, key: str) -> None:
        self.learn("dense_for_steps", key, _STEPS_BETWEEN_TRIES)

    def is_dense(self, key: str) -> bool:
        """Return whether the bucket is sent plainly in this step; asked once a step."""
        steps = self.of("dense_for_steps", key) or 0
        self.learn("dense_for_steps", key, max(0, steps - 1))
        return bool(steps > 1)

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self._current)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: InvalidArgument."""
        older: dict[str, Any] = {"tables": {}}  # what states lack that were saved before
        loaded: dict[str, Any] = {name: state.get(name, older.get(name)) for name in _CHECKS}
        for name, is_right in _CHECKS.items():
            of_buckets = loaded[name]
            if not isinstance(of_buckets, dict) or not all(
                isinstance(key, str) and is_right(value) for key, value in of_buckets.items()
            ):
                raise not_the_state("scheme homomorphic", f"it lacks {name}")
        self.clear()
        self._current = copy.deepcopy(loaded)


def is_too_dense(bucket: Bucket, cell_bytes: int, n_cells: int) -> bool:
    """Return whether an index and so many cells are no gain on the bucket itself."""
    return n_cells > 0 and cell_bytes * n_cells + bucket.n_elements / 8 > _MAX_SHARE * bucket.original_bytes


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _is_table(value: Any) -> bool:
    if not isinstance(value, dict) or not _is_count(value.get("batch_values")):
        return False
    blocks = value.get("counts")
    return isinstance(blocks, list) and bool(blocks) and all(
        _are_counts(block) and 0 < len(block) <= COUNTS_KEPT for block in blocks
    )  # fmt: skip


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "n_nonzeros": _are_counts,
    "dense_for_steps": _is_count,
    "attempts": _is_count,
    "tables": _is_table,
}
