"""The part of a report on training runs: loss, bytes, time, and a table of all of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradwire_lab.report.drawing import (
    CODEC,
    COMPUTE,
    DASH,
    DECODE,
    EXPOSED,
    SURFACE,
    TIMES,
    WAIT,
    WIDE_IN,
    WIDTH_IN,
    Drawing,
    PageTable,
    Palette,
    Tile,
    add_end_labels,
    as_variable,
    format_power,
    new_axes,
    set_log_axis,
    to_svg,
)
from gradwire_lab.report.inputs import Column, LoggedRun
from gradwire_lab.report.thresholds import make_threshold_table
from gradwire_lab.results.captions import describe_data, describe_machine, describe_networks
from gradwire_lab.results.palette import INK, MUTED

__all__ = ["Section", "TimeSplit", "draw_time_split", "make_run_sections", "pick_baseline"]

# Whom the others are compared with, if it is there: what one would run without gradwire, else its own plain all-reduce.
_BASELINES = ("ddp", "plain", "gloo", "nccl", "allreduce", "none")
# Text on a bar: amber is light and exposed communication strong in both colour schemes, the rest follow the page.
_ON_BAR = {"codec": "#1b2431", "exposed communication": SURFACE}


@dataclass
class Section:
    """One block of the page."""

    anchor: str
    title: str
    intro: str
    tiles: list[Tile] = field(default_factory=list)
    plots: list[Drawing] = field(default_factory=list)
    tables: list[PageTable] = field(default_factory=list)


@dataclass(frozen=True)
class TimeSplit:
    """Where one iteration's seconds went. `parts` fill the iteration; `lane` runs beside it, in the background."""

    label: str
    total_s: float
    parts: Mapping[str, float]
    lane: Mapping[str, float] = field(default_factory=dict)
    spread_s: tuple[float, float] | None = None


def pick_baseline(labels: Sequence[str], wanted: str | None = None) -> str | None:
    """The label to compare with, or None where there is nothing to compare."""
    if len(labels) < 2:
        return None
    return next((name for name in (wanted, *_BASELINES) if name in labels), None)


def make_run_sections(runs: Sequence[LoggedRun], palette: Palette, baseline: str | None) -> list[Section]:
    """One section for each workload and number of ranks."""
    groups: dict[tuple[str, int | None], list[LoggedRun]] = defaultdict(list)
    for run in runs:
        groups[run.workload, run.ranks].append(run)
    return [_make_section(index, group, palette, baseline) for index, group in enumerate(groups.values())]


def _make_section(index: int, runs: Sequence[LoggedRun], palette: Palette, wanted: str | None) -> Section:
    first = runs[0]
    ranks = f"{first.ranks} ranks" if first.ranks else "ranks not recorded"
    base_label = pick_baseline([run.label for run in runs], wanted)
    base = next((run for run in runs if run.label == base_label), None)
    runs = sorted(runs, key=lambda run: run is not base)  # the baseline first, the others as they were given
    network = describe_networks([{**run.config, **run.environment} for run in runs])
    where = f"{describe_data(first.config)}, {ranks}; {network}; {describe_machine(first.environment)}"
    section = Section(f"run{index}", f"Training {first.workload}", f"{ranks}. Network: {network}.")
    if base is not None:
        section.intro += f" Large figures: compared with {base.label}."
        section.tiles = [_tile(run, base, palette) for run in runs if run is not base]
    section.plots = [
        _draw_loss(f"run{index}-loss-steps", runs, base, palette, where, by_time=False),
        _draw_loss(f"run{index}-loss-time", runs, base, palette, where, by_time=True),
    ]
    if base is not None and (deviation := _draw_deviation(f"run{index}-deviation", runs, base, palette, where)):
        section.plots.append(deviation)
    section.plots.append(_draw_bytes(f"run{index}-bytes", runs, palette, where))
    splits = [_split(run) for run in runs]
    caption = f"{where}. Mean over steps after the first tenth, and over ranks. Thick: the training thread, "
    caption += "where exposed is all that the backward pass did not hide, the codec's share included."
    wide = len(section.plots) % 2 == 0  # else it fills the row
    section.plots.append(draw_time_split(f"run{index}-time", "Where an iteration's time goes", splits, caption, wide))
    section.tables = [_make_table(runs, base)]
    section.tables += [table for run in runs if (table := make_threshold_table(run)) is not None]
    return section


