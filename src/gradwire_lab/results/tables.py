"""Records as tables: summed up with what of them is noise, put into rows and columns, written as Markdown or text."""

import itertools
import math
import shutil
import statistics
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradwire_lab.results.experiment import Column, Experiment, Goal, Table
from gradwire_lab.results.records import Record

# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond the last the normal one is within 2 %.
_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23, 14: 2.14, 19: 2.09,
      29: 2.05, 49: 2.01, 99: 1.98}  # fmt: skip


@dataclass(frozen=True)
class Value:
    """What a table's cell shows."""

    middle: float | str | None  # median, mean, ratio or difference, scaled; None where it was not measured
    # quartiles, mean -+ standard deviation, or the 95 % interval of a difference; None where unknown
    low: float | None = None
    high: float | None = None
    is_noise: bool = False  # a ratio or difference that noise alone can explain; nothing is claimed of it
    n_without: int = 0  # runs that ended without such a number (their loss was NaN), and are not in `middle`


class Summary:
    """One experiment's records, those of equal axes but `over` taken together: `rows`, each with its "records"."""

    def __init__(self, experiment: Experiment, records: Sequence[Record], extra_axes: Sequence[str] = ()) -> None:
        self.experiment = experiment
        self._axes = [axis for axis in (*experiment.axes, *extra_axes) if axis not in experiment.over]
        self._groups: dict[str, list[Record]] = {}
        for record in records:
            self._groups.setdefault(self._name(record), []).append(record)
        self.rows = [{**group[0], "records": group} for group in self._groups.values()]

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
        one, other = (
            {
                repr([record.get(axis) for axis in self.experiment.over]): column.scale * float(record[column.field])
                for record in records
                if record.get(column.field) is not None
            }
            for records in (mine, base)
        )
        pairs = [one[place] - other[place] for place in one if place in other]
        if not pairs:
            return Value(None)
        middle, n_without = statistics.fmean(pairs), _plain(mine, column).n_without
        if len(pairs) < 2 or mine is base:
            return Value(middle, n_without=n_without)
        # By Student's t, with the next smaller number of degrees of freedom: never too narrow.
        quantile = _T[max(k for k in _T if k < len(pairs))]
        half = quantile * statistics.stdev(pairs) / math.sqrt(len(pairs))
        return Value(middle, middle - half, middle + half, abs(middle) <= half, n_without)


def _plain(records: Sequence[Record], column: Column) -> Value:
    known = [record[column.field] for record in records if record.get(column.field) is not None]
    if not known:
        return Value(None)
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in known):
        words = dict.fromkeys({True: "yes", False: "no"}.get(value, value) for value in known)
        return Value(", ".join(map(str, words)))
    if len(records) > 1:
        mean = column.scale * statistics.fmean(known)
        n_without = sum(one.get(column.field, 0) is None for one in records)
        if len(known) == 1:
            return Value(mean, n_without=n_without)
        spread = abs(column.scale) * statistics.stdev(known)
        return Value(mean, mean - spread, mean + spread, n_without=n_without)
    ends = [records[0].get(f"{column.field}_{end}") for end in ("low", "high")]
    low, high = (None if end is None else column.scale * float(end) for end in ends)
    return Value(column.scale * float(known[0]), low, high)


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


# ---- from records to a table as words

NOISE = "~"
# Of a goal, the best first.
VERDICTS = ("reached", "undecided", "missed")


