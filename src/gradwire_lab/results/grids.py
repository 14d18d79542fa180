"""From an experiment's records to its tables as words: values with their noise."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradwire_lab.results.experiment import Claim, Column, Experiment, Goal, Table
from gradwire_lab.results.summary import Summary, Value, chosen
from gradwire_lab.results.tables import Grid

Record = dict[str, Any]

NOISE = "~"
# Of a goal, the best first.
VERDICTS = ("reached", "undecided", "missed")


def make_grid(experiment: Experiment, table: Table, records: Sequence[Record], most_columns: int | None = None) -> Grid:
    """The table of `records`; axes that are neither its rows nor its columns name rows too, if they vary.

    `most_columns`: no more than these; what it leaves out is named in the caption.
    """
    more = [name for name in (*table.rows, table.across) if name and name not in experiment.axes]
    summary = Summary(experiment, [record for record in records if chosen(record, table.where)], more)
    rows, used = summary.rows, {*table.rows, table.across, *experiment.over}
    left = [axis for axis in experiment.axes if axis not in used and len({str(row.get(axis)) for row in rows}) > 1]
    names = [*left, *table.rows]
    by_name: dict[tuple[str, ...], list[Record]] = {}
    for row in rows:
        by_name.setdefault(tuple(experiment.label(axis, row.get(axis)) for axis in names), []).append(row)
    across = [experiment.label(table.across, row.get(table.across)) for row in rows] if table.across else [""]
    heads = list(dict.fromkeys(across))
    columns = [column for column in table.columns if any(summary.value(row, column).middle is not None for row in rows)]
    room = most_columns - len(names) if most_columns else len(heads) * len(columns)
    heads = heads[: max(1, room)]
    shown = columns[: max(1, room // max(1, len(heads)))]
    title, headings = table.title, [": ".join(filter(None, (head, one.heading))) for head in heads for one in shown]
    if table.across and len(shown) == 1:  # said once
        title, headings = ", ".join(filter(None, [table.title, shown[0].heading])), heads
    lines, has_noise = [], False
    for name, group in by_name.items():
        by_head = {experiment.label(table.across, r.get(table.across)) if table.across else "": r for r in group[::-1]}
        cells = [*name]
        for head, column in itertools.product(heads, shown):
            value = summary.value(by_head[head], column) if head in by_head else Value(None)
            has_noise |= value.is_noise
            cells.append(show_value(value, column))
        lines.append(cells)
    captions = [f"{NOISE} within the noise: nothing is claimed."] if has_noise else []
    if more_columns := [column.heading for column in columns if column not in shown]:
        captions.append(f"Also measured: {', '.join(more_columns)}.")
    axes = [name.replace("_", " ").replace("n bytes", "bytes") for name in names]
    return Grid(title, [*axes, *headings], lines, " ".join(captions), len(names))


def tabulate(
    records: Sequence[Record], table: Table, caption: str = "", baseline: Mapping[str, Any] | None = None
) -> Grid:
    """Records of one run as a table, whatever measured them; `baseline`: {field: value} of those that ratios are to."""
    axes = {name: list(dict.fromkeys(record[name] for record in records)) for name in table.rows}
    grid = make_grid(Experiment("", "", "", "", axes, baseline=baseline or {}), table, records)
    caption = f"{caption.rstrip('.')}." if caption else ""
    return replace(grid, title=table.title, caption=" ".join(filter(None, (caption, grid.caption))))


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


@dataclass(frozen=True)
class Answer:
    """A goal, or a paper's number, beside what was measured, as words. `verdict`: one of `VERDICTS`; "" of no goal."""

    asked: str
    figure: str
    paper: str
    here: str
    goal: str
    verdict: str


def answer_of(experiment: Experiment, asked: Goal | Claim, records: Sequence[Record]) -> Answer:
    """All cells that it speaks of as one row: the value, or how far they reach; undecided where the noise decides."""
    summary = Summary(experiment, records, asked.by)
    found = [summary.value(row, asked.column) for row in summary.rows if chosen(row, asked.where)]
    column = replace(asked.column, spread=False)
    known = [(value.middle, show_value(value, column), value) for value in found if isinstance(value.middle, float)]
    verdict, goal = "", ""
    if isinstance(asked, Goal):
        verdicts = [_judge(asked, middle, value) for middle, _, value in known]
        verdict = next((word for word in VERDICTS[::-1] if word in verdicts), "")
        if verdict and (n_reached := verdicts.count("reached")) not in (0, len(verdicts)):
            verdict += f", {n_reached} of {len(verdicts)} reached"
        goal = f"{asked.sign} {format(asked.bound, asked.column.form if asked.column.kind == 'value' else '.4g')}"
    words = [shown for _, shown, _ in sorted(known, key=lambda one: one[:2])]
    here = "not measured" if not words else words[0]
    if len(words) > 1:
        here += f" to {words[-1]} ({len(words)} cells)"
    figure = f"{asked.of.paper}, {asked.of.figure}" if asked.of else ""
    return Answer(asked.says, figure, asked.paper, here, goal, verdict)


def _judge(goal: Goal, middle: float, value: Value) -> str:
    is_met = middle <= goal.bound if goal.sign == "<=" else middle >= goal.bound
    is_between = value.low is not None and value.high is not None and value.low < goal.bound < value.high
    return "missed" if value.n_without else "undecided" if is_between else "reached" if is_met else "missed"
