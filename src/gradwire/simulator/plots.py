"""Plots of simulated records, as PNG or SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradwire.errors import GradwireError, Unsupported

Record = dict[str, Any]

# Okabe and Ito's colours, which colour-blind readers tell apart; a scheme keeps its own in every figure.
_COLOURS = {
    "broadcast-32": "#0072B2",
    "broadcast-4": "#E69F00",
    "aqgb": "#009E73",
    "plain": "#555555",
    "gcomp": "#CC79A7",
}
_SPARE_COLOURS = ("#D55E00", "#56B4E9", "#8C6D31", "#7F3C8D", "#000000", "#A5AA99")

# field of a record: (axis label, factor)
MEASURES: dict[str, tuple[str, float]] = {
    "rounds": ("rounds", 1),
    "utilisation": ("link utilisation, %", 100),
    "wait_share": ("T_wait / computation", 1),
    "row": ("ROW", 1),
}


def new_figure(n_panels: int, width_in: float = 4.2, height_in: float = 3.2) -> tuple[Any, Sequence[Any]]:
    """A matplotlib figure with panels side by side. Raises: Unsupported (no matplotlib)."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Unsupported("plots need matplotlib; pip install 'gradwire[report]'") from error
    figure = Figure(figsize=(width_in * n_panels, height_in), layout="constrained")
    layout: Any = figure.get_layout_engine()
    layout.set(w_pad=0.15)  # inches: an axis' name must not touch the panel before it
    panels = [figure.add_subplot(1, n_panels, index + 1) for index in range(n_panels)]
    for panel in panels:
        panel.grid(axis="y", color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    return figure, panels


def save(figure: Any, path: Path) -> None:
    """Write it in the format of the name. Raises: GradwireError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {})
    except OSError as error:
        raise GradwireError(f"could not write {path}: {error.strerror or error}") from error


def colour_of(scheme: str, schemes: Sequence[str]) -> str:
    """The colour of a scheme among those of a figure."""
    others = [name for name in schemes if name not in _COLOURS]
    return _COLOURS.get(scheme) or _SPARE_COLOURS[others.index(scheme) % len(_SPARE_COLOURS)]


def measure(record: Record, field: str) -> float | None:
    """A field of a record in the unit of its axis; `wait_share` is the wait over the computation."""
    if field == "wait_share":
        value = None if record["wait_s"] is None else record["wait_s"] / record["compute_s"]
    else:
        value = record[field]
    return None if value is None else value * MEASURES.get(field, ("", 1))[1]


def draw_bars(panel: Any, records: Sequence[Record], field: str) -> None:
    """One bar a record, with its value on top."""
    names = [_name_of(record) for record in records]
    schemes = list(dict.fromkeys(record["scheme"] for record in records))
    values = [measure(record, field) or 0.0 for record in records]
    bars = panel.bar(names, values, color=[colour_of(record["scheme"], schemes) for record in records], width=0.65)
    panel.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
    panel.set_ylabel(MEASURES[field][0])
    panel.set_ylim(0, max(values) * 1.15 or 1)
    panel.tick_params(axis="x", rotation=25, labelsize=8)


def draw_lines(panel: Any, records: Sequence[Record], x: str, field: str, x_label: str, factor: float = 1) -> None:
    """A line a scheme, over the field `x` times `factor`."""
    schemes = list(dict.fromkeys(record["scheme"] for record in records))
    for scheme in schemes:
        points = sorted(
            (record[x] * factor, value)
            for record in records
            if record["scheme"] == scheme and (value := measure(record, field)) is not None
        )
        if points:
            xs, ys = zip(*points, strict=True)
            # The uncompressed ring often lies on the 4-bit broadcast: among 16 workers both carry 60 bits a value.
            style = "x--" if scheme == "plain" else "o-"
            panel.plot(xs, ys, style, label=scheme, color=colour_of(scheme, schemes), markersize=4, linewidth=1.5)
    panel.set_xlabel(x_label)
    panel.set_ylabel(MEASURES.get(field, (field, 1))[0])
    panel.set_ylim(bottom=0)


def plot_sweep(records: Sequence[Record], path: Path) -> None:
    """Four panels over whatever varies most: rates, workers or workloads; bars if nothing does. Raises: GradwireError."""
    figure, panels = new_figure(len(MEASURES))
    varied = {field: len({record[field] for record in records}) for field in ("rate_bps", "workers")}
    x = max(varied, key=lambda field: varied[field])
    for panel, field in zip(panels, MEASURES, strict=True):
        if varied[x] > 1:
            label, factor = {"rate_bps": ("link rate, Gb/s", 1e-9), "workers": ("workers", 1)}[x]
            draw_lines(panel, records, x, field, label, factor)
        else:
            draw_bars(panel, records, field)
    if varied[x] > 1:
        panels[0].legend(fontsize=8, frameon=False)
    save(figure, path)


def _name_of(record: Record) -> str:
    return record.get("label") or record["scheme"]
