"""The figures as SVG and PNG. Needs matplotlib (extra `report`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradwire.bench.exponents import exponent_histogram
from gradwire.bench.figures.numbers import Records, gradient_parameter_ratio
from gradwire.errors import GradwireError
from gradwire.workloads.gradients import GradientFile

# Okabe and Ito's palette: told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_CODES = ("native Huffman", "escaped, 8 bits (paper)", "escaped, 11 bits (gradwire)")
STYLE: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "gradwire",  # same numbers, same bytes
    "svg.fonttype": "none",
}


def plot_values(files: Sequence[GradientFile], folder: Path) -> None:
    """Fig. 2: distribution of the values (a) and of their exponents (b)."""
    with mpl.rc_context(STYLE):
        figure, (left, right) = make_panels(2)
        for file, colour in zip(files, _colours(files), strict=True):
            values = file.gradient[np.isfinite(file.gradient) & (file.gradient != 0)]
            if values.size:
                spread = float(values.std()) or 1.0
                counts, edges = np.histogram(values / spread, bins=121, range=(-6, 6))
                left.plot((edges[:-1] + edges[1:]) / 2, counts / values.size, color=colour, label=file.name, lw=1.2)
            share = exponent_histogram(file.gradient) / file.gradient.size
            shown = np.flatnonzero(share[1:]) + 1  # zeros are Fig. 3b's
            right.plot(shown, share[shown], ".-", color=colour, label=file.name, lw=1, ms=4)
        left.set(xlabel="value / standard deviation (zeros left out)", ylabel="share of values", yscale="log")
        left.set_title("(a) values")
        right.set(xlabel="biased exponent (0 left out)", ylabel="share of values")
        right.set_title("(b) exponents")
        right.legend(fontsize=7)
        save_figure(figure, folder, "fig02_values_and_exponents")


def plot_ratio_and_zeros(files: Sequence[GradientFile], described: Records, folder: Path) -> None:
    """Fig. 3: |gradient| / |parameter| (a) and the share of zeros (b)."""
    with mpl.rc_context(STYLE):
        figure, (left, right) = make_panels(2)
        for file, colour in zip(files, _colours(files), strict=True):
            ratio = gradient_parameter_ratio(file)
            if ratio.size:
                points = np.quantile(ratio, np.linspace(0, 1, 401))
                left.plot(points, np.linspace(0, 1, 401), color=colour, label=file.name, lw=1.4)
        left.set(xscale="log", xlabel="|gradient| / |parameter|", ylabel="share of values below", ylim=(0, 1))
        left.set_title("(a) gradient beside its parameter")
        if left.get_lines():
            left.legend(fontsize=7)
        else:
            left.text(0.5, 0.5, "no file has parameters", ha="center", transform=left.transAxes)
        right.bar(range(len(files)), [record["zeros_share"] for record in described], color=_colours(files))
        _name_files(right, described)
        right.set(ylabel="share of zeros", ylim=(0, 1))
        right.set_title("(b) zeros")
        save_figure(figure, folder, "fig03_ratio_and_zeros")


def plot_cross_tables(records: Records, folder: Path) -> None:
    """Fig. 12: one panel a table's source, bars by data."""
    sources = list(dict.fromkeys(record["table_from"] for record in records))
    with mpl.rc_context(STYLE):
        figure, panels = make_panels(len(sources), share_y=True)
        for number, (panel, source) in enumerate(zip(panels, sources, strict=True), start=1):
            group = [record for record in records if record["table_from"] == source]
            _bars(panel, group, ("native_ratio", "escaped_ratio", "gradwire_ratio"), _CODES)
            for position, record in enumerate(group):
                bound = record["entropy_ratio"]
                panel.hlines(bound, position - 0.42, position + 0.42, color="black", lw=1, ls=":")
            panel.set_title(f"table from S#{number}: {source}", fontsize=8)
        panels[0].set_ylabel("exponent part / original (dotted: entropy)")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncol=3, fontsize=8)
        save_figure(figure, folder, "fig12_cross_tables")


