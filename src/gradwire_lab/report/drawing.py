"""How every figure looks: colours per scheme, axes, direct labels, and SVG that follows the page's colour scheme.

Figures are drawn in the light palette; its colours become CSS variables in the SVG, so that one figure serves both.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from gradwire.errors import Unsupported
from gradwire_lab.results.palette import GRID, INK, MARKERS, MUTED, SLOTS, STYLE, assign_slots

__all__ = [
    "SLOTS",
    "Drawing",
    "PageTable",
    "Palette",
    "Tile",
    "add_end_labels",
    "add_point_labels",
    "as_variable",
    "format_power",
    "new_axes",
    "set_log_axis",
    "to_svg",
]

SURFACE = "#fdfdfd"
# The two signs that ruff takes for typing errors.
TIMES, DASH = "\u00d7", "\u2013"
COMPUTE, CODEC, DECODE, EXPOSED, WAIT = "#b8c4d2", "#e0902f", "#f2c078", "#c0392b", "#e6a6a0"

# CSS variable: (light, dark).
_VARIABLES: dict[str, tuple[str, str]] = {
    "ink": (INK, "#e6ebf1"),
    "muted": (MUTED, "#9ba7b5"),
    "grid": (GRID, "#2d3641"),
    "surface": (SURFACE, "#161b22"),
    "compute": (COMPUTE, "#4b5a6b"),
    "codec": (CODEC, "#e39a3c"),
    "decode": (DECODE, "#f4cf96"),
    "exposed": (EXPOSED, "#ef6a5b"),
    "wait": (WAIT, "#8f4a44"),
    **SLOTS,
}
_NAMES = {light: name for name, (light, _) in _VARIABLES.items()}
_SUPERSCRIPTS = str.maketrans("-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)))

# One column of the page, and both with the gap between them: type has one size all over the page.
WIDTH_IN, WIDE_IN = 5.7, 11.8

_STYLE: Any = STYLE


@dataclass(frozen=True)
class Drawing:
    """One figure of the page. `name` is unique; `alt` says in words what the figure shows."""

    name: str
    title: str
    caption: str
    svg: str
    wide: bool = False


@dataclass(frozen=True)
class PageTable:
    """Columns are (heading, is_number)."""

    title: str
    columns: Sequence[tuple[str, bool]]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Tile:
    """What one scheme comes to, in large type: (value, what it means) a figure."""

    label: str
    values: Sequence[tuple[str, str]]
    slot: str


@dataclass
class Palette:
    """A colour, marker and dash for every name, the same all over the page."""

    slots: dict[str, str] = field(default_factory=dict)
    order: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, *groups: Iterable[str]) -> Palette:
        """Colours for groups of names of which only those within one group ever share a figure.

        Fixed slots first, then free ones in order of name; after these, slots repeat with other markers and dashes.
        """
        palette = cls()
        for group in groups:
            for name, (slot, again) in assign_slots(group).items():
                palette.slots[name], palette.order[name] = slot, again
        return palette

    def slot(self, name: str) -> str:
        return self.slots[name]

    def colour(self, name: str) -> str:
        return SLOTS[self.slots[name]][0]

    def marker(self, name: str) -> str:
        return MARKERS[(list(SLOTS).index(self.slots[name]) + self.order.get(name, 0) * 5) % len(MARKERS)]

    def dash(self, name: str) -> Any:
        return _DASHES[self.order.get(name, 0) % len(_DASHES)]


def css_variables(dark: bool) -> str:
    """The palette as CSS declarations."""
    return "".join(f"--{name}:{colours[dark]};" for name, colours in _VARIABLES.items())


_LABEL_PT = 14.5  # a line of 11 pt type


@contextmanager
def new_axes(width_in: float = WIDTH_IN, height_in: float = 3.4, labels_at_right: Sequence[str] = ()) -> Iterator[Any]:
    """An Axes to draw on, in the report's style, with room at its right for `labels_at_right`.

    Raises: Unsupported (matplotlib is not installed).
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Unsupported(
            f"a report needs matplotlib ({error}); install it with: pip install 'gradwire[report]'"
        ) from error
    # Room for a line of 11 pt type each, so that labels of many methods neither overlap nor leave the picture.
    height_in = max(height_in, 0.9 + _LABEL_PT / 72 * len(labels_at_right))
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width_in, height_in), layout="constrained")
        FigureCanvasAgg(figure)  # measures text for the placing of labels; never draws a pixel of the page
        axes = figure.add_subplot()
        axes.grid(axis="x", visible=False)
        if labels_at_right:
            longest = max(len(label) for label in labels_at_right)
            layout: Any = figure.get_layout_engine()
            # Bold DejaVu takes 7.8 pt a character; half a line above the topmost label.
            layout.set(rect=(0, 0, 1 - min(0.45, (0.108 * longest + 0.28) / width_in), 1 - 0.1 / height_in))
        yield axes


