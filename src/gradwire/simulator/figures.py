"""The papers' simulated figures, each by one name: runs, a plot, and a table beside what the paper says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from gradwire.errors import InvalidArgument
from gradwire.results.console import make_console
from gradwire.results.records import write_json
from gradwire.simulator import workloads
from gradwire.simulator.bandwidth import make_trace
from gradwire.simulator.jitter import Jitter, Stragglers, Uniform
from gradwire.simulator.plots import MEASURES, draw_bars, draw_lines, new_figure, save
from gradwire.simulator.runs import Run, do_all
from gradwire.simulator.simulation import Setting, Simulation

Record = dict[str, Any]
Results = list[tuple[Simulation, Record]]

_SECONDS = 200.0
_SCHEMES = ("broadcast-32", "broadcast-4", "aqgb", "plain")
# Fig. 9's rates are not printed; these span the paper's sweep and come back to where they began.
_CHANGES_BPS = ((0.0, 2.5e9), (20.0, 1.5e9), (40.0, 4.0e9), (60.0, 0.75e9), (80.0, 2.5e9))
# What the paper measured on real training (Table 2): rounds to converge of full precision over those of the scheme.
_CONVERGENCE = {"broadcast-32": 1.0, "broadcast-4": 0.76, "aqgb": 0.97, "plain": 1.0}
_PAPER_ROUNDS = {"broadcast-32": 39, "broadcast-4": 130, "aqgb": 127}
_PAPER_SPEED_UPS = {"broadcast-32": 1.0, "broadcast-4": 2.54, "aqgb": 3.15}
# Percent more rounds than broadcast-32 (section 5.2.5).
_PAPER_STRAGGLERS = {"broadcast-4": 125.6, "aqgb": 118.0}
# Whose gradients stand for them: a ResNet's under SGD, and a small transformer's under AdamW.
_MEASURED_ON = {"resnet50": "resnet50", "bert-base": "gpt"}
_GCOMP_WORKERS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True)
class Figure:
    """A figure: what it shows, its runs with a seed, and what draws them and returns the table's rows."""

    title: str
    make_runs: Callable[[int], list[Run]]
    show: Callable[[Results, Path], Table]


def names() -> list[str]:
    """The figures there are."""
    return list(_FIGURES)


def draw(wanted: Sequence[str], out: Path, seed: int = 0) -> int:
    """Simulate figures, and write NAME.json and NAME.png into `out`. Raises: InvalidArgument, GradwireError."""
    for asked in wanted:
        if asked not in ("all", *_FIGURES):
            raise InvalidArgument(f"no figure is called {asked!r}; there are: all, {', '.join(_FIGURES)}")
    console = make_console()
    for name in dict.fromkeys(one for asked in wanted for one in (_FIGURES if asked == "all" else [asked])):
        figure = _FIGURES[name]
        console.print(f"{name}: {figure.title}")
        results = list(
            do_all(figure.make_runs(seed), lambda text: console.print(f"  {text}", highlight=False, markup=False))
        )
        table = figure.show(results, out / f"{name}.png")
        console.print(table)
        written = [f"{out / name}.png"]
        if results:
            written.append(f"{out / name}.json")
            write_json(out / f"{name}.json", [record for _, record in results])
        console.print(", ".join(written))
    return 0


def _setting(seed: int, jitter: Jitter | None = None, **changes: Any) -> Setting:
    setting = Setting(workloads.by_name("resnet50-4blocks"), 16, 2.5e9, jitter=jitter or Uniform(seed=seed))
    return setting.replace(**changes)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title)
    table.add_column("scheme")
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _figures_of(record: Record) -> list[str]:
    wait_share = record["wait_s"] / record["compute_s"]
    row = "-" if record["row"] is None else f"{record['row']:.2f}"
    return [str(record["rounds"]), f"{100 * record['utilisation']:.1f} %", f"{wait_share:.3f}", row]


# ---- Figs. 8, 10 and 13, Table 2: one setting, all schemes


