"""The one style and palette of every figure: in the pages, in a report, of a command. Lines, bars and stacked bars, as SVG.

A colour is a slot with a light and a dark shade; slots are apart in hue and in lightness, and readable as text. Figures are
drawn in the light shades, which become CSS variables in the SVG, so that one figure serves both schemes.
"""

import hashlib
import io
import json
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradwire.errors import needs_extra
from gradwire_lab.results.experiment import Plot
from gradwire_lab.results.records import write_text
from gradwire_lab.results.tables import Summary, Value, chosen

INK, MUTED, GRID, SURFACE = "#1b2430", "#5d6876", "#e2e6eb", "#fdfdfd"

SLOTS: dict[str, tuple[str, str]] = {
    "c0": ("#6f7a88", "#9aa5b4"),
    "c1": ("#1d5fd1", "#74a9ff"),
    "c2": ("#d2560c", "#ff9a57"),
    "c3": ("#0e8563", "#45cf9c"),
    "c4": ("#7a3fd0", "#bd9bff"),
    "c5": ("#c2297a", "#ff86c0"),
    "c6": ("#0a7d94", "#3fcbe2"),
    "c7": ("#94690a", "#e3b84d"),
    "c8": ("#b3261e", "#ff8a80"),
    "c9": ("#557a12", "#a9d94f"),
    "c10": ("#7d5138", "#d3a581"),
    "c11": ("#30373f", "#e8edf3"),
}
# Where the seconds of a step go.
PARTS = {
    "computation": ("#b8c4d2", "#4b5a6b"),
    "exposed communication": ("#c0392b", "#ef6a5b"),
    "waiting for slower ranks": ("#e6a6a0", "#8f4a44"),
}
# Schemes that appear on most pages keep their slot from page to page; all others take what is free, in order of name.
_MOST_SHOWN = "plain gcomp truncate power-sgd acp-sgd periodic zstd zlib top-k aqgb slimgc ddp"
FIXED_SLOTS = dict(zip(_MOST_SHOWN.split(), SLOTS, strict=True))
MARKERS = "osD^vPX<>"

# How every figure looks; matplotlib's settings.
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: the reader's own font, selectable, and a third of the size
    "text.parse_math": False,  # a `$` in a name is a dollar
    "font.family": "DejaVu Sans",  # ships with matplotlib; wider than the system fonts that take its place
    "font.size": 11,
    **{f"axes.spines.{side}": False for side in ("top", "right", "left")},
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("ytick.major.size", "ytick.minor.size"), 0),
    "xtick.minor.size": 2,
    "text.color": INK,
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"),
    "lines.linewidth": 2,
    "lines.solid_capstyle": "round",
}

# CSS variable: (light, dark).
_VARIABLES: dict[str, tuple[str, str]] = {
    "ink": (INK, "#e6ebf1"),
    "muted": (MUTED, "#9ba7b5"),
    "grid": (GRID, "#2d3641"),
    "surface": (SURFACE, "#161b22"),
    **{part.partition(" ")[0]: colours for part, colours in PARTS.items()},
    **SLOTS,
}
_VARIABLE_OF = {light: f"var(--{name})" for name, (light, _) in _VARIABLES.items()}


def css_variables(dark: bool) -> str:
    """The palette as CSS declarations."""
    return "".join(f"--{name}:{colours[dark]};" for name, colours in _VARIABLES.items())


def assign_slots(names: Iterable[str]) -> dict[str, tuple[str, int]]:
    """A slot for each of `names` that share a figure, and how often that slot was given before (0: never). A name with
    a fixed slot has it, with options (`gcomp:bits=10`) only where the bare name is not there. Free ones go round in
    order of name; after these, slots repeat, to be told apart by markers and dashes."""
    ordered = sorted(set(names))
    slots: dict[str, tuple[str, int]] = {}
    for name in ordered:
        scheme = name.removesuffix(" paper")
        bare = scheme.partition(":")[0]
        first = next(one for one in ordered if one.partition(":")[0] == name.partition(":")[0])
        if bare in FIXED_SLOTS and (scheme == bare or (bare not in ordered and name == first)):
            slots[name] = (FIXED_SLOTS[bare], 0)
    taken = {slot for slot, _ in slots.values()}
    free = [slot for slot in SLOTS if slot not in taken and slot not in ("c0", "c11")]
    usable = free or [slot for slot in SLOTS if slot not in ("c0", "c11")]
    for index, name in enumerate(name for name in ordered if name not in slots):
        slots[name] = (usable[index % len(usable)], index // len(usable) + (not free))
    return slots


Series = dict[str, list[tuple[Any, Value]]]
Slots = Mapping[str, tuple[str, int]]

TIMES = "\u00d7"  # ruff takes the sign itself for a typing error
SIZE_IN = (7.2, 3.8)
_LOOK = 3  # raised when figures are drawn anew, whatever their points
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)))
_SUPERSCRIPTS = str.maketrans("-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")
# Where a label may stand beside its point, in points, the best place first.
_OFFSETS = ((8, 0), (-8, 0), (0, 8), (0, -8), (7, 7), (7, -7), (-7, 7), (-7, -7), (18, 14), (18, -14), (-18, 14),
            (-18, -14))  # fmt: skip