def _tile(run: LoggedRun, base: LoggedRun, palette: Palette) -> Tile:
    sent, base_sent = _mean_bytes(run), _mean_bytes(base)
    seconds, base_seconds = np.median(_warm(run, "iteration_s")), np.median(_warm(base, "iteration_s"))
    values = []
    if base_sent > 0:
        values.append((f"{sent / base_sent:.0%}", "of the bytes"))
    if seconds > 0:
        values.append((f"{base_seconds / seconds:.2f}{TIMES}", "the speed"))
    deviation = _deviation(run, base)
    if deviation is not None:
        values.append((format_power(float(f"{deviation[1].mean():.1e}")), "loss difference, mean"))
    return Tile(run.label, values, palette.slot(run.label))


def _draw_loss(
    name: str, runs: Sequence[LoggedRun], base: LoggedRun | None, palette: Palette, where: str, by_time: bool
) -> Drawing:
    with new_axes(labels_at_right=[run.label for run in runs]) as axes:
        ends = []
        for run in runs:
            loss = run.columns["loss"]
            x = _wall_s(run) if by_time else run.columns["step"]
            smooth = _smooth(loss)
            colour = palette.colour(run.label)
            if len(loss) > 1 and not np.array_equal(smooth, loss, equal_nan=True):
                axes.plot(x, loss, color=colour, lw=0.7, alpha=0.22)
            # The baseline is a broad band, on which the lines that follow it stay visible.
            width, alpha = (5.5, 0.4) if run is base else (1.8, 1)
            axes.plot(x, smooth, color=colour, ls=palette.dash(run.label), marker=_lone(x), lw=width, alpha=alpha)
            if np.isfinite(smooth).any():
                last = np.flatnonzero(np.isfinite(smooth))[-1]
                ends.append((float(x[last]), float(smooth[last]), run.label, colour))
        if by_time:
            axes.set_xlabel("wall time of training, s")
        else:
            _label_steps(axes)
        axes.set_ylabel("loss")
        axes.margins(x=0.01)
        add_end_labels(axes, ends)
        svg = to_svg(axes, name)
    window = _window(max(len(run.columns["loss"]) for run in runs))
    smoothed = f" Bold: mean over {window} steps; faint: every step." if window > 1 else ""
    if base is not None and not by_time:
        curves = {run.label: _deviation(run, base) for run in runs if run is not base}
        same = [label for label, curve in curves.items() if curve is not None and not curve[1].any()]
        smoothed += f" Equal to {base.label}'s to the last digit: {', '.join(same)}." if same else ""
    title = "Loss against wall time" if by_time else "Loss against steps"
    clock = " Wall time is the sum of the iterations." if by_time else ""
    return Drawing(name, title, f"{where}.{clock}{smoothed}", svg)


def _draw_deviation(
    name: str, runs: Sequence[LoggedRun], base: LoggedRun, palette: Palette, where: str
) -> Drawing | None:
    curves = [(run, curve) for run in runs if run is not base and (curve := _deviation(run, base)) is not None]
    if not any((curve[1] > 0).any() for _, curve in curves):
        return None
    with new_axes(labels_at_right=[run.label for run, _ in curves]) as axes:
        ends = []
        for run, (steps, distance) in curves:
            colour = palette.colour(run.label)
            positive = np.where(distance > 0, distance, np.nan)  # equal to the bit: nothing to draw on a log axis
            if not np.isfinite(positive).any():
                continue
            smooth = _smooth(positive)
            axes.plot(steps, positive, color=colour, lw=0.7, alpha=0.22)
            axes.plot(steps, smooth, color=colour, ls=palette.dash(run.label), marker=_lone(steps))
            last = np.flatnonzero(np.isfinite(smooth))[-1]
            ends.append((float(steps[last]), float(smooth[last]), run.label, colour))
        set_log_axis(axes.yaxis)
        _label_steps(axes)
        axes.set_ylabel(f"distance to the loss of {base.label}")
        axes.margins(x=0.01)
        add_end_labels(axes, ends)
        svg = to_svg(axes, name)
    same = [run.label for run, (_, distance) in curves if not distance.any()]
    note = f" Equal at every step: {', '.join(same)}." if same else ""
    return Drawing(
        name, "How far the loss strays", f"{where}. Absolute difference at the same step, log axis.{note}", svg
    )


def _label_steps(axes: Any) -> None:
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)