def _runs_of_jitters(seed: int, jitters: Sequence[tuple[str, Jitter]]) -> list[Run]:
    return [
        Run(scheme, _setting(seed, jitter), _SECONDS, labels={"label": f"{scheme}{suffix}"})
        for suffix, jitter in jitters
        for scheme in _SCHEMES
    ]


def _bars(results: Results, path: Path) -> None:
    figure, panels = new_figure(len(MEASURES), width_in=4.0)
    for panel, field in zip(panels, MEASURES, strict=True):
        draw_bars(panel, [record for _, record in results], field)
    save(figure, path)


def _show_fig10(results: Results, path: Path) -> Table:
    common = [record for _, record in results if record["jitter"].endswith("common")]
    _bars([result for result in results if result[1] in common], path)
    table = _table(
        "16 workers, 2.5 Gb/s, 200 s, ResNet-50 in 4 blocks",
        "jitter", "rounds", "utilisation", "wait / compute", "ROW", "paper: rounds", "off", "speed-up to converge", "paper",
    )  # fmt: skip
    for _, record in results:
        scheme, paper = record["scheme"], _PAPER_ROUNDS.get(record["scheme"])
        base = next(one for _, one in results if one["scheme"] == "broadcast-32" and one["jitter"] == record["jitter"])
        table.add_row(
            scheme,
            record["jitter"].removeprefix("uniform "),
            *_figures_of(record),
            "-" if paper is None else str(paper),
            "-" if paper is None else f"{100 * (record['rounds'] / paper - 1):+.1f} %",
            f"{record['rounds'] / base['rounds'] * _CONVERGENCE[scheme]:.2f}",
            f"{_PAPER_SPEED_UPS[scheme]}" if scheme in _PAPER_SPEED_UPS else "-",
        )
    return table


def _show_fig13(results: Results, path: Path) -> Table:
    _bars([result for result in results if result[1]["sigma"] == 1.5], path)
    table = _table(
        "the same with stragglers: the tail's shape (sigma) is not in the paper",
        "sigma", "rounds", "utilisation", "wait / compute", "ROW", "more rounds than 32 bit", "paper",
    )  # fmt: skip
    for _, record in results:
        base = next(one for _, one in results if one["scheme"] == "broadcast-32" and one["sigma"] == record["sigma"])
        paper = _PAPER_STRAGGLERS.get(record["scheme"])
        table.add_row(
            record["scheme"],
            f"{record['sigma']:g}",
            *_figures_of(record),
            f"{100 * (record['rounds'] / base['rounds'] - 1):+.1f} %",
            "-" if paper is None else f"+{paper} %",
        )
    return table


def _runs_fig13(seed: int) -> list[Run]:
    return [
        Run(scheme, _setting(seed, Stragglers(sigma, seed)), _SECONDS, labels={"sigma": sigma})
        for sigma in (1.0, 1.5, 2.0)
        for scheme in _SCHEMES
    ]


def _show_fig8(results: Results, path: Path) -> Table:
    figure, (panel,) = new_figure(1)
    table = _table(
        "computation of a round with stragglers, s", "mean", "median", "95 %", "99 %", "mean of the slowest of 16"
    )
    for sigma in (1.0, 1.5, 2.0):
        rounds = np.stack([Stragglers(sigma).factors(number, 16) * 1.5 for number in range(2000)])
        panel.hist(
            rounds.ravel(), bins=np.linspace(1.3, 2.7, 57), density=True, histtype="step", label=f"sigma {sigma:g}"
        )
        table.add_row(
            f"sigma {sigma:g}",
            *(
                f"{value:.3f}"
                for value in (rounds.mean(), *np.quantile(rounds, [0.5, 0.95, 0.99]), rounds.max(axis=1).mean())
            ),
        )
    panel.set_xlabel("computation of a round, s")
    panel.set_ylabel("density (logarithmic)")
    panel.set_yscale("log")
    panel.legend(fontsize=8, frameon=False)
    save(figure, path)
    return table


# ---- Fig. 9: the rate changes during a run


def _runs_fig9(seed: int) -> list[Run]:
    setting = _setting(seed, n_workers=8, trace=make_trace(_CHANGES_BPS))
    return [Run("aqgb", setting, 100.0, options={"floor": 0.375})]


