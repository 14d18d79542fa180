"""GComp's figures 9, 11, 13a, 18, 19 and 20 as SVG and PNG, a panel a workload. Needs matplotlib (extra `report`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
import numpy as np

from gradwire.bench.figures.fidelity_numbers import (
    BASELINE,
    PAPER,
    PERIODIC,
    TRUNCATE,
    Runs,
    loss_deviation,
)
from gradwire.bench.figures.numbers import Records
from gradwire.bench.figures.plots import COLOURS, STYLE, make_panels, save_figure

_CURVES = ((BASELINE, "no compression"), (PAPER, "GComp"), (TRUNCATE, "truncate 18"), (PERIODIC, "periodic 8"))
_AVERAGED = 10  # steps in a point of the loss curves: a single batch's loss jumps more than the curves differ


def short_name(spec: str) -> str:
    """A configuration as a label: `gcomp:importance=uniform,bits=10` is "uniform 10"."""
    scheme, _, options = spec.partition(":")
    values = dict(pair.split("=", 1) for pair in options.split(",") if pair)
    words = [values.pop("importance", "")] if scheme == "gcomp" else [scheme]
    words += [value if key in ("bits", "every") else f"{key}={value}" for key, value in values.items()]
    return " ".join(words).strip() or scheme


def plot_all(by_workload: Mapping[str, Runs], figures: Mapping[str, Records], folder: Path) -> None:
    """Every figure that the runs are there for. Raises: GradwireError (a file cannot be written)."""
    with mpl.rc_context(STYLE):
        plot_deviations(by_workload, folder)
        plot_losses(by_workload, folder)
        plot_frontier(by_workload, folder)
        plot_volume(by_workload, folder)
        if "exponents" in figures:
            plot_exponents(by_workload, figures["exponents"], folder)
        if "times" in figures:
            plot_times(by_workload, figures["times"], folder)


def plot_deviations(by_workload: Mapping[str, Runs], folder: Path) -> None:
    """Fig. 18: box plots of |loss - baseline's| over the steps; whiskers at 5 and 95 %, a dot at the mean."""
    figure, panels = make_panels(len(by_workload), width=4.6 * len(by_workload))
    for panel, (workload, runs) in zip(panels, by_workload.items(), strict=True):
        names = [name for name in runs if name != BASELINE]
        # Equal losses (always in the first step) have no place on a logarithmic axis.
        deviations = [loss_deviation(runs[name], runs[BASELINE]) for name in names]
        boxes = [values[values > 0] for values in deviations]
        positions = list(range(len(names)))
        panel.boxplot(boxes, positions=positions, orientation="horizontal", whis=(5, 95), showfliers=False, widths=0.6,
                      medianprops={"color": COLOURS[5]})  # fmt: skip
        panel.plot([values.mean() for values in deviations], positions, "o", color=COLOURS[0], ms=4, label="mean")
        panel.set_yticks(positions, [short_name(name) for name in names], fontsize=7)
        panel.invert_yaxis()
        panel.set(xscale="log", xlabel="|loss - loss without compression|")
        panel.set_title(_title(workload, runs))
        panel.legend(fontsize=7)
    save_figure(figure, folder, "fig18_loss_deviation")