def add_end_labels(axes: Any, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Name lines at the right edge; labels that would overlap move apart, with a thin leader to their line.

    Args:
        ends: (x, y of the line's end in data units, text, colour) a line.
    """
    figure = axes.figure
    limits = axes.get_xlim(), axes.get_ylim()
    _settle(figure)
    box = axes.get_window_extent()
    wanted = []
    for x, y, text, colour in ends:
        at_x, at_y = axes.transAxes.inverted().transform(axes.transData.transform((x, y)))
        wanted.append((min(max(at_y, 0.0), 1.0), at_x, text, colour))
    wanted.sort(key=lambda label: label[0])
    gap = _LABEL_PT / 72 * figure.dpi / box.height
    unit = 8 / 72 * figure.dpi / box.width  # of the leader
    heights = _spread([label[0] for label in wanted], gap)
    for (height, at_x, text, colour), y in zip(wanted, heights, strict=True):
        line = {"transform": axes.transAxes, "color": colour, "clip_on": False, "in_layout": False}
        if at_x < 0.97:  # this line ends before the others: a faint guide leads on to the edge
            axes.plot([at_x, 1], [height, height], lw=0.9, alpha=0.4, ls=(0, (1, 2)), **line)
        axes.plot([1 + 0.3 * unit, 1 + 1.2 * unit, 1 + 1.7 * unit], [height, y, y], lw=0.9, **line)
        axes.text(1 + 2.2 * unit, y, text, va="center", weight="bold", **line)
    axes.set(xlim=limits[0], ylim=limits[1])


def add_point_labels(axes: Any, points: Sequence[tuple[float, float, str, str]], others: Sequence[Any] = ()) -> None:
    """Name points beside them, each where it hides neither a point nor another label.

    Args:
        points: (x, y, text, colour) in data units. others: further (x, y) that labels keep clear of.
    """
    figure = axes.figure
    _settle(figure)
    renderer = figure.canvas.get_renderer()
    scale = figure.dpi / 72
    frame = axes.get_window_extent()
    marks = [axes.transData.transform(point[:2]) for point in (*points, *others)]
    blocked = [(x - 5 * scale, y - 5 * scale, x + 5 * scale, y + 5 * scale) for x, y in marks]
    for x, y, text, colour in points:
        best: tuple[float, Any, Any] | None = None
        for rank, (dx, dy) in enumerate(_OFFSETS):
            alignment = {
                "ha": "left" if dx > 0 else "right" if dx < 0 else "center",
                "va": "center" if not dy else "bottom",
            }
            if dy < 0:
                alignment["va"] = "top"
            label = axes.annotate(
                text, (x, y), xytext=(dx, dy), textcoords="offset points", color=colour, weight="bold", **alignment
            )
            extent = label.get_window_extent(renderer)
            area = (extent.x0, extent.y0, extent.x1, extent.y1)
            outside = max(0, frame.x0 - area[0]) + max(0, area[2] - frame.x1) + max(0, area[3] - frame.y1)
            outside += max(0, frame.y0 - area[1])
            cost = sum(_overlap(area, other) for other in blocked) + 1e3 * outside + 0.5 * rank
            if best is None or cost < best[0]:
                if best is not None:
                    best[1].remove()
                best = (cost, label, area)
            else:
                label.remove()
        assert best is not None
        blocked.append(best[2])


def set_log_axis(axis: Any) -> None:
    """A log axis with ticks that people read: 1, 2 and 5 over three decades, powers over more."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes = axis.axes
    (axes.set_yscale if axis is axes.yaxis else axes.set_xscale)("log")
    low, high = axis.get_view_interval()
    subs = (1, 2, 5) if high < 1500 * low else (1,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=12))
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


def to_svg(axes: Any, name: str) -> str:
    """The figure as an <svg> element: ids made unique by `name`, colours as CSS variables, the page's own fonts."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        axes.figure.savefig(
            buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<svg [^>]*?viewBox=\"([^\"]*)\"[^>]*>", r'<svg viewBox="\1" aria-hidden="true">', svg, count=1)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", svg)
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r"font(-family)?: ([^;\"]*?)'DejaVu Sans'[^;\"]*", _font, svg)
    return re.sub(r"#[0-9a-f]{6}\b", lambda match: as_variable(match.group()), svg).strip()


_OFFSETS = (
    (8, 0),
    (-8, 0),
    (0, 8),
    (0, -8),
    (7, 7),
    (7, -7),
    (-7, 7),
    (-7, -7),
    (18, 14),
    (18, -14),
    (-18, 14),
    (-18, -14),
)


def _settle(figure: Any) -> None:
    """Lay the figure out for good, without drawing it: labels are placed in a frame that does not move any more."""
    figure.get_layout_engine().execute(figure)
    figure.set_layout_engine("none")


def _font(match: re.Match[str]) -> str:
    # `font-family` alone, or the shorthand `font: bold 11px 'DejaVu Sans', ...`, which must end in a family.
    return "font-family: inherit" if match.group(1) else f"font: {match.group(2)}var(--sans)"


def as_variable(colour: str) -> str:
    """A colour of the light palette as its CSS variable, any other as it is."""
    return f"var(--{_NAMES[colour]})" if colour in _NAMES else colour


def _overlap(a: Sequence[float], b: Sequence[float]) -> float:
    return max(0, min(a[2], b[2]) - max(a[0], b[0])) * max(0, min(a[3], b[3]) - max(a[1], b[1]))


def _spread(heights: Sequence[float], gap: float) -> list[float]:
    """Sorted `heights` moved as little as needed so that neighbours are `gap` apart, and inside 0..1 if they fit."""
    groups: list[tuple[float, int]] = []  # (mean wanted height of the group, members)
    for height in heights:
        groups.append((min(max(height, 0), 1), 1))
        while len(groups) > 1:
            (low, n_low), (high, n_high) = groups[-2:]
            if high - low >= gap * (n_low + n_high) / 2:
                break
            n_members = n_low + n_high
            centre = (low * n_low + high * n_high) / n_members
            half = gap * (n_members - 1) / 2
            groups[-2:] = [(min(max(centre, min(half, 0.5)), max(1 - half, 0.5)), n_members)]
    return [centre + gap * (i - (n - 1) / 2) for centre, n in groups for i in range(n)]
