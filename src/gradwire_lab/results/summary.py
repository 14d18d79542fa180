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
        baseline = self._baseline(row, column)
        if baseline is None:
            return Value(None)
        if column.kind == "difference":
            return self._difference(mine, baseline, column)
        return self._ratio(row, mine, baseline, column)

    def _name(self, record: Mapping[str, Any], **changes: Any) -> str:
        return repr([str({**record, **changes}.get(axis)) for axis in self._axes])

    def _baseline(self, row: Mapping[str, Any], column: Column) -> list[Record] | None:
        changes = dict(self.experiment.baseline)
        if column.against is not None:
            changes = {next(iter(changes), "scheme"): column.against}
        return self._groups.get(self._name(row, **changes)) if changes else None

    def _ratio(self, row: Mapping[str, Any], mine: Sequence[Record], base: Sequence[Record], column: Column) -> Value:
        one, other = _plain(mine, column), _plain(base, column)
        if (
            not isinstance(one.middle, float)
            or not isinstance(other.middle, float)
            or not other.middle
            or not one.middle
        ):
            return Value(None)
        ratio = one.middle / other.middle
        is_base = mine is base
        noise = self._noise(row, other.middle, column) if not is_base else 0.0
        is_noise = not is_base and (_overlap(one, other) or abs(ratio - 1) <= noise)
        low = None if one.low is None else one.low / other.middle
        high = None if one.high is None else one.high / other.middle
        if column.kind == "speed-up":
            return Value(1 / ratio, high and 1 / high, low and 1 / low, is_noise)
        return Value(ratio, low, high, is_noise)

    def _noise(self, row: Mapping[str, Any], base: float, column: Column) -> float:
        """By how much controls, which do what the baseline does, differ from it in this row's run."""
        axis = next(iter(self.experiment.baseline), "scheme")
        found = [self._groups.get(self._name(row, **{axis: control})) for control in self.experiment.controls]
        middles = [_plain(group, column).middle for group in found if group]
        return max((abs(one / base - 1) for one in middles if isinstance(one, float)), default=0.0)

    def _difference(self, mine: Sequence[Record], base: Sequence[Record], column: Column) -> Value:
        """Paired by the axes that are averaged over: seeds and folds that both have."""
        over = self.experiment.over

        def by_place(records: Sequence[Record]) -> dict[str, float]:
            return {
                repr([record.get(axis) for axis in over]): column.scale * float(record[column.field])
                for record in records
                if record.get(column.field) is not None
            }

        one, other = by_place(mine), by_place(base)
        pairs = [one[place] - other[place] for place in one if place in other]
        if not pairs:
            return Value(None)
        middle, half = statistics.fmean(pairs), half_interval(pairs)
        if half is None or mine is base:
            return Value(middle, n_without=_n_without(mine, column))
        return Value(middle, middle - half, middle + half, abs(middle) <= half, _n_without(mine, column))


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
        spread = abs(column.scale) * statistics.stdev(known) if len(known) > 1 else None
        low, high = (None, None) if spread is None else (mean - spread, mean + spread)
        return Value(mean, low, high, n_without=_n_without(records, column))
    (record,) = records
    ends = [record.get(f"{column.field}_{end}") for end in ("low", "high")]
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
    for name, wanted in where.items():
        value = record.get(name)
        if callable(wanted):
            if not wanted(value):
                return False
        elif value not in (wanted if isinstance(wanted, list | tuple | set) else [wanted]):
            return False
    return True
