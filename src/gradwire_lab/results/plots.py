"""The one style of every figure: in the pages, in a report, of a command. Lines, points, bars and stacked bars, as SVG.

Figures are drawn in the light palette. Its colours become CSS variables in the SVG, so that one figure serves both schemes.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import statistics
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradwire.errors import Unsupported
from gradwire_lab.results.experiment import Plot
from gradwire_lab.results.palette import INK, PARTS, SLOTS, STYLE, SURFACE, as_variable, assign_slots, css_variables
from gradwire_lab.results.records import write_text
from gradwire_lab.results.summary import Summary, Value, chosen

Series = dict[str, list[tuple[Any, Value]]]

TIMES = "\u00d7"  # ruff takes the sign itself for a typing error
SIZE_IN = (7.2, 3.8)
_LOOK = 4  # raised when figures are drawn anew, whatever their points
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
_MARKERS = "osD^vPX<>"
_SUPERSCRIPTS = str.maketrans("-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")


# ---- what is drawn


def series_of(plot: Plot, summary: Summary) -> Series:
    """{name of a line: its (x, y) points}, in the order of the records; what was not measured is left out."""
    found: Series = {}
    for row in (row for row in summary.rows if chosen(row, plot.where)):
        xs = [record.get(plot.x) for record in row["records"]]
        x = statistics.fmean(xs) if len(set(xs)) > 1 else row.get(plot.x)
        value = summary.value(row, plot.y)
        if isinstance(value.middle, float) and x is not None:
            name = summary.experiment.label(plot.series, row.get(plot.series))
            is_number = isinstance(x, int | float) and not isinstance(x, bool)
            place = x * plot.x_scale if is_number else summary.experiment.label(plot.x, x)
            found.setdefault(name, []).append((place, value))
    return found


def digest_of(plot: Plot, series: Series) -> str:
    """What a drawn plot says it was drawn from: equal for equal points, whatever draws them."""
    points = {name: [(str(x), y.middle, y.low, y.high) for x, y in line] for name, line in series.items()}
    return hashlib.sha256(json.dumps([_LOOK, repr(plot), points]).encode()).hexdigest()[:16]


def digest_in(path: Path) -> str | None:
    """The digest of a drawn plot; None where there is none."""
    found = re.search(r"<!-- drawn from (\w+) -->\s*$", path.read_text(encoding="utf-8")) if path.is_file() else None
    return found.group(1) if found else None


# ---- drawing


def draw(plot: Plot, series: Series, name: str = "plot", size_in: tuple[float, float] = SIZE_IN) -> str:
    """The plot as an <svg> element with CSS variables for colours; `name` makes the ids in it unique in a page.

    Raises: Unsupported (matplotlib is not installed).
    """
    with _figure(size_in) as figure:
        _draw_in(figure.add_subplot(), plot, series)
        if len(series) > 1:
            size, is_beside = 8 if len(series) <= 12 else 6, plot.style == "lines"
            place = "outside right upper" if is_beside else "outside upper left"
            figure.legend(fontsize=size, frameon=False, loc=place, ncols=1 if is_beside else 4)
        return _as_element(figure, name)


def to_svg(plot: Plot, series: Series) -> str:
    """The plot as a file that follows the reader's colour scheme, its digest in a comment. Raises: Unsupported."""
    light, dark = css_variables(dark=False), css_variables(dark=True)
    fonts = "--sans:system-ui,'DejaVu Sans',sans-serif;font-family:var(--sans)"
    style = f"<style>svg{{{light}{fonts}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
    opening, _, rest = draw(plot, series).partition(">")
    opening = opening.replace(' aria-hidden="true"', ' xmlns="http://www.w3.org/2000/svg"')
    return f"{opening}>{style}{rest}\n<!-- drawn from {digest_of(plot, series)} -->\n"


def draw_panels(plots: Sequence[tuple[Plot, Series]], path: Path) -> None:
    """Several plots side by side in one file, PNG or SVG. Raises: GradwireError, Unsupported."""
    with _figure((4.6 * len(plots), 3.4), facecolor="white") as figure:
        for panel, (plot, series) in zip(figure.subplots(1, len(plots), squeeze=False)[0], plots, strict=True):
            _draw_in(panel, plot, series)
        handles = panel.get_legend_handles_labels()
        figure.legend(*handles, loc="outside upper center", ncols=6, fontsize=8, frameon=False)
        buffer, kind = io.BytesIO(), path.suffix.removeprefix(".")
        figure.savefig(buffer, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {})
    write_text(path, buffer.getvalue())


@contextmanager
def _figure(size_in: tuple[float, float], facecolor: str = "none") -> Iterator[Any]:
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Unsupported(f"plots need matplotlib ({error}); pip install 'gradwire[report]'") from error
    settings: Any = {**STYLE, "svg.hashsalt": "gradwire", "figure.facecolor": facecolor}
    with mpl.rc_context(settings):
        yield Figure(figsize=size_in, layout="constrained")


def _draw_in(axes: Any, plot: Plot, series: Series) -> None:
    axes.set(xlabel=plot.x_title or plot.x.replace("_", " "), ylabel=plot.y.heading, title=plot.title)
    if plot.style == "stacks":
        _draw_stacks(axes, series)
        axes.set(xlabel=plot.y.heading, ylabel="")
        return
    (_draw_bars if plot.style == "bars" else _draw_lines)(axes, series)
    for axis in plot.log:
        _scale_by_powers(axes.xaxis if axis == "x" else axes.yaxis)
    if "y" not in plot.log and plot.style == "bars":
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))


