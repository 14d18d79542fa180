"""`bench convergence` as SVG and PNG, a panel a workload. Needs matplotlib (extra `report`)."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
import numpy as np

from gradwire.bench.figures.convergence_numbers import METRICS, Seeds, stack_losses
from gradwire.bench.figures.numbers import Records
from gradwire.bench.figures.plots import COLOURS, STYLE, make_panels, save_figure

_AVERAGED = 10  # steps in a point: a single batch's loss jumps more than the curves differ
_LOGARITHMIC_FROM = 30  # greatest / least, where a linear axis would show all but the worst on one spot
_STYLES = ("-", "--", ":", "-.")


def plot_losses(by_workload: Mapping[str, Seeds], folder: Path) -> None:
    """Training losses over the steps: means of ten steps and of the seeds, with the band from least to greatest seed."""
    with mpl.rc_context(STYLE):
        figure, panels = make_panels(len(by_workload), width=4.8 * len(by_workload))
        for panel, (workload, runs) in zip(panels, by_workload.items(), strict=True):
            for index, (name, finished) in enumerate(runs.items()):
                losses = stack_losses(finished)
                n_points = max(1, losses.shape[1] // _AVERAGED)
                means = np.stack([part.mean(axis=1) for part in np.array_split(losses, n_points, axis=1)], axis=1)
                steps = (np.arange(n_points) + 0.5) * losses.shape[1] / n_points
                colour, style = COLOURS[index % len(COLOURS)], _STYLES[index // len(COLOURS) % len(_STYLES)]
                panel.plot(steps, means.mean(axis=0), style, color=colour, lw=1.3, label=name)
                panel.fill_between(steps, means.min(axis=0), means.max(axis=0), color=colour, alpha=0.15, lw=0)
            first = next(iter(runs.values()))[0].summary
            panel.set(xlabel="step", ylabel=f"training loss, mean of {_AVERAGED} steps", yscale="log")
            panel.set_title(_title(f"{workload}, {first['optimizer']}, {first['ranks']} ranks"), fontsize=7)
            panel.legend(fontsize=7)
        save_figure(figure, folder, "convergence_losses")


def plot_losses_over_time(by_workload: Mapping[str, Seeds], folder: Path) -> None:
    """Training losses over the seconds of training: a line a seed, the mean of the last ten steps at each moment."""
    with mpl.rc_context(STYLE):
        figure, panels = make_panels(len(by_workload), width=4.8 * len(by_workload))
        for panel, (workload, runs) in zip(panels, by_workload.items(), strict=True):
            for index, (name, finished) in enumerate(runs.items()):
                colour, style = COLOURS[index % len(COLOURS)], _STYLES[index // len(COLOURS) % len(_STYLES)]
                for number, run in enumerate(finished):
                    losses, elapsed_s = run.column("loss"), run.column("elapsed_s")
                    n_averaged = min(_AVERAGED, losses.size)
                    means = np.convolve(losses, np.full(n_averaged, 1 / n_averaged), "valid")
                    label = name if number == 0 else None
                    panel.plot(elapsed_s[n_averaged - 1 :], means, style, color=colour, lw=1.2, alpha=0.8, label=label)
            first = next(iter(runs.values()))[0].summary
            panel.set(xlabel="seconds of training", ylabel=f"training loss, mean of {_AVERAGED} steps", yscale="log")
            panel.set_title(_title(f"{workload}, {first['optimizer']}, {first['ranks']} ranks"), fontsize=7)
            panel.legend(fontsize=7)
        save_figure(figure, folder, "convergence_times")


def _title(words: str) -> str:
    """Folded: a workload with options is longer than its panel."""
    return "\n".join(textwrap.wrap(words.replace(",", ", "), 34))


def plot_ends(records: Records, folder: Path) -> None:
    """The last figures of every run: a dot at the mean, a bar from the least to the greatest seed."""
    pairs = [
        (workload, metric)
        for workload in dict.fromkeys(record["workload"] for record in records)
        for metric in METRICS
        if any(record["workload"] == workload and record[metric] is not None for record in records)
    ]
    with mpl.rc_context(STYLE):
        figure, panels = make_panels(len(pairs), width=3.6 * len(pairs))
        for panel, (workload, metric) in zip(panels, pairs, strict=True):
            group = [record for record in records if record["workload"] == workload and record[metric] is not None]
            for position, record in enumerate(group):
                colour = COLOURS[position % len(COLOURS)]
                panel.hlines(position, record[f"{metric}_min"], record[f"{metric}_max"], color=colour, lw=3, alpha=0.4)
                panel.plot(record[metric], position, "o", color=colour, ms=5)
            panel.set_yticks(range(len(group)), [record["configuration"] for record in group], fontsize=7)
            panel.invert_yaxis()
            panel.set_xlabel(metric.replace("_", " "))
            panel.set_title(_title(workload), fontsize=7)
            least, greatest = (pick(record[f"{metric}_{pick.__name__}"] for record in group) for pick in (min, max))
            if 0 < _LOGARITHMIC_FROM * least < greatest:
                panel.set_xscale("log")
        save_figure(figure, folder, "convergence_ends")