# ---- what is drawn


def series_of(plot: Plot, summary: Summary) -> Series:
    """{name of a line: its (x, y) points}, in the order of the records; what was not measured is left out."""
    found: Series = {}
    for row in summary.rows:
        if chosen(row, plot.where):
            value, xs = summary.value(row, plot.y), [record.get(plot.x) for record in row["records"]]
            x = statistics.fmean(xs) if len(set(xs)) > 1 else xs[0]  # the mean, if its records differ in it
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
    """An <svg> element with CSS variables for colours, its ids with `name` before them. Raises: Unsupported."""
    with _figure(size_in) as figure:
        _draw_in(figure.add_subplot(), plot, series)
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
            _draw_in(panel, plot, series, are_named=False)
        handles = panel.get_legend_handles_labels()
        figure.legend(*handles, loc="outside upper center", ncols=6, fontsize=8, frameon=False)
        buffer, kind = io.BytesIO(), path.suffix.removeprefix(".")
        figure.savefig(buffer, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {})
    write_text(path, buffer.getvalue())


@contextmanager
def _figure(size_in: tuple[float, float], facecolor: str = "none") -> Iterator[Any]:
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise needs_extra(f"plots need matplotlib ({error})", "report") from error
    settings: Any = {**STYLE, "svg.hashsalt": "gradwire", "figure.facecolor": facecolor}
    with mpl.rc_context(settings):
        figure = Figure(figsize=size_in, layout="constrained")
        FigureCanvasAgg(figure)  # measures text for the placing of labels
        yield figure


