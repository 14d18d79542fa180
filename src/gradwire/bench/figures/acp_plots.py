"""The ACP-SGD paper's figures about time and volume as SVG and PNG. Needs matplotlib (extra `report`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes

from gradwire.bench.acp_shapes import sent_elements, sizes_of
from gradwire.bench.compression_cost_steps import rank_of
from gradwire.bench.figures.numbers import Records
from gradwire.bench.figures.plots import COLOURS, STYLE, make_panels, save_figure

# Figures over a number: what is on their axis, and the paper's number of the figure.
_CURVES = {
    "buffers": ("buffer_mb", "buffer, MB of gradient (rightmost: all)", "fig10_buffer_size"),
    "batch": ("batch_size", "samples a rank and step", "fig11a_batch_size"),
    "ranks": ("rank", "rank of the approximation", "fig11b_rank"),
    "world": ("ranks", "ranks", "fig12_world_size"),
}
_PARTS = (("compute_ms", "computation", COLOURS[0]), ("exposed_ms", "exposed communication and codec", COLOURS[5]),
          ("wait_ms", "wait for other ranks", COLOURS[3]))  # fmt: skip
_BARS = {
    "iteration": "table3_fig08_iteration",
    "methods": "fig02_03_methods",
    "optimisations": "fig09_optimisations",
}
_MBPS = {"unshaped": float("inf")}


def plot_plan(name: str, records: Records, folder: Path) -> None:
    """One figure's plots. Raises: GradwireError (a file cannot be written)."""
    with mpl.rc_context(STYLE):
        if name in _BARS:
            _plot_splits(records, folder, _BARS[name])
        else:
            _plot_curves(records, folder, *_CURVES[name])
        if name == "iteration":
            _plot_bandwidths(records, folder)


def plot_sizes(folder: Path, models: Sequence[str] = ("resnet50", "bert-base")) -> None:
    """Fig. 5: cumulative share of tensors by size, before and after compression."""
    with mpl.rc_context(STYLE):
        figure, panels = make_panels(len(models))
        labels = {"original": "gradients", "p": "steps for P", "q": "steps for Q"}
        for panel, name in zip(panels, models, strict=True):
            for (side, elements), colour in zip(
                sent_elements(sizes_of(name, rank_of(name))).items(), COLOURS, strict=False
            ):
                panel.step(sorted(elements), np.arange(1, len(elements) + 1) / len(elements), where="post",
                           color=colour, label=labels[side])  # fmt: skip
            panel.set(xscale="log", xlabel="elements of a tensor", ylabel="share of tensors up to that", ylim=(0, 1))
            panel.set_title(f"{name}, rank {rank_of(name)}", fontsize=8)
            panel.legend(fontsize=7)
        save_figure(figure, folder, "fig05_tensor_sizes")


def _plot_splits(records: Records, folder: Path, file_name: str) -> None:
    """Stacked bars of an iteration's parts: a row a workload, a panel a network, a bar a method."""
    workloads = list(dict.fromkeys(record["workload"] for record in records))
    found = {(record["workload"], record["network"]) for record in records}
    settings = sorted(found, key=lambda setting: (workloads.index(setting[0]), _rate_of(setting[1])))
    n_rows = len(workloads) if len(settings) > len(workloads) and len(settings) % len(workloads) == 0 else 1
    figure, panels = make_panels(len(settings), width=3.4 * len(settings) / n_rows, n_rows=n_rows)
    for panel, setting in zip(panels, settings, strict=True):
        group = [record for record in records if (record["workload"], record["network"]) == setting]
        bottom = np.zeros(len(group))
        for key, label, colour in _PARTS:
            heights = np.array([record[key] or 0.0 for record in group])
            panel.bar(range(len(group)), heights, bottom=bottom, color=colour, label=label, width=0.7)
            bottom += heights
        panel.set_xticks(range(len(group)), [_label(record) for record in group], rotation=40, ha="right", fontsize=6)
        panel.set_title(f"{setting[0]}, {setting[1]}" + _mark(group), fontsize=8)
        panel.grid(axis="x", visible=False)
    for panel in panels[:: len(settings) // n_rows]:
        panel.set_ylabel("ms a step")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncol=3, fontsize=8)
    save_figure(figure, folder, file_name)


def _plot_bandwidths(records: Records, folder: Path) -> None:
    """Fig. 13: iteration time over bandwidth, a panel a workload."""
    workloads = list(dict.fromkeys(record["workload"] for record in records))
    figure, panels = make_panels(len(workloads))
    for panel, workload in zip(panels, workloads, strict=True):
        group = [record for record in records if record["workload"] == workload]
        networks = sorted({record["network"] for record in group}, key=_rate_of)
        for scheme, colour in zip(dict.fromkeys(record["scheme"] for record in group), COLOURS, strict=False):
            mine = {record["network"]: record["iteration_ms"] for record in group if record["scheme"] == scheme}
            known = [network for network in networks if network in mine]
            places = [networks.index(network) for network in known]
            panel.plot(places, [mine[network] for network in known], "o-", color=colour, label=scheme, ms=4)
        panel.set_xticks(range(len(networks)), networks, fontsize=7)
        panel.set(yscale="log", ylabel="ms a step")
        panel.set_title(workload + _mark(group), fontsize=8)
    panels[0].legend(fontsize=7)
    save_figure(figure, folder, "fig13_bandwidth")


def _plot_curves(records: Records, folder: Path, key: str, label: str, file_name: str) -> None:
    """Iteration time over a number; buffers of two ranks get a panel each."""
    panels_by = "rank" if key == "buffer_mb" else "workload"
    names = list(dict.fromkeys(record[panels_by] for record in records))
    figure, panels = make_panels(len(names))
    for panel, name in zip(panels, names, strict=True):
        group = [record for record in records if record[panels_by] == name]
        values = sorted({float(record[key]) for record in group if record[key] is not None})
        for scheme, colour in zip(dict.fromkeys(record["scheme"] for record in group), COLOURS, strict=False):
            _plot_curve(panel, [record for record in group if record["scheme"] == scheme], key, values, colour)
        panel.set_xticks(range(len(values)), [f"{value:g}" for value in values])
        panel.set(xlabel=label, ylabel="ms a step", ylim=(0, None))
        panel.set_title(f"{group[0]['workload']}, {group[0]['network']}, {panels_by} {name}" + _mark(group), fontsize=8)
    panels[0].legend(fontsize=7)
    save_figure(figure, folder, file_name)


def _plot_curve(panel: Axes, group: Records, key: str, values: Sequence[float], colour: str) -> None:
    scheme = group[0]["scheme"]
    if group[0][key] is None:  # a method that the number does not concern: DDP beside ranks
        panel.axhline(group[0]["iteration_ms"], color=colour, ls=":", label=scheme)
        return
    ordered = sorted(group, key=lambda record: float(record[key]))
    places = [values.index(float(record[key])) for record in ordered]
    panel.plot(places, [record["iteration_ms"] for record in ordered], "o-", color=colour, label=scheme, ms=4)
    low, high = ([record[f"iteration_ms_{end}"] for record in ordered] for end in ("low", "high"))
    panel.fill_between(places, low, high, color=colour, alpha=0.15, lw=0)


def _label(record: dict[str, Any]) -> str:
    words = [word for word in record["options"].split(",") if word and not word.startswith(("rank=", "start=", "one "))]
    return "\n".join([record["scheme"], *words])


def _mark(group: Records) -> str:
    return ", computation emulated" if group[0]["compute"] == "emulate" else ""


def _rate_of(network: str) -> float:
    return _MBPS.get(network) or float(network.split()[0])
