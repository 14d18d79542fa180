"""AQGB's Fig. 2 as SVG and PNG. Needs matplotlib (extra `report`)."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np

from gradwire.bench.figures.numbers import Records
from gradwire.bench.figures.plots import COLOURS, STYLE, make_panels, save_figure


def plot_losses(records: Records, folder: Path) -> None:
    """Fig. 2: the loss over the steps, a line a method, the mean of the seeds, smoothed over a fiftieth of the steps."""
    with mpl.rc_context(STYLE):
        figure, (panel,) = make_panels(1, width=6.4)
        for index, spec in enumerate(dict.fromkeys(record["method"] for record in records)):
            mine = [record for record in records if record["method"] == spec]
            n_steps = 1 + max(record["step"] for record in mine)
            seeds = list(dict.fromkeys(record["seed"] for record in mine))
            losses = np.zeros((len(seeds), n_steps))
            for record in mine:
                losses[seeds.index(record["seed"]), record["step"]] = record["loss"]
            window = max(1, n_steps // 50)
            smooth = np.convolve(losses.mean(0), np.ones(window) / window, mode="valid")
            style = ("-", "--", ":")[index // len(COLOURS) % 3]
            colour = "black" if spec == "none" else COLOURS[index % len(COLOURS)]
            panel.plot(np.arange(window - 1, n_steps), smooth, style, color=colour, lw=1.2, label=spec)
        panel.set(xlabel="step", ylabel="training loss", yscale="log")
        panel.legend(fontsize=6)
        save_figure(figure, folder, "fig02_loss_by_quantiser")


def plot_errors(records: Records, folder: Path) -> None:
    """Beside Fig. 2: the error of one gradient over the bits it takes, a panel a file."""
    with mpl.rc_context(STYLE):
        names = list(dict.fromkeys(record["gradients"] for record in records))
        figure, panels = make_panels(len(names), share_y=True, width=max(4.0, 3.2 * len(names)))
        for panel, name in zip(panels, names, strict=True):
            mine = [record for record in records if record["gradients"] == name and record["relative_error"] > 0]
            for index, record in enumerate(mine):
                colour, marker = COLOURS[index % len(COLOURS)], "osD"[index // len(COLOURS) % 3]
                panel.plot(
                    record["bits_a_value"], record["relative_error"], marker, color=colour, label=record["method"]
                )
            panel.set(xlabel="bits a value", yscale="log")
            panel.set_title(name)
        panels[0].set_ylabel("error / gradient, Euclidean norms")
        panels[0].legend(fontsize=6)
        save_figure(figure, folder, "fig02_error_by_quantiser")