def _draw_lines(axes: Any, series: Series) -> None:
    """Points in order of x, where x is a number; a band, or a bar, from each low to its high."""
    slots = assign_slots(series)
    for name, points in series.items():
        if all(isinstance(x, int | float) for x, _ in points):
            points = sorted(points, key=lambda point: point[0])
        slot, again = slots[name]
        colour = SLOTS[slot][0]
        xs, ys = [x for x, _ in points], [y.middle for _, y in points]
        marker = _MARKERS[(list(SLOTS).index(slot) + 5 * again) % len(_MARKERS)] if len(points) <= 30 else ""
        axes.plot(
            xs,
            ys,
            marker=marker,
            ms=5,
            lw=1.6,
            label=textwrap.fill(name, 44),
            color=colour,
            ls=_DASHES[again % len(_DASHES)],
        )
        ends = [(y.low, y.high) for _, y in points]
        if len(points) == 1 and None not in ends[0]:
            axes.plot([xs[0]] * 2, ends[0], color=colour, lw=1, alpha=0.6)
        elif points and all(low is not None and high is not None for low, high in ends):
            axes.fill_between(xs, *zip(*ends, strict=True), color=colour, alpha=0.15, lw=0)


def _draw_bars(axes: Any, series: Series) -> None:
    slots = assign_slots(series)
    places = list(dict.fromkeys(x for points in series.values() for x, _ in points))
    width = 0.84 / max(1, len(series))
    for index, (name, points) in enumerate(series.items()):
        offsets = [places.index(x) + (index - (len(series) - 1) / 2) * width for x, _ in points]
        middles = [float(y.middle or 0.0) for _, y in points]
        # How far the quartiles lie below and above.
        below = [
            0.0 if y.low is None else max(0.0, middle - y.low) for middle, (_, y) in zip(middles, points, strict=True)
        ]
        above = [
            0.0 if y.high is None else max(0.0, y.high - middle) for middle, (_, y) in zip(middles, points, strict=True)
        ]
        axes.bar(offsets, middles, width * 0.94, label=name, color=SLOTS[slots[name][0]][0],
                 yerr=[below, above] if any(below + above) else None, ecolor="#5d6876")  # fmt: skip
    turn = 20 if max((len(str(place)) for place in places), default=0) > 12 else 0
    axes.set_xticks(range(len(places)), [str(place) for place in places], rotation=turn, fontsize=9)
    axes.grid(axis="x", visible=False)


def _draw_stacks(axes: Any, series: Series) -> None:
    """A horizontal bar a place, the series its parts one after another; shares of wide parts stand on them."""
    places = list(dict.fromkeys(x for points in series.values() for x, _ in points))
    totals = dict.fromkeys(places, 0.0)
    for place, y in (point for points in series.values() for point in points):
        totals[place] += float(y.middle or 0)
    left, widest = dict.fromkeys(places, 0.0), max(totals.values(), default=1) or 1
    for part, points in series.items():
        widths = [float(y.middle or 0) for _, y in points]
        lines = [places.index(place) for place, _ in points]
        bars = axes.barh(
            lines, widths, 0.6, [left[place] for place, _ in points], color=PARTS[part][0], ec="none", label=part
        )
        shares = [f"{width / totals[place]:.0%}" if width > 0.09 * widest else ""
                  for width, (place, _) in zip(widths, points, strict=True)]  # fmt: skip
        axes.bar_label(bars, shares, label_type="center", color=SURFACE if part.startswith("exposed") else INK, size=10)
        for width, (place, _) in zip(widths, points, strict=True):
            left[place] += width
    for line, total in enumerate(totals.values()):
        words = f" {total:,.0f}" if total >= 100 else f" {total:.3g}"
        axes.text(total, line, words, va="center", weight="bold", size=10.5)
    axes.set_yticks(range(len(places)), places)
    axes.set_ylim(len(places) - 0.5, -0.5)
    axes.set_xlim(0, 1.15 * widest)
    axes.grid(axis="y", visible=False)


def _scale_by_powers(axis: Any) -> None:
    """A log axis with ticks that people read: 1, 2 and 5 over three decades, powers over more."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes = axis.axes
    (axes.set_yscale if axis is axes.yaxis else axes.set_xscale)("log")
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1500 * low else (1,), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: format_power(value)))
    axis.set_minor_locator(NullLocator())


def format_power(value: float) -> str:
    """`0.02`, `500`, and beyond these sizes 10 with its power."""
    if value == 0 or 1e-2 <= abs(value) < 1e5:
        return f"{value:,.10g}"
    mantissa, _, power = f"{value:.1e}".partition("e")
    raised = "10" + str(int(power)).translate(_SUPERSCRIPTS)
    return raised if mantissa == "1.0" else f"{mantissa.removesuffix('.0')}{TIMES}{raised}"


def _as_element(figure: Any, name: str) -> str:
    """The figure as an <svg> element: ids made unique by `name`, colours as CSS variables, the page's own fonts."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r"<svg [^>]*?viewBox=\"([^\"]*)\"[^>]*>", r'<svg viewBox="\1" aria-hidden="true">', svg, count=1)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg).replace("xlink:href", "href")
    svg = re.sub(r"font(-family)?: ([^;\"]*?)'DejaVu Sans'[^;\"]*", _font, svg)
    svg = re.sub(r"#[0-9a-f]{6}\b", lambda match: as_variable(match.group()), svg)
    svg = re.sub(r"(\d+\.\d\d)\d+", r"\1", svg)  # a hundredth of a point is enough
    return re.sub(r"\s*\n\s*", " ", svg).replace("> <", "><").strip()


def _font(match: re.Match[str]) -> str:
    # `font-family` alone, or the shorthand `font: bold 11px 'DejaVu Sans', ...`, which must end in a family.
    return "font-family: inherit" if match.group(1) else f"font: {match.group(2)}var(--sans, sans-serif)"