def _show_fig9(results: Results, path: Path) -> Table:
    metrics = results[0][0].metrics
    figure, (panel,) = new_figure(1, width_in=7.0)
    panel.plot(
        *zip(*metrics.ratios, strict=True), ".", markersize=2, color="#009E73", label="first stage, each message"
    )
    rounds = [one for one in metrics.rounds if one.sent_bits is not None]
    n_values = results[0][0].setting.workload.n_values
    shares = [(one.ended_s, (one.sent_bits or 0.0) / n_values / 32) for one in rounds]
    panel.plot(*zip(*shares, strict=True), "-", color="#0072B2", label="both stages, each round")
    panel.set_ylim(0, 1.3)  # room for the legend above what cannot exceed 1
    panel.set_yticks([0, 0.25, 0.5, 0.75, 1])
    panel.set_xlabel("simulated time, s")
    panel.set_ylabel("share of bits sent (Q ratio)")
    right = panel.twinx()
    right.step(
        *zip(*_CHANGES_BPS, (100.0, _CHANGES_BPS[-1][1]), strict=True), where="post", color="#999999", label="link rate"
    )
    right.set_ylim(0, 5.2e9)
    right.set_yticks([0, 1e9, 2e9, 3e9, 4e9], ["0", "1", "2", "3", "4"])
    right.set_ylabel("link rate, Gb/s")
    handles = [*panel.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    panel.legend(handles=handles, fontsize=8, frameon=False, loc="upper left", ncols=3)
    save(figure, path)
    table = _table(
        "8 workers, floor 0.375, the rate changes", "from s", "Gb/s", "first-stage ratio, mean", "bits a value"
    )
    ends_s = [*(at_s for at_s, _ in _CHANGES_BPS[1:]), 100.0]
    for (at_s, rate_bps), end_s in zip(_CHANGES_BPS, ends_s, strict=True):
        # The first rounds after a change finish under the old estimate.
        ratios = [ratio for moment_s, ratio in metrics.ratios if at_s + 5 <= moment_s < end_s]
        bits = [32 * share for moment_s, share in shares if at_s + 5 <= moment_s < end_s]
        table.add_row("aqgb", f"{at_s:g}", f"{rate_bps / 1e9:g}", f"{np.mean(ratios):.3f}", f"{np.mean(bits):.2f}")
    return table


# ---- Figs. 12 and 14: sweeps


def _runs_fig12(seed: int) -> list[Run]:
    return [
        Run(scheme, _setting(seed, rate_bps=rate * 1e9), _SECONDS)
        for rate in (2, 2.5, 3, 4, 6, 8, 10)
        for scheme in _SCHEMES
    ]


def _show_fig12(results: Results, path: Path) -> Table:
    records = [record for _, record in results]
    figure, panels = new_figure(len(MEASURES))
    for panel, field in zip(panels, MEASURES, strict=True):
        draw_lines(panel, records, "rate_bps", field, "link rate, Gb/s", 1e-9)
    panels[0].legend(fontsize=8, frameon=False)
    save(figure, path)
    table = _table("16 workers, 200 s", "Gb/s", "rounds", "utilisation", "wait / compute", "ROW")
    for record in records:
        table.add_row(record["scheme"], f"{record['rate_bps'] / 1e9:g}", *_figures_of(record))
    return table


def _runs_fig14(seed: int) -> list[Run]:
    return [
        Run(scheme, _setting(seed, workload=workloads.by_name(f"resnet50-{n}blocks")), _SECONDS, labels={"blocks": n})
        for n in (1, 3, 4, 5, 6)
        for scheme in ("aqgb", "broadcast-4", "broadcast-32")
    ]


def _show_fig14(results: Results, path: Path) -> Table:
    records = [record for _, record in results]
    figure, panels = new_figure(2)
    split = [record for record in records if record["blocks"] > 1]
    for panel, field in zip(panels, ("rounds", "row"), strict=True):
        draw_lines(panel, split, "blocks", field, "blocks")
        panel.set_xticks([3, 4, 5, 6])
    whole = next(record for record in records if record["blocks"] == 1 and record["scheme"] == "aqgb")
    ideal = _SECONDS / whole["compute_s"]
    panels[0].axhline(ideal, color="#999999", linewidth=1, linestyle="--", label="ideal: no waiting")
    panels[0].axhline(whole["rounds"], color="#009E73", linewidth=1, linestyle=":", label="aqgb, not split")
    panels[0].legend(fontsize=8, frameon=False)
    save(figure, path)
    table = _table(
        f"16 workers, 2.5 Gb/s, 200 s; ideal {ideal:.1f} rounds",
        "blocks",
        "rounds",
        "utilisation",
        "wait / compute",
        "ROW",
    )
    for record in records:
        table.add_row(record["scheme"], str(record["blocks"]), *_figures_of(record))
    return table


# ---- GComp's Figs. 16 and 17: scaling, by the sizes and codec times of gradwire's own GComp


def _runs_scaling(seed: int) -> list[Run]:
    return [
        Run(
            scheme,
            Setting(workloads.by_name(name), n_workers, 10e9, jitter=Uniform(is_common=False, seed=seed)),
            rounds=50,
            measured_on=_MEASURED_ON[name],
            with_codec_times=with_codec,
            labels={"label": f"{scheme}{'' if with_codec or scheme == 'plain' else ', codec free'}"},
        )
        for name in ("resnet50", "bert-base")
        for n_workers in _GCOMP_WORKERS
        for scheme, with_codec in (("plain", True), ("gcomp", True), ("gcomp", False))
    ]


def _show_scaling(results: Results, path: Path) -> Table:
    from gradwire.workloads.calibration import reference_calibration

    figure, panels = new_figure(2, width_in=5.0)
    table = _table(
        "10 Gb/s, jitter per worker; paper (Fig. 17, 4 to 128): +35.3 to +53.4 % ResNet, +70.8 to +127 % BERT",
        "workload", "workers", "samples/s", "against plain",
    )  # fmt: skip
    for panel, name in zip(panels, ("resnet50", "bert-base"), strict=True):
        calibration = reference_calibration(name)
        assert calibration is not None
        records = []
        for _, record in results:
            if record["workload"] == name:
                samples = record["workers"] * calibration.batch_size / record["round_s"]
                records.append({**record, "scheme": record["label"], "samples_per_s": samples})
        draw_lines(panel, records, "workers", "samples_per_s", f"workers ({name})")
        panel.set_ylabel("samples/s")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        rates = [record["samples_per_s"] for record in records]
        panel.set_ylim(min(rates) / 2, max(rates) * 4)
        panel.legend(fontsize=8, frameon=False)
        for record in records:
            plain = next(one for one in records if one["scheme"] == "plain" and one["workers"] == record["workers"])
            gain = record["samples_per_s"] / plain["samples_per_s"] - 1
            table.add_row(
                record["scheme"],
                name,
                str(record["workers"]),
                f"{record['samples_per_s']:,.0f}",
                f"{100 * gain:+.1f} %",
            )
    save(figure, path)
    return table


_FIGURES: dict[str, Figure] = {
    "fig8": Figure("AQGB, the stragglers' distribution", lambda seed: [], _show_fig8),
    "fig9": Figure("AQGB, the ratio follows the rate", _runs_fig9, _show_fig9),
    "fig10": Figure(
        "AQGB, rounds, utilisation, T_wait, ROW; Table 2",
        lambda seed: _runs_of_jitters(
            seed, [("", Uniform(seed=seed)), (" per worker", Uniform(is_common=False, seed=seed))]
        ),
        _show_fig10,
    ),
    "fig12": Figure("AQGB, link rates of 2 to 10 Gb/s", _runs_fig12, _show_fig12),
    "fig13": Figure("AQGB, stragglers", _runs_fig13, _show_fig13),
    "fig14": Figure("AQGB, 3 to 6 blocks", _runs_fig14, _show_fig14),
    "gcomp-fig17": Figure("GComp, 1 to 128 workers (Figs. 16 and 17)", _runs_scaling, _show_scaling),
}