def plot_losses(by_workload: Mapping[str, Runs], folder: Path) -> None:
    """Fig. 19: the losses over the steps, means of ten."""
    figure, panels = make_panels(len(by_workload))
    for panel, (workload, runs) in zip(panels, by_workload.items(), strict=True):
        for (name, label), colour in zip(_CURVES, COLOURS, strict=False):
            if name in runs:
                losses = runs[name].column("loss")
                means = np.array([part.mean() for part in np.array_split(losses, max(1, losses.size // _AVERAGED))])
                steps = np.linspace(0, losses.size, means.size, endpoint=False) + losses.size / means.size / 2
                width, alpha = (3.0, 0.4) if name == BASELINE else (1.2, 1.0)
                panel.plot(steps, means, color=colour, label=label, lw=width, alpha=alpha)
        panel.set(xlabel="step", ylabel=f"training loss, mean of {_AVERAGED} steps")
        panel.set_title(_title(workload, runs))
        panel.legend(fontsize=7)
    save_figure(figure, folder, "fig19_loss_curves")


def plot_frontier(by_workload: Mapping[str, Runs], folder: Path) -> None:
    """Mean deviation of the loss over volume: what each configuration pays and gets."""
    figure, panels = make_panels(len(by_workload), width=4.6 * len(by_workload))
    for panel, (workload, runs) in zip(panels, by_workload.items(), strict=True):
        points = {
            name: (float(run.column("ratio").mean()), float(loss_deviation(run, runs[BASELINE]).mean()))
            for name, run in runs.items()
            if name != BASELINE
        }
        variants = [name for name in points if "importance=paper" in name]
        uniform = sorted(point for name, point in points.items() if "uniform" in name)
        panel.plot(*zip(*uniform, strict=True) if uniform else ((), ()), "-", color=COLOURS[4], lw=1)
        for name, (ratio, deviation) in points.items():
            colour = COLOURS[0] if name == PAPER else COLOURS[4] if "uniform" in name else COLOURS[1]
            panel.plot(ratio, deviation, "o", color=colour, ms=5)
            # GComp's own variants lie side by side: numbered here, named in the legend.
            if name in variants:
                panel.plot([], [], " ", label=f"{variants.index(name) + 1}: {short_name(name)}")
            text = str(variants.index(name) + 1) if name in variants else short_name(name)
            below = "uniform" in name
            at, side = ((-4, -4), "top") if below else ((4, 4), "bottom")
            panel.annotate(text, (ratio, deviation), at, textcoords="offset points", fontsize=7, va=side,
                           ha="right" if below else "left")  # fmt: skip
        panel.axvline(float(runs[BASELINE].column("ratio").mean()), color="black", lw=0.8, ls=":", label="lossless")
        panel.set(yscale="log", xlabel="bytes sent / a float32 ring's", ylabel="mean |loss - baseline's|")
        panel.set_title(_title(workload, runs))
        panel.legend(fontsize=7)
    save_figure(figure, folder, "frontier_deviation_and_volume")


def plot_volume(by_workload: Mapping[str, Runs], folder: Path) -> None:
    """Fig. 9: what GComp sends in each step, as a share of a float32 ring's bytes."""
    figure, (panel,) = make_panels(1)
    for (workload, runs), colour in zip(by_workload.items(), COLOURS, strict=False):
        for name, style in ((PAPER, "-"), (BASELINE, ":")):
            if name in runs:
                label = f"{workload}, {'GComp' if name == PAPER else 'lossless part alone'}"
                panel.plot(runs[name].column("ratio"), style, color=colour, lw=1, label=label)
    panel.set(xlabel="step", ylabel="bytes sent / a float32 ring's", ylim=(0, 1.05))
    panel.legend(fontsize=7)
    save_figure(figure, folder, "fig09_volume_over_training")


def plot_exponents(by_workload: Mapping[str, Runs], exponents: Records, folder: Path) -> None:
    """Fig. 13a: the exponent part under the built-in table for ever, and refreshed."""
    figure, panels = make_panels(len(by_workload))
    for panel, (workload, runs) in zip(panels, by_workload.items(), strict=True):
        group = [record for record in exponents if record["workload"] == workload]
        steps = [record["step"] for record in group]
        for name, colour in zip(("static", "refreshed", "entropy"), COLOURS, strict=False):
            label = name if name == "entropy" else f"{name} table"
            panel.plot(
                steps, [100 * record[f"{name}_share"] for record in group], "o-", color=colour, ms=3, label=label
            )
        panel.set(xlabel="step", ylabel="exponent part, % of the original size", ylim=(0, None))
        panel.set_title(_title(workload, runs))
        panel.legend(fontsize=7)
    save_figure(figure, folder, "fig13a_static_and_refreshed_table_in_training")


def plot_times(by_workload: Mapping[str, Runs], times: Records, folder: Path) -> None:
    """Fig. 11: CPU load over the steps; Fig. 20: seconds to the same loss."""
    figure, panels = make_panels(len(by_workload))
    for panel, (workload, runs) in zip(panels, by_workload.items(), strict=True):
        for name, colour in ((BASELINE, COLOURS[3]), ("ddp", COLOURS[1]), (PAPER, COLOURS[0])):
            if name in runs:
                load = runs[name].column("cpu_s") / runs[name].column("iteration_s")
                panel.plot(load[2:], color=colour, lw=1, label=short_name(name))
        panel.set(xlabel="step", ylabel="CPU cores busy per rank", ylim=(0, None))
        panel.set_title(_title(workload, runs))
        panel.legend(fontsize=7)
    save_figure(figure, folder, "fig11_cpu_load")
    figure, panels = make_panels(len(by_workload), width=4.6 * len(by_workload))
    for panel, (workload, runs) in zip(panels, by_workload.items(), strict=True):
        group = [record for record in times if record["workload"] == workload and record["seconds_to_loss"] is not None]
        panel.barh(range(len(group)), [record["seconds_to_loss"] for record in group], color=COLOURS[0])
        panel.set_yticks(range(len(group)), [short_name(record["configuration"]) for record in group], fontsize=7)
        panel.invert_yaxis()
        panel.set_xlabel(f"seconds to a loss of {group[0]['target_loss']:.3f}" if group else "no run came to the loss")
        panel.set_title(_title(workload, runs))
    save_figure(figure, folder, "fig20_time_to_loss")


def _title(workload: str, runs: Runs) -> str:
    return f"{workload}, {next(iter(runs.values())).summary['optimizer']}"
