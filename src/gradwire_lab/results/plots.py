"""The one style of every plot of records: lines over a number, or bars, as SVG."""

from __future__ import annotations

import hashlib
import io
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.errors import Unsupported
from gradwire_lab.results.experiment import Plot
from gradwire_lab.results.palette import MARKERS, SLOTS, STYLE, assign_slots
from gradwire_lab.results.records import write_bytes
from gradwire_lab.results.summary import Summary, Value, chosen

_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
Series = dict[str, list[tuple[Any, Value]]]


def series_of(plot: Plot, summary: Summary) -> Series:
    """{name of a line: its (x, y) points}, in the order of the records; what was not measured is left out."""
    found: Series = {}
    for row in summary.rows:
        if chosen(row, plot.where):
            value, x = summary.value(row, plot.y), _x_of(row, plot)
            if isinstance(value.middle, float) and x is not None:
                name = summary.experiment.label(plot.series, row.get(plot.series))
                is_number = isinstance(x, int | float) and not isinstance(x, bool)
                place = x * plot.x_scale if is_number else summary.experiment.label(plot.x, x)
                found.setdefault(name, []).append((place, value))
    return found


def _x_of(row: Mapping[str, Any], plot: Plot) -> Any:
    """Where the row stands; the mean, if its records differ in it."""
    xs = [record.get(plot.x) for record in row["records"]]
    return statistics.fmean(xs) if len(set(xs)) > 1 else row.get(plot.x)


def digest_of(plot: Plot, series: Series) -> str:
    """What a drawn plot says it was drawn from: equal for equal points, whatever draws them."""
    points = {name: [(str(x), y.middle, y.low, y.high) for x, y in line] for name, line in series.items()}
    return hashlib.sha256(json.dumps([repr(plot), points]).encode()).hexdigest()[:16]


def to_svg(plot: Plot, series: Series) -> str:
    """The plot, its digest in a comment. Raises: Unsupported (matplotlib is not installed)."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Unsupported(f"plots need matplotlib ({error}); pip install 'gradwire[report]'") from error
    settings: Any = {**STYLE, "svg.hashsalt": "gradwire"}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(7.2, 3.8), layout="constrained")
        axes = figure.add_subplot()
        slots = assign_slots(series)
        draw = _draw_lines if plot.style == "lines" else _draw_bars
        draw(axes, series, slots)
        axes.set(xlabel=plot.x_title or plot.x.replace("_", " "), ylabel=plot.y.heading, title=plot.title)
        for axis in plot.log:
            _scale_by_powers(axes, axis)
        if "y" not in plot.log:
            axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
        if len(series) > 1:
            figure.legend(loc="outside right upper", fontsize=9, frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", buffer.getvalue(), flags=re.DOTALL)
    return f"{svg.rstrip()}\n<!-- drawn from {digest_of(plot, series)} -->\n"


def _scale_by_powers(axes: Any, axis: str) -> None:
    """A logarithmic axis with plain numbers on it: text that stays text in an SVG knows no exponents."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        def _num_to_string(self, x: float, vmin: float, vmax: float) -> str:
            return f"{x:g}"

    (axes.set_xscale if axis == "x" else axes.set_yscale)("log")
    chosen_axis = axes.xaxis if axis == "x" else axes.yaxis
    chosen_axis.set_major_formatter(Plain())
    chosen_axis.set_minor_formatter(Plain(labelOnlyBase=False, minor_thresholds=(2, 0.4)))


def digest_in(path: Path) -> str | None:
    """The digest of a drawn plot; None where there is none."""
    if not path.is_file():
        return None
    found = re.search(r"<!-- drawn from (\w+) -->\s*$", path.read_text(encoding="utf-8"))
    return found.group(1) if found else None


def save_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib figure in the format of the name. Raises: GradwireError."""
    buffer = io.BytesIO()
    kind = path.suffix.removeprefix(".")
    figure.savefig(buffer, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {})
    write_bytes(path, buffer.getvalue())


def _draw_lines(axes: Any, series: Series, slots: Mapping[str, tuple[str, int]]) -> None:
    for index, (name, points) in enumerate(series.items()):
        slot, again = slots[name]
        colour = SLOTS[slot][0]
        xs, ys = [x for x, _ in points], [y.middle for _, y in points]
        if all(isinstance(x, float | int) for x in xs):
            ordered = sorted(zip(xs, range(len(xs)), strict=True))
            xs, points = [x for x, _ in ordered], [points[at] for _, at in ordered]
            ys = [y.middle for _, y in points]
        axes.plot(xs, ys, color=colour, marker=MARKERS[index % len(MARKERS)], ms=4, lw=1.5, label=name,
                  ls=_DASHES[again % len(_DASHES)])  # fmt: skip
        if len(points) == 1 and points[0][1].low is not None:
            (y,) = (y for _, y in points)
            axes.plot([xs[0]] * 2, [y.low, y.high], color=colour, lw=1, alpha=0.6)
        elif all(y.low is not None and y.high is not None for _, y in points):
            axes.fill_between(
                xs, [y.low for _, y in points], [y.high for _, y in points], color=colour, alpha=0.15, lw=0
            )


def _draw_bars(axes: Any, series: Series, slots: Mapping[str, tuple[str, int]]) -> None:
    places = list(dict.fromkeys(x for points in series.values() for x, _ in points))
    width = 0.84 / max(1, len(series))
    for index, (name, points) in enumerate(series.items()):
        offsets = [places.index(x) + (index - (len(series) - 1) / 2) * width for x, _ in points]
        ends: list[list[float]] = [[], []]  # how far the quartiles lie below and above
        for _, y in points:
            middle = float(y.middle or 0.0)
            ends[0].append(0.0 if y.low is None else max(0.0, middle - y.low))
            ends[1].append(0.0 if y.high is None else max(0.0, y.high - middle))
        axes.bar(offsets, [y.middle for _, y in points], width * 0.94, label=name, color=SLOTS[slots[name][0]][0],
                 yerr=ends if any(map(any, ends)) else None, ecolor="#5d6876")  # fmt: skip
    turn = 20 if max((len(str(place)) for place in places), default=0) > 12 else 0
    axes.set_xticks(range(len(places)), [str(place) for place in places], rotation=turn, fontsize=9)
    axes.grid(axis="x", visible=False)


def draw_panels(plots: Sequence[tuple[Plot, Series]], path: Path) -> None:
    """Several plots side by side in one file, PNG or SVG. Raises: GradwireError, Unsupported."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Unsupported(f"plots need matplotlib ({error}); pip install 'gradwire[report]'") from error
    settings: Any = {**STYLE, "svg.hashsalt": "gradwire", "figure.facecolor": "white"}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(4.2 * len(plots), 3.4), layout="constrained")
        for panel, (plot, series) in zip(figure.subplots(1, len(plots), squeeze=False)[0], plots, strict=True):
            (_draw_lines if plot.style == "lines" else _draw_bars)(panel, series, assign_slots(series))
            panel.set(xlabel=plot.x_title or plot.x.replace("_", " "), ylabel=plot.y.heading)
        figure.legend(
            *panel.get_legend_handles_labels(), loc="outside upper center", ncols=6, fontsize=8, frameon=False
        )
        save_figure(figure, path)