def _draw_bytes(name: str, runs: Sequence[LoggedRun], palette: Palette, where: str) -> Drawing:
    with new_axes(labels_at_right=[run.label for run in runs]) as axes:
        ends = []
        top = max(float(run.columns["bytes_sent"].max()) for run in runs)
        positive = [value for run in runs if (value := float(np.median(run.columns["bytes_sent"]))) > 0]
        use_log = bool(positive) and top > 40 * min(positive)
        unit, unit_name = _byte_unit(top)
        for run in runs:
            colour = palette.colour(run.label)
            x, sent = run.columns["step"], run.columns["bytes_sent"] / unit
            axes.plot(x, sent, color=colour, lw=1.6, ls=palette.dash(run.label), marker=_lone(x))
            ends.append((float(x[-1]), float(np.median(sent[-max(1, len(sent) // 20) :])), run.label, colour))
        if use_log:
            set_log_axis(axes.yaxis)
        else:
            axes.set_ylim(0, 1.08 * max(top, 1e-9) / unit)
        _label_steps(axes)
        axes.set_ylabel(f"sent per step, {unit_name}")
        axes.margins(x=0.01)
        add_end_labels(axes, ends)
        svg = to_svg(axes, name)
    scale = "log axis" if use_log else "axis from zero"
    computed = [run.label for run in runs if str(run.summary.get("wire_bytes_origin", "counted")) != "counted"]
    note = f" {', '.join(computed)}: computed for a ring, not counted." if computed else ""
    counted = "What a rank sent, headers and tables included"
    return Drawing(name, "Bytes over steps", f"{where}. {counted}; {scale}.{note}", svg)


def draw_time_split(name: str, title: str, splits: Sequence[TimeSplit], caption: str, wide: bool) -> Drawing:
    """Bars of one iteration each: thick, what fills it; thin below, what the background lane did meanwhile."""
    colours = {
        "computation": COMPUTE,
        "exposed communication": EXPOSED,
        "waiting for slower ranks": WAIT,
        "codec": CODEC,
        "encode": CODEC,
        "decode": DECODE,
        "communicate": MUTED,
    }
    has_lane = any(split.lane for split in splits)
    row = 1.0 if has_lane else 0.75
    top_s = max(max(split.total_s, sum(split.lane.values())) for split in splits)
    unit, unit_name = (1e-3, "ms") if top_s < 10 else (1.0, "s")
    with new_axes(width_in=WIDE_IN if wide else WIDTH_IN, height_in=0.9 + 0.52 * row * len(splits)) as axes:
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", visible=True)
        for index, split in enumerate(splits):
            left = 0.0
            for part, seconds in split.parts.items():
                width = seconds / unit
                axes.barh(index, width, 0.46, left, color=colours[part], ec="none")
                share = seconds / split.total_s if split.total_s else 0
                if width > (0.04 if wide else 0.09) * top_s / unit:
                    ink = _ON_BAR.get(part, INK)
                    axes.text(left + width / 2, index, f"{share:.0%}", ha="center", va="center", color=ink, size=10)
                left += width
            edge = left
            if split.spread_s:
                low, high = (value / unit for value in split.spread_s)
                axes.plot([low, high], [index, index], color=INK, lw=1.2, marker="|", ms=7)
                edge = max(edge, high)
            total = f"{split.total_s / unit:,.3g} {unit_name}" if split.total_s / unit < 1000 else None
            total = total or f"{split.total_s / unit:,.0f} {unit_name}"
            axes.text(edge + 0.01 * top_s / unit, index, total, va="center", weight="bold", size=10.5)
            left = 0.0
            for part, seconds in split.lane.items():
                axes.barh(index + 0.35, seconds / unit, 0.13, left, color=colours[part], ec="none")
                left += seconds / unit
        axes.set_yticks(range(len(splits)), [split.label for split in splits], color=INK, weight="bold")
        axes.set_ylim(len(splits) - (0.42 if has_lane else 0.55), -0.55)
        axes.set_xlim(0, (1.1 if wide else 1.22) * top_s / unit)
        axes.set_xlabel(f"{unit_name} an iteration")
        svg = to_svg(axes, name)
    used = [part for part in colours if any(split.parts.get(part) for split in splits)]
    legend = [(part, colours[part]) for part in used]
    lane = [(part, colours[part]) for part in colours if any(split.lane.get(part) for split in splits)]
    key = _legend("", legend) + (_legend("thin bars, in the background: ", lane) if lane else "")
    return Drawing(name, title, caption, key + svg, wide)


def _legend(prefix: str, entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(
        f'<span class="key"><i style="background:{as_variable(colour)}"></i>{part}</span>' for part, colour in entries
    )
    return f'<div class="keys">{prefix}{items}</div>'


def _split(run: LoggedRun) -> TimeSplit:
    iteration_s, exposed_s = (float(_warm(run, name).mean()) for name in ("iteration_s", "exposed_s"))
    exposed_s = min(exposed_s, iteration_s)
    parts = {"computation": iteration_s - exposed_s, "exposed communication": exposed_s}
    lane = {name: float(_warm(run, f"{name}_s").mean()) for name in ("encode", "decode", "communicate")}
    return TimeSplit(run.label, iteration_s, parts, lane if sum(lane.values()) else {})


def _make_table(runs: Sequence[LoggedRun], base: LoggedRun | None) -> PageTable:
    columns = [("scheme", False), ("steps", True), ("iteration, ms", True), ("speed-up", True), ("sent a step", True)]
    columns += [("of a plain ring", True), ("exposed, ms", True), ("encode, ms", True), ("decode, ms", True)]
    columns += [("final loss", True), ("largest deviation", True)]
    rows = []
    for run in runs:
        low, middle, high = np.percentile(_warm(run, "iteration_s") * 1e3, (25, 50, 75))
        speed_up = deviation = DASH
        if base is not None and run is not base:
            speed_up = f"{np.median(_warm(base, 'iteration_s')) * 1e3 / middle:.2f}{TIMES}" if middle else DASH
            curve = _deviation(run, base)
            deviation = DASH if curve is None else format_power(float(f"{curve[1].max():.1e}"))
        loss = run.columns["loss"]
        unit, unit_name = _byte_unit(_mean_bytes(run))
        row = [run.label, str(len(loss)), f"{middle:,.1f} ({low:,.1f}{DASH}{high:,.1f})", speed_up]
        row += [f"{_mean_bytes(run) / unit:,.2f} {unit_name}", f"{_warm(run, 'ratio').mean():.1%}"]
        row += [f"{_warm(run, f'{name}_s').mean() * 1e3:,.1f}" for name in ("exposed", "encode", "decode")]
        row += [f"{loss[-1]:.5g}" if np.isfinite(loss[-1]) else "not finite", deviation]
        rows.append(row)
    caption = "Iteration: median (quartiles). Other times and bytes: means. All after the first tenth of the steps."
    if base is not None:
        caption += f" Speed-up and deviation against {base.label}, step by step."
    return PageTable("The runs in numbers", columns, rows, caption)


def _warm(run: LoggedRun, name: str) -> Column:
    column = run.columns[name]
    return column[len(column) // 10 :]  # DDP rebuilds its buckets, allocators and caches warm up


def _mean_bytes(run: LoggedRun) -> float:
    return float(_warm(run, "bytes_sent").mean())


def _wall_s(run: LoggedRun) -> Column:
    return run.columns.get("elapsed_s", np.cumsum(run.columns["iteration_s"]))


def _deviation(run: LoggedRun, base: LoggedRun) -> tuple[Column, Column] | None:
    """(steps, |difference of loss|) at the steps that both have with finite losses; None if there are none."""
    steps, mine, theirs = np.intersect1d(run.columns["step"], base.columns["step"], return_indices=True)
    distance = np.abs(run.columns["loss"][mine] - base.columns["loss"][theirs])
    finite = np.isfinite(distance)
    return (steps[finite], distance[finite]) if finite.any() else None


def _window(n_steps: int) -> int:
    return max(1, n_steps // 25)


def _smooth(values: Column) -> Column:
    """Centred mean over `_window` steps, shorter at the ends; NaN are left out, and stay NaN where all are."""
    half = _window(len(values)) // 2
    finite = np.isfinite(values)
    total = np.concatenate(([0], np.cumsum(np.where(finite, values, 0))))
    count = np.concatenate(([0], np.cumsum(finite)))
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    n = count[high] - count[low]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(n > 0, (total[high] - total[low]) / n, np.nan)


def _lone(x: Column) -> str:
    return "o" if len(x) == 1 else ""


def _byte_unit(n_bytes: float) -> tuple[float, str]:
    return next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if n_bytes >= unit), (1.0, "B"))
