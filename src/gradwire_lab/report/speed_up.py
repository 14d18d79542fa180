"""The report's first figure of a benchmark: each scheme's speed-up over the baseline, by the rate of the links."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from gradwire_lab.report.drawing import (
    TIMES,
    WIDE_IN,
    WIDTH_IN,
    Drawing,
    Palette,
    add_end_labels,
    new_axes,
    set_log_axis,
    to_svg,
)
from gradwire_lab.report.inputs import Record
from gradwire_lab.results.captions import format_rate
from gradwire_lab.results.palette import GRID, INK


def draw_speed_up(
    name: str, records: Sequence[Record], measure: str, base: str, palette: Palette, where: str, wide: bool
) -> Drawing:
    """Speed-up over `base` against the rate of the links; unshaped stands apart at the right."""
    grouped = by_rate(records)
    rates = [rate for rate, _ in grouped]
    shaped = [rate for rate in rates if rate is not None]
    step = (shaped[-1] / shaped[0]) ** (1 / (len(shaped) - 1)) if len(shaped) > 1 else 10.0
    places = {rate: rate for rate in shaped} | ({None: shaped[-1] * step if shaped else 1.0} if None in rates else {})
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for rate, group in grouped:
        base_s = base_value(group, measure, base)
        for record in group:
            if base_s:
                lines[record["scheme"]].append((places[rate], base_s / record[measure]))
    lines.pop(base, None)
    if len(grouped) == 1:  # points over one place on an axis would say less than bars
        ratios = {scheme: points[0][1] for scheme, points in lines.items()}
        return _draw_bars(name, ratios, base, palette, format_rate(rates[0]), where, wide)
    width_in, height_in = (WIDE_IN, 4.2) if wide else (WIDTH_IN, 3.6)
    with new_axes(width_in, height_in, labels_at_right=[base, *lines]) as axes:
        right = max(places.values()) * step**0.12
        axes.axhline(1, color=palette.colour(base), lw=1.2, ls=(0, (4, 3)))
        ends = [(right, 1.0, base, palette.colour(base))]
        for scheme, points in lines.items():
            colour, marker = palette.colour(scheme), palette.marker(scheme)
            # Unshaped is no rate, so no line leads there.
            for part in (points[:-1], points[-1:]) if None in places and points[-1][0] == places[None] else (points,):
                x, y = [point[0] for point in part], [point[1] for point in part]
                axes.plot(x, y, color=colour, ls=palette.dash(scheme), marker=marker, ms=7)
            ends.append((right, points[-1][1], scheme, colour))
        axes.set_xscale("log")
        if len(places) > 1:
            axes.set_xlim(min(places.values()) / step**0.15, right)
        if None in places and shaped:
            axes.axvline(places[None] / step**0.5, color=GRID, lw=1.2)
        axes.set_xticks(list(places.values()), [format_rate(rate) for rate in places])
        axes.minorticks_off()
        highest = max((y for points in lines.values() for _, y in points), default=1.0)
        lowest = min((y for points in lines.values() for _, y in points), default=1.0)
        if highest > 6 * max(lowest, 1):  # one runaway would press all others flat
            set_log_axis(axes.yaxis)
            scale = "log axis"
        else:
            axes.set_ylim(0, max(1.15, 1.1 * highest))
            scale = "axis from zero"
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}{TIMES}")
        axes.set_xlabel("rate of every link")
        axes.set_ylabel(f"speed-up over {base}")
        for tick in axes.get_xticklabels():
            tick.set_color(INK)
        add_end_labels(axes, ends)
        svg = to_svg(axes, name)
    return Drawing(name, "Speed-up against bandwidth", f"{where}. Ratio of medians in one run; {scale}.", svg, wide)


def _draw_bars(
    name: str, ratios: dict[str, float], base: str, palette: Palette, rate: str, where: str, wide: bool
) -> Drawing:
    """One bar a scheme, the fastest at the top; a logarithmic axis, so that half and twice are equally far from 1."""
    ordered = sorted(ratios.items(), key=lambda item: item[1])
    height_in = max(2.0, 0.9 + 0.24 * len(ordered))
    with new_axes(WIDE_IN if wide else WIDTH_IN, height_in) as axes:
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", visible=True)
        axes.set_xscale("log")
        for place, (scheme, ratio) in enumerate(ordered):
            axes.barh(place, ratio - 1, 0.66, 1, color=palette.colour(scheme), ec="none")
            beyond = (5 if ratio >= 1 else -5, 0)
            axes.annotate(f"{ratio:.2f}{TIMES}", (ratio, place), beyond, textcoords="offset points", va="center",
                          ha="left" if ratio >= 1 else "right")  # fmt: skip
        axes.axvline(1, color=palette.colour(base), lw=1.2)
        # Room beyond the bars for their figures.
        left, right = min([1.0, *ratios.values()]) / 2.5, max([1.0, *ratios.values()]) * 2.2
        axes.set_xlim(left, right)
        ticks = [tick for tick in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if left <= tick <= right]
        axes.set_xticks(ticks, [f"{tick:g}{TIMES}" for tick in ticks])
        axes.minorticks_off()
        axes.set_yticks(range(len(ordered)), [scheme for scheme, _ in ordered])
        for tick in axes.get_yticklabels():
            tick.set_color(INK)
        axes.set_ylim(-0.6, len(ordered) - 0.4)
        axes.set_xlabel(f"speed-up over {base}")
        svg = to_svg(axes, name)
    return Drawing(name, f"Speed-up at {rate}", f"{where}. Ratio of medians in one run; log axis.", svg, wide)


def by_rate(records: Iterable[Record]) -> list[tuple[float | None, list[Record]]]:
    """Records by the rate of their links: slowest first, unshaped last."""
    groups: dict[float | None, list[Record]] = defaultdict(list)
    for record in records:
        groups[record["rate_bps"] or None].append(record)
    return sorted(groups.items(), key=lambda group: float("inf") if group[0] is None else group[0])


def base_value(records: Iterable[Record], measure: str, base: str | None) -> float | None:
    """The baseline's median of `measure`, or None without a baseline."""
    values = [record[measure] for record in records if record["scheme"] == base]
    return statistics.median(values) if values else None