def _draw_in(axes: Any, plot: Plot, series: Series, are_named: bool = True) -> None:
    axes.set(xlabel=plot.x_title or plot.x.replace("_", " "), ylabel=plot.y.heading, title=plot.title)
    if plot.style == "stacks":
        _draw_stacks(axes, series)
        axes.set(xlabel=plot.y.heading, ylabel="")
        return
    slots = assign_slots(series)
    (_draw_bars if plot.style == "bars" else _draw_lines)(axes, series, slots)
    for axis in plot.log:
        _scale_by_powers(axes.xaxis if axis == "x" else axes.yaxis)
    if "y" not in plot.log and plot.style == "bars":
        axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
    if are_named and plot.style != "bars" and all(len(points) == 1 for points in series.values()):
        axes.margins(0.08)
        _name_points(axes, [(*line[0], name, SLOTS[slots[name][0]][0]) for name, line in series.items()])
    elif are_named and len(series) > 1:
        n = max(1, min(4, 95 // (6 + max(len(name) for name in series))))  # of some 95 characters and their marks
        place = {"loc": "outside upper left", "ncols": n} if plot.style == "bars" else {"loc": "outside right upper"}
        axes.figure.legend(fontsize=9, frameon=False, **place)


def _draw_lines(axes: Any, series: Series, slots: Slots) -> None:
    for name, points in series.items():
        if all(isinstance(x, int | float) for x, _ in points):
            points = sorted(points, key=lambda point: point[0])
        slot, again = slots[name]
        look = {"color": SLOTS[slot][0], "ls": _DASHES[again % len(_DASHES)]}
        xs, ys = [x for x, _ in points], [y.middle for _, y in points]
        marker = MARKERS[(list(SLOTS).index(slot) + 5 * again) % len(MARKERS)] if len(points) <= 30 else ""
        axes.plot(xs, ys, marker=marker, ms=5, lw=1.6, label=name, **look)
        ends = [(y.low, y.high) for _, y in points]
        if len(points) == 1 and None not in ends[0]:
            axes.plot([xs[0]] * 2, ends[0], color=look["color"], lw=1, alpha=0.6)
        elif points and all(low is not None and high is not None for low, high in ends):
            axes.fill_between(xs, *zip(*ends, strict=True), color=look["color"], alpha=0.15, lw=0)


def _draw_bars(axes: Any, series: Series, slots: Slots) -> None:
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
                 yerr=ends if any(map(any, ends)) else None, ecolor=MUTED)  # fmt: skip
    turn = 20 if max((len(str(place)) for place in places), default=0) > 12 else 0
    axes.set_xticks(range(len(places)), [str(place) for place in places], rotation=turn, fontsize=9)
    axes.grid(axis="x", visible=False)


def _draw_stacks(axes: Any, series: Series) -> None:
    """A horizontal bar a place, the series its parts one after another; shares of wide parts stand on them."""
    places = list(dict.fromkeys(x for points in series.values() for x, _ in points))
    totals = {place: sum(float(y.middle or 0) for points in series.values() for x, y in points if x == place)
              for place in places}  # fmt: skip
    left = dict.fromkeys(places, 0.0)
    for part, points in series.items():
        for place, y in points:
            width = float(y.middle or 0)
            axes.barh(places.index(place), width, 0.6, left[place], color=PARTS[part][0], ec="none",
                      label=part if place == points[0][0] else None)  # fmt: skip
            if width > 0.09 * max(totals.values()):
                axes.text(left[place] + width / 2, places.index(place), f"{width / totals[place]:.0%}", ha="center",
                          va="center", color=SURFACE if part.startswith("exposed") else INK, size=10)  # fmt: skip
            left[place] += width
    for place, total in totals.items():
        text = f" {total:,.0f}" if total >= 100 else f" {total:.3g}"
        axes.text(total, places.index(place), text, va="center", weight="bold", size=10.5)
    axes.set_yticks(range(len(places)), places)
    axes.set_ylim(len(places) - 0.5, -0.5)
    axes.set_xlim(0, 1.15 * max(totals.values(), default=1) or 1)
    axes.grid(axis="y", visible=False)
    axes.figure.legend(loc="outside upper left", ncols=4, fontsize=9, frameon=False)


# ---- axes and labels


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
    mantissa = mantissa.removesuffix(".0")
    raised = "10" + str(int(power)).translate(_SUPERSCRIPTS)
    return raised if mantissa == "1" else f"{mantissa}{TIMES}{raised}"


def _name_points(axes: Any, points: Sequence[tuple[float, Value, str, str]]) -> None:
    """Name points beside them, each where it hides neither a point nor another label: (x, y, text, colour)."""
    figure = axes.figure
    figure.get_layout_engine().execute(figure)  # laid out for good, so that the frame does not move any more
    figure.set_layout_engine("none")
    renderer, scale, frame = figure.canvas.get_renderer(), figure.dpi / 72, axes.get_window_extent()
    marks = [axes.transData.transform((x, y.middle)) for x, y, _, _ in points]
    blocked = [(x - 5 * scale, y - 5 * scale, x + 5 * scale, y + 5 * scale) for x, y in marks]
    for x, y, text, colour in points:
        found: list[tuple[float, Any, Any]] = []
        for rank, (dx, dy) in enumerate(_OFFSETS):
            across = "left" if dx > 0 else "right" if dx < 0 else "center"
            down = "center" if not dy else "bottom" if dy > 0 else "top"
            label = axes.annotate(text, (x, y.middle), xytext=(dx, dy), textcoords="offset points", color=colour, ha=across,
                                  va=down, size=9, weight="bold")  # fmt: skip
            x0, y0, x1, y1 = area = label.get_window_extent(renderer).extents
            outside = max(0, frame.x0 - x0) + max(0, x1 - frame.x1) + max(0, y1 - frame.y1) + max(0, frame.y0 - y0)
            cost = sum(_shared(area, other) for other in blocked) + 1e3 * outside + rank / 2
            found.append((cost, label, area))
        (_, _, area), *others = sorted(found, key=lambda one: one[0])
        for _, label, _ in others:
            label.remove()
        blocked.append(area)


def _shared(a: Sequence[float], b: Sequence[float]) -> float:
    return max(0, min(a[2], b[2]) - max(a[0], b[0])) * max(0, min(a[3], b[3]) - max(a[1], b[1]))


def _as_element(figure: Any, name: str) -> str:
    """The figure as an <svg> element: ids made unique by `name`, colours as CSS variables, the page's own fonts."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r"<svg [^>]*?viewBox=\"([^\"]*)\"[^>]*>", r'<svg viewBox="\1" aria-hidden="true">', svg, count=1)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg).replace("xlink:href", "href")
    # `font-family` alone, or the shorthand `font: bold 11px 'DejaVu Sans', ...`, which must end in a family.
    svg = re.sub(r"font-family: [^;\"]*?'DejaVu Sans'[^;\"]*", "font-family: inherit", svg)
    svg = re.sub(r"font: ([^;\"]*?)'DejaVu Sans'[^;\"]*", r"font: \1var(--sans, sans-serif)", svg)
    svg = re.sub(r"#[0-9a-f]{6}\b", lambda match: _VARIABLE_OF.get(match.group(), match.group()), svg)
    svg = re.sub(r"(\d+\.\d\d)\d+", r"\1", svg)  # a hundredth of a point is enough
    return re.sub(r"\s*\n\s*", " ", svg).replace("> <", "><").strip()
