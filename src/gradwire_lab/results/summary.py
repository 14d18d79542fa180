"""Records summed up: means over seeds and folds, paired differences, ratios to a baseline, and what of them is noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire_lab.results.experiment import Column, Experiment

Record = dict[str, Any]

# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond the last the normal one is within 2 %.
_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23, 14: 2.14, 19: 2.09,
      29: 2.05, 49: 2.01, 99: 1.98}  # fmt: skip


@dataclass(frozen=True)
class Value:
    """What a table's cell shows.

    Attributes:
        middle: median, mean, ratio or difference, scaled; None where it was not measured.
        low, high: quartiles, mean -+ standard deviation, or the 95 % interval of a difference; None where unknown.
        is_noise: a ratio or difference that noise alone can explain; nothing is claimed of it.
        n_without: runs that ended without such a number (their loss was NaN), and are not in `middle`.
    """

    middle: float | str | None
    low: float | None = None
    high: float | None = None
    is_noise: bool = False
    n_without: int = 0


class Summary:
    """One experiment's records, those of equal axes but `over` taken together.

    Attributes:
        rows: one dict for each of these: the fields that all its records share, and the records as `"records"`.
    """

    def __init__(self, experiment: Experiment, records: Sequence[Record], extra_axes: Sequence[str] = ()) -> None:
        self.experiment = experiment
        self._axes = [axis for axis in (*experiment.axes, *extra_axes) if axis not in experiment.over]
        found: dict[str, list[Record]] = {}
        for record in records:
            found.setdefault(self._name(record), []).append(record)
        self._groups = found
        self.rows = [{**group[0], "records": group} for group in found.values()]

    def value(self, row: Mapping[str, Any], column: Column) -> Value:
        """A row's value in a column."""
        mine: list[Record] = row["records"]
        if column.kind == "value":
            return _plain(mine, column)
        axis = next(iter(self.experiment.baseline), "scheme")
        changes = self.experiment.baseline if column.against is None else {axis: column.against}
        base = self._groups.get(self._name(row, **changes)) if changes else None
        if base is None:
            return Value(None)
        if column.kind == "difference":
            return self._difference(mine, base, column)
        one, other = _plain(mine, column), _plain(base, column)
        if not (isinstance(one.middle, float) and isinstance(other.middle, float) and one.middle and other.middle):
            return Value(None)
        ratio, low, high = (None if end is None else end / other.middle for end in (one.middle, one.low, one.high))
        assert ratio is not None
        # Controls do what the baseline does: by how much they differ from it in this row's run is noise.
        controls = [self._groups.get(self._name(row, **{axis: control})) for control in self.experiment.controls]
        middles = [_plain(group, column).middle for group in controls if group]
        noise = max((abs(middle / other.middle - 1) for middle in middles if isinstance(middle, float)), default=0.0)
        is_noise = mine is not base and (_overlap(one, other) or abs(ratio - 1) <= noise)
        if column.kind == "speed-up":
            return Value(1 / ratio, high and 1 / high, low and 1 / low, is_noise)
        return Value(ratio, low, high, is_noise)

    def _name(self, record: Mapping[str, Any], **changes: Any) -> str:
        return repr([str({**record, **changes}.get(axis)) for axis in self._axes])

    def _difference(self, mine: Sequence[Record], base: Sequence[Record], column: Column) -> Value:
        """Paired by the axes that are averaged over: seeds and folds that both have."""

        def by_place(records: Sequence[Record]) -> dict[str, float]:
            return {
                repr([record.get(axis) for axis in self.experiment.over]): column.scale * float(record[column.field])
                for record in records
                if record.get(column.field) is not None
            }

        one, other = by_place(mine), by_place(base)
        pairs = [one[place] - other[place] for place in one if place in other]
        if not pairs:
            return Value(None)
        middle, half, n_without = statistics.fmean(pairs), half_interval(pairs), _n_without(mine, column)
        if half is None or mine is base:
            return Value(middle, n_without=n_without)
        return Value(middle, middle - half, middle + half, abs(middle) <= half, n_without)


def half_interval(values: Sequence[float]) -> float | None:
    """Half of the 95 % interval of the mean of `values`, by Student's t; None of fewer than two."""
    if len(values) < 2:
        return None
    freedom = len(values) - 1
    quantile = _T[max(k for k in _T if k <= freedom)]  # the next smaller number of degrees: never too narrow
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def _plain(records: Sequence[Record], column: Column) -> Value:
    known = [record[column.field] for record in records if record.get(column.field) is not None]
    if not known:
        return Value(None)
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in known):
        words = dict.fromkeys({True: "yes", False: "no"}.get(value, value) for value in known)
        return Value(", ".join(map(str, words)))
    if len(records) > 1:
        mean = column.scale * statistics.fmean(known)
        if len(known) == 1:
            return Value(mean, n_without=_n_without(records, column))
        spread = abs(column.scale) * statistics.stdev(known)
        return Value(mean, mean - spread, mean + spread, n_without=_n_without(records, column))
    ends = [records[0].get(f"{column.field}_{end}") for end in ("low", "high")]
    low, high = (None if end is None else column.scale * float(end) for end in ends)
    return Value(column.scale * float(known[0]), low, high)


def _n_without(records: Sequence[Record], column: Column) -> int:
    return sum(record.get(column.field, 0) is None for record in records)


def _overlap(one: Value, other: Value) -> bool:
    """Whether the quartiles of both share a value; without quartiles nothing is known of the noise."""
    if one.low is None or one.high is None or other.low is None or other.high is None:
        return False
    return one.low <= other.high and other.low <= one.high


def chosen(record: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
    """Whether a record has the value, or one of the values, of every field of `where`; a value may be a predicate."""
    return all(
        wanted(record.get(name))
        if callable(wanted)
        else record.get(name) in (wanted if isinstance(wanted, list | tuple | set) else [wanted])
        for name, wanted in where.items()
    )