def make_grid(
    experiment: Experiment, table: Table, records: Sequence[Record], most_columns: int | None = None
) -> "Grid":
    """The table of `records`; axes that are neither its rows nor its columns name rows too, if they vary.
    `most_columns`: no more than these; what it leaves out is named in the caption."""
    more = [name for name in (*table.rows, table.across) if name and name not in experiment.axes]
    summary = Summary(experiment, [record for record in records if chosen(record, table.where)], more)
    rows, used = summary.rows, {*table.rows, table.across, *experiment.over}
    left = [axis for axis in experiment.axes if axis not in used and len({str(row.get(axis)) for row in rows}) > 1]
    names = [*left, *table.rows]

    def head_of(row: Record) -> str:
        return experiment.label(table.across, row.get(table.across)) if table.across else ""

    by_name: dict[tuple[str, ...], dict[str, Record]] = {}
    for row in rows:
        name = tuple(experiment.label(axis, row.get(axis)) for axis in names)
        by_name.setdefault(name, {}).setdefault(head_of(row), row)
    heads = list(dict.fromkeys(map(head_of, rows)))
    columns = [column for column in table.columns if any(summary.value(row, column).middle is not None for row in rows)]
    room = most_columns - len(names) if most_columns else len(heads) * len(columns)
    heads = heads[: max(1, room)]
    shown = columns[: max(1, room // max(1, len(heads)))]
    title, headings = table.title, [": ".join(filter(None, (head, one.heading))) for head in heads for one in shown]
    if table.across and len(shown) == 1:  # said once
        title, headings = ", ".join(filter(None, [table.title, shown[0].heading])), heads
    lines, captions = [], []
    for name, by_head in by_name.items():
        places = [(by_head.get(head), column) for head, column in itertools.product(heads, shown)]
        values = [(summary.value(row, column) if row else Value(None), column) for row, column in places]
        lines.append([*name, *(show_value(*one) for one in values)])
        if any(value.is_noise for value, _ in values):
            captions = [f"{NOISE} within the noise: nothing is claimed."]
    if more_columns := [column.heading for column in columns if column not in shown]:
        captions.append(f"Also measured: {', '.join(more_columns)}.")
    axes = [name.replace("_", " ").replace("n bytes", "bytes") for name in names]
    return Grid(title, [*axes, *headings], lines, " ".join(captions), len(names))


def tabulate(
    records: Sequence[Record], table: Table, caption: str = "", baseline: Mapping[str, Any] | None = None
) -> "Grid":
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


def answer_of(experiment: Experiment, asked: Goal, records: Sequence[Record]) -> Answer:
    """All cells that it speaks of as one row: the value, or how far they reach; undecided where the noise decides."""
    summary = Summary(experiment, records, asked.by)
    found = [summary.value(row, asked.column) for row in summary.rows if chosen(row, asked.where)]
    column = replace(asked.column, spread=False)
    known = [(value.middle, show_value(value, column), value) for value in found if isinstance(value.middle, float)]
    verdict, goal = "", ""
    if asked.sign:
        verdicts = []
        for middle, _, value in known:
            is_met = middle <= asked.bound if asked.sign == "<=" else middle >= asked.bound
            is_between = value.low is not None and value.high is not None and value.low < asked.bound < value.high
            is_missed = value.n_without or not (is_met or is_between)
            verdicts.append("missed" if is_missed else "undecided" if is_between else "reached")
        verdict = next((word for word in VERDICTS[::-1] if word in verdicts), "")
        if verdict and (n_reached := verdicts.count("reached")) not in (0, len(verdicts)):
            verdict += f", {n_reached} of {len(verdicts)} reached"
        goal = f"{asked.sign} {format(asked.bound, asked.column.form if asked.column.kind == 'value' else '.4g')}"
    words = [shown for _, shown, _ in sorted(known, key=lambda one: one[:2])]
    here = words[0] if words else "not measured"
    if len(words) > 1:
        here += f" to {words[-1]} ({len(words)} cells)"
    figure = f"{asked.of.paper}, {asked.of.figure}" if asked.of else ""
    return Answer(asked.says, figure, asked.paper, here, goal, verdict)


# ---- the one style of every table

WIDTH = 80
# A longer name takes a line of its own, and its values the next one.
_LONGEST_NAME = 26
_GAP = "  "


@dataclass(frozen=True)
class Grid:
    """A table as words. The first column names a row; the others come in the order of what they are worth."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    n_names: int = 1  # how many of the first columns name a row


def to_markdown(grid: Grid) -> str:
    """The table with all its columns; numbers on the right."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in (grid.headings, *grid.rows)]
    rule = ["---"] * grid.n_names + ["---:"] * (len(grid.headings) - grid.n_names)
    lines = ["| " + " | ".join(row) + " |" for row in (escaped[0], rule, *escaped[1:])]
    title, caption = [f"**{grid.title}**", ""] if grid.title else [], ["", grid.caption] if grid.caption else []
    return "\n".join([*title, *lines, *caption]) + "\n"


def to_text(grid: Grid, width: int | None = WIDTH, left: str = "--wide also shows") -> str:
    """The table for a terminal: as many columns as fit into `width`, all without one; `left`: the words before the others."""
    names = [" ".join(filter(None, row[: grid.n_names])) for row in grid.rows]
    columns = list(zip(grid.headings[grid.n_names :], *(row[grid.n_names :] for row in grid.rows), strict=True))
    first, wide = " ".join(grid.headings[: grid.n_names]), max(map(len, names), default=0)
    name_width = max(wide if width is None else min(wide, _LONGEST_NAME), len(first))
    sizes, used = [], name_width
    for column in columns:
        size = max(map(len, column))
        if width is not None and used + len(_GAP) + size > width:
            break
        sizes.append(size)
        used += len(_GAP) + size

    def line(name: str, index: int) -> str:
        cells = (column[index].rjust(size) for column, size in zip(columns, sizes, strict=False))
        return _GAP.join([name.ljust(name_width), *cells]).rstrip()

    lines = [grid.title] if grid.title else []
    if any(grid.headings):
        lines += [line(first, 0), "-" * used]
    for index, name in enumerate(names, start=1):
        is_long = len(name) > name_width
        lines += [name, line("", index)] if is_long else [line(name, index)]
    if left_out := columns[len(sizes) :]:
        lines.append(f"{left}: {', '.join(column[0] for column in left_out)}")
    if grid.caption:
        lines += textwrap.wrap(grid.caption, width or used)
    return "\n".join(lines) + "\n"


def print_grid(grid: Grid, wide: bool | None = None) -> None:
    """Onto standard output: in the terminal's width, at least 80 columns, or 80 into a file or pipe; `wide`: all columns;
    None: the command has no --wide."""
    width = max(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns) if sys.stdout.isatty() else WIDTH
    print(to_text(grid, None if wide else width, "no room for" if wide is None else "--wide also shows"), flush=True)
