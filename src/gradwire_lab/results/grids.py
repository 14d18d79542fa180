"""From an experiment's records to its tables as words: values with their noise."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from gradwire_lab.results.experiment import Column, Experiment, Goal, Table
from gradwire_lab.results.summary import Summary, Value, chosen
from gradwire_lab.results.tables import Grid

Record = dict[str, Any]

NOISE = "~"


def make_grids(experiment: Experiment, table: Table, records: Sequence[Record]) -> list[Grid]:
    """One grid, or one for each combination of the axes that are neither its rows nor its columns."""
    summary = Summary(experiment, [r for r in records if chosen(r, table.where)], _more_axes(experiment, table))
    used = {*table.rows, table.across, *experiment.over}
    left = [axis for axis in experiment.axes if axis not in used and len({str(r.get(axis)) for r in summary.rows}) > 1]
    parts: dict[tuple[str, ...], list[Record]] = {}
    for row in summary.rows:
        parts.setdefault(tuple(experiment.label(axis, row.get(axis)) for axis in left), []).append(row)
    grids = []
    for place, rows in parts.items():
        words = [f"{axis.replace('_', ' ')} {value}" for axis, value in zip(left, place, strict=True)]
        title = ", ".join(filter(None, [table.title, *words]))
        grids.append(_grid(experiment, table, summary, rows, title))
    return grids


def _more_axes(experiment: Experiment, table: Table) -> list[str]:
    """Fields that a cell's several records differ in, such as a phase: the table's rows or columns that are no axes."""
    return [name for name in (*table.rows, table.across) if name and name not in experiment.axes]


def _grid(experiment: Experiment, table: Table, summary: Summary, rows: Sequence[Record], title: str) -> Grid:
    by_name: dict[tuple[str, ...], list[Record]] = {}
    for row in rows:
        by_name.setdefault(tuple(experiment.label(axis, row.get(axis)) for axis in table.rows), []).append(row)
    across = [experiment.label(table.across, r.get(table.across)) for r in rows] if table.across else [""]
    heads = list(dict.fromkeys(across))
    known = [c for c in table.columns if any(summary.value(row, c).middle is not None for row in rows)]
    # Columns that do not depend on what is across stand once, at the end.
    headings = [": ".join(filter(None, (head, column.heading))) for head in heads for column in known]
    if table.across and len(known) == 1:  # said once
        title, headings = ", ".join(filter(None, [title, known[0].heading])), heads
    lines, has_noise = [], False
    for name, group in by_name.items():
        cells = []
        for head, column in itertools.product(heads, known):
            found = [
                r for r in group if not table.across or experiment.label(table.across, r.get(table.across)) == head
            ]
            value = summary.value(found[0], column) if found else Value(None)
            has_noise |= value.is_noise
            cells.append(show_value(value, column))
        lines.append([*name, *cells])
    caption = f"{NOISE} within the noise: nothing is claimed." if has_noise else ""
    names = [_axis_title(axis) for axis in table.rows]
    return Grid(title, [*names, *headings], lines, caption, len(names))


def _axis_title(axis: str) -> str:
    return axis.replace("_", " ").replace("n bytes", "bytes")


def show_value(value: Value, column: Column) -> str:
    """`127 (120 to 133)`; `~0.97` where noise may be all of it; `-` where it was not measured."""
    if value.middle is None:
        return "-"
    if isinstance(value.middle, str):
        return value.middle
    form = column.form
    if column.kind in ("ratio", "speed-up") and form == Column.form:
        form = ".2f" if abs(value.middle) < 100 else ".0f"
    sign = "+" if column.kind == "difference" else ""
    text = (NOISE if value.is_noise else "") + format(value.middle, sign + form)
    if column.spread and value.low is not None and value.high is not None:
        text += f" ({format(value.low, sign + form)} to {format(value.high, sign + form)})"
    if value.n_without:
        text += f", none in {value.n_without} run{'s' if value.n_without > 1 else ''}"
    return text


def judge(experiment: Experiment, goal: Goal, records: Sequence[Record]) -> list[tuple[str, str]]:
    """(verdict, in words) of every cell that a goal speaks of: reached, missed, or undecided where the noise decides."""
    summary = Summary(experiment, records, goal.by)
    found = []
    for row in summary.rows:
        value = summary.value(row, goal.column) if chosen(row, goal.where) else Value(None)
        if not isinstance(value.middle, float):
            continue
        is_met = value.middle <= goal.bound if goal.sign == "<=" else value.middle >= goal.bound
        is_between = value.low is not None and value.high is not None and value.low < goal.bound < value.high
        verdict = "missed" if value.n_without else "undecided" if is_between else "reached" if is_met else "missed"
        names = [experiment.label(axis, row.get(axis)) for axis in experiment.axes if axis not in experiment.over]
        names += [f"{_axis_title(name)} {row.get(name)}" for name in goal.by]
        shown = show_value(value, Column(goal.column.field, form=goal.column.form, kind=goal.column.kind, spread=True))
        found.append((verdict, f"{', '.join(names)}: {shown}"))
    return found
