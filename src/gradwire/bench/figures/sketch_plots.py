"""The homomorphic paper's figures 2 and 3, and the codec's speed, as SVG and PNG. Needs matplotlib (extra `report`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from gradwire.bench.figures.numbers import Records
from gradwire.bench.figures.plots import COLOURS, STYLE, make_panels, save_figure
from gradwire.codecs.sketch_sizes import PAPER_GAMMA


def plot_sizes(formulas: Records, built: Records, folder: Path) -> None:
    """Fig. 2: size over density, a panel a bit width; what is built as points at 32 bits."""
    widths = list(dict.fromkeys(record["value_bits"] for record in formulas))
    lines = (
        ("bitmap_share", "bitmap + sketch", COLOURS[0], "-"),
        ("bloom_share", "Bloom filter + sketch", COLOURS[1], "-"),
        ("bound_share", "lower bound", "black", ":"),
    )
    with mpl.rc_context(STYLE):
        figure, panels = make_panels(len(widths), share_y=True, width=3.1 * len(widths))
        for panel, width in zip(panels, widths, strict=True):
            rows = [record for record in formulas if record["value_bits"] == width]
            densities = [row["density"] for row in rows]
            for column, label, colour, style in lines:
                panel.plot(densities, [row[column] for row in rows], style, color=colour, label=label, lw=1.4)
            if width == 32:
                points = [row["density"] for row in built]
                panel.plot(points, [row["bitmap_share"] for row in built], "o", color=COLOURS[0], ms=4, mfc="none",
                           label="as built, bitmap")  # fmt: skip
                panel.plot(points, [row["bloom_share"] for row in built], "s", color=COLOURS[1], ms=4, mfc="none",
                           label="as built, Bloom filter")  # fmt: skip
            panel.axhline(1, color="grey", lw=0.8)
            panel.set(xscale="log", yscale="log", xlabel="share of non-zeros", ylim=(1e-4, 3))
            panel.set_title(f"values of {width} bits")
        panels[0].set_ylabel("size / size of the values")
        handles, labels = panels[-1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncol=5, fontsize=8)
        save_figure(figure, folder, "fig02_size_and_bound")


def plot_recovery(records: Records, folder: Path) -> None:
    """Fig. 3: average relative error, recovery rate and rounds over the sketch's size; dotted: gamma x density."""
    panels_of = (
        ("relative_error", "(a) average relative error", True),
        ("recovery_rate", "(b) share recovered", False),
        ("rounds", "(c) rounds", False),
    )
    with mpl.rc_context(STYLE):
        figure, panels = make_panels(3)
        for panel, (column, title, is_logarithmic) in zip(panels, panels_of, strict=True):
            sizes = [100 * record["sketch_share"] for record in records]
            panel.plot(sizes, [record[column] for record in records], "o-", color=COLOURS[0], ms=3, lw=1.2)
            panel.axvline(100 * PAPER_GAMMA * records[0]["density"], color="black", lw=1, ls=":")
            panel.set(xlabel="sketch, % of the gradient", yscale="log" if is_logarithmic else "linear")
            panel.set_title(title)
        save_figure(figure, folder, "fig03_recovery_over_size")


def plot_speed(records: Records, folder: Path) -> None:
    """The codec's speed: over the density at the largest size, and over the size at the first density."""
    columns = ("compress_gb_per_s", "structure_gb_per_s", "replay_gb_per_s", "recover_gb_per_s")
    labels = ("compress", "structure", "replay", "structure + replay")
    largest = max(record["n_elements"] for record in records)
    first = records[0]["density"]
    by_density = [record for record in records if record["n_elements"] == largest]
    by_size = [record for record in records if abs(record["density"] / first - 1) < 0.1]
    with mpl.rc_context(STYLE):
        figure, panels = make_panels(2)
        _draw(panels[0], by_density, "density", columns, labels)
        panels[0].set(xlabel="share of non-zeros", xscale="log", ylabel="GB/s of float32", yscale="log")
        panels[0].set_title(f"{largest:,} values")
        _draw(panels[1], by_size, "n_elements", columns, labels)
        panels[1].set(xlabel="values", xscale="log", yscale="log")
        panels[1].set_title(f"{first:.1%} non-zeros")
        panels[1].legend(fontsize=7)
        save_figure(figure, folder, "sketch_speed")


def _draw(panel: mpl.axes.Axes, rows: Records, across: str, columns: Sequence[str], labels: Sequence[str]) -> None:
    for column, label, colour in zip(columns, labels, COLOURS, strict=False):
        panel.plot([row[across] for row in rows], [row[column] for row in rows], "o-", color=colour, label=label, ms=3)
