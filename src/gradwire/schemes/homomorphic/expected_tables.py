"""How large a sketch will have to be, from the last steps: so that it need not wait for the index."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from gradwire.codecs.count_sketch import CountSketch

_COUNTS_KEPT = 8  # steps
# Beside gamma's own: of the most non-zeros of those steps, and of their standard deviation if they come at random.
_MARGIN, _DEVIATIONS = 1.02, 2.0
# A union with so small a share of what was expected wastes more than the round that is saved.
_MIN_SHARE = 0.5


class BlockCounts(NamedTuple):
    """Of one bucket: batches of so many values, and of each of its blocks the non-zeros in the last steps."""

    batch_values: int
    counts: list[list[int]]


class ExpectedTables:
    """Remembers, by bucket, what the unions of the last steps held in each block of the sketch."""

    def __init__(self) -> None:
        self.tables: dict[str, BlockCounts] = {}
        self._next: dict[str, BlockCounts | None] = {}

    def rows(self, key: str, gamma: float) -> tuple[int, list[int]] | None:
        """Batch values, and of each block the rows; None where nothing is known yet."""
        table = self.tables.get(key)
        if table is None:
            return None
        expected = (_expected(max(block)) for block in table.counts)
        return table.batch_values, [max(3, math.ceil(gamma * n / table.batch_values)) if n else 0 for n in expected]

    def note(self, key: str, sketch: CountSketch) -> None:
        """This step's union, which `sketch` has peeled."""
        table, counts = self.tables.get(key), sketch.block_nonzeros()
        is_same = table is not None and (table.batch_values, len(table.counts)) == (
            sketch.table_batch_values,
            len(counts),
        )
        if not is_same or table is None:
            table = BlockCounts(sketch.table_batch_values, [[] for _ in counts])
        elif sum(counts) < _MIN_SHARE * sum(max(block) for block in table.counts):
            self._next[key] = None
            return
        kept = [[*block, n][-_COUNTS_KEPT:] for block, n in zip(table.counts, counts, strict=True)]
        self._next[key] = BlockCounts(table.batch_values, kept) if sketch.n_cells else None

    def forget(self, key: str) -> None:
        """The next step's sketch waits for the index."""
        self._next[key] = None

    def commit(self) -> None:
        """Keep what this step has shown."""
        for key, table in self._next.items():
            if table is None:
                self.tables.pop(key, None)
            else:
                self.tables[key] = table

    def clear_step(self) -> None:
        """Begin the next step's notes."""
        self._next.clear()

    def state_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {key: {"batch_values": c, "counts": [list(block) for block in counts]}
                for key, (c, counts) in self.tables.items()}  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` gave. Raises: KeyError, TypeError, ValueError (something else)."""
        tables = {}
        for key, one in state.items():
            counts = [[int(n) for n in block] for block in one["counts"]]
            if not counts or any(not 0 < len(block) <= _COUNTS_KEPT or min(block) < 0 for block in counts):
                raise ValueError("no counts of blocks")
            tables[str(key)] = BlockCounts(int(one["batch_values"]), counts)
        self.tables = tables


def _expected(n_nonzeros: int) -> float:
    return _MARGIN * n_nonzeros + _DEVIATIONS * math.sqrt(n_nonzeros)