def plot_table_refresh(records: Records, folder: Path) -> None:
    """Fig. 13a: bits an exponent, static against refreshed table."""
    with mpl.rc_context(STYLE):
        figure, (panel,) = make_panels(1)
        _bars(panel, records, ("static_bits", "refreshed_bits", "entropy_bits"), ("static", "refreshed", "entropy"))
        panel.set_ylabel("bits an exponent")
        panel.legend(fontsize=7)
        save_figure(figure, folder, "fig13a_static_and_refreshed_table")


def plot_decoders(records: Records, folder: Path) -> None:
    """Fig. 13b: time to decode a symbol over the average code length, table against tree."""
    with mpl.rc_context(STYLE):
        figure, (panel,) = make_panels(1)
        for column, label, colour in (("tree", "tree", COLOURS[1]), ("table", "look-up table", COLOURS[0])):
            lengths = [record["code_bits"] for record in records]
            panel.plot(lengths, [record[f"{column}_ns"] for record in records], "o-", color=colour, label=label, ms=4)
            low, high = ([record[f"{column}_ns_{end}"] for record in records] for end in ("low", "high"))
            panel.fill_between(lengths, low, high, color=colour, alpha=0.2, lw=0)
        panel.set(xlabel="average code length, bits", ylabel="ns a symbol", ylim=(0, None))
        panel.legend()
        save_figure(figure, folder, "fig13b_table_and_tree_decoder")


def plot_ablation(records: Records, folder: Path) -> None:
    """Fig. 14: sign and mantissa under one or several cuts, zeros kept or pruned."""
    columns = ("single_quant", "multi_quant", "zero_prune", "single_quant_zero_prune", "multi_quant_zero_prune")
    labels = ("Single-Quant", "Multi-Quant", "Zero Prune", "Single + Prune", "Multi + Prune")
    with mpl.rc_context(STYLE):
        figure, (panel,) = make_panels(1, width=3.2 + 1.4 * len(records))
        _bars(panel, records, columns, labels)
        panel.set_ylabel("sign and mantissa / original")
        panel.legend(fontsize=7, ncol=2)
        panel.set_ylim(0, 1.35)
        save_figure(figure, folder, "fig14_mantissa_ablation")


def make_panels(
    n_panels: int, share_y: bool = False, width: float | None = None, n_rows: int = 1
) -> tuple[Figure, list[Axes]]:
    """A figure of panels, row by row, `width` inches wide in all; surplus places of the last row stay empty."""
    n_columns = -(-n_panels // n_rows)
    figure = Figure(figsize=(width or max(5.2, 3.9 * n_columns), 3.1 * n_rows), layout="constrained")
    panels = list(figure.subplots(n_rows, n_columns, squeeze=False, sharey=share_y).flat)
    for surplus in panels[n_panels:]:
        surplus.remove()
    return figure, panels[:n_panels]


def _colours(items: Sequence[Any]) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(len(items))]


def _bars(panel: Axes, records: Records, columns: Sequence[str], labels: Sequence[str]) -> None:
    width = 0.84 / len(columns)
    for index, (column, label) in enumerate(zip(columns, labels, strict=True)):
        heights = [record.get(column) or 0.0 for record in records]
        offsets = np.arange(len(records)) + (index - (len(columns) - 1) / 2) * width
        panel.bar(offsets, heights, width * 0.94, label=label, color=COLOURS[index % len(COLOURS)])
    _name_files(panel, records)


def _name_files(panel: Axes, records: Records) -> None:
    names = [str(record["gradients"]).removesuffix(".npz") for record in records]
    panel.set_xticks(range(len(names)), names, rotation=12, fontsize=7)
    panel.grid(axis="x", visible=False)


def save_figure(figure: Figure, folder: Path, name: str) -> None:
    """Write NAME.svg and NAME.png. Raises: GradwireError."""
    try:
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
        figure.savefig(folder / f"{name}.png", dpi=160)
    except OSError as error:
        raise GradwireError(f"could not write {folder / name}: {error.strerror or error}") from error
