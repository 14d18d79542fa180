"""Predict training on a network that you do not have: rounds, waiting and utilisation of any scheme."""

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gradwire import checks
from gradwire.errors import InvalidArgument
from gradwire.registry import parse_spec, spec_of
from gradwire_lab.bench.driver import Progress
from gradwire_lab.cli.options import add_json, option, switch
from gradwire_lab.results.experiment import Column, Experiment, Plot, Table
from gradwire_lab.results.plots import draw_panels, series_of
from gradwire_lab.results.records import write_csv, write_json
from gradwire_lab.results.tables import Grid, Summary, make_grid, print_grid
from gradwire_lab.simulator import workloads
from gradwire_lab.simulator.inputs import load_cluster, load_model, parse_link_rate, parse_trace
from gradwire_lab.simulator.schemes import registry
from gradwire_lab.simulator.search import ROUNDS, SampleGoal, SimulatedRun, rounds_of
from gradwire_lab.simulator.simulation import write_trace
from gradwire_lab.simulator.stage import JITTERS, Setting, jitter_by_name
from gradwire_lab.simulator.workloads import WorkloadTimes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    schemes = ["broadcast-32", "broadcast-4", "aqgb", "plain"]
    option(parser, "--scheme", "NAME", "as NAME:option=value,...; `all`: everything", schemes, nargs="+")
    option(parser, "--workers", "N", "several: a run each (default: 16, or --cluster's)", nargs="+", type=int)
    option(parser, "--rate", "RATE", "of each link; several: a run each (default: 2.5gbit)", nargs="+")
    option(parser, "--workload", "NAME", "resnet50-Nblocks (1, 3 to 6; default: 4), resnet50, bert-base", nargs="+")
    option(parser, "--model", "FILE", "of your own: blocks, a plan, or a Chrome trace", type=Path)
    option(parser, "--cluster", "FILE", "groups of workers and what joins them, as JSON", type=Path)
    option(parser, "--step-ms", "MS", "forward and backward pass (default: the workload's)", type=float)
    option(parser, "--seconds", "S", "simulated (default: 200, or what --rounds take)", type=float)
    option(parser, "--rounds", "N", "stop after this many synchronised rounds", type=int)
    option(parser, "--samples", "N", "rank by the hours that so many samples take", type=float)
    option(parser, "--batch", "N", "samples of a worker and step", 1.0)
    option(parser, "--budget", "HOURS", "of all workers together, for --samples", type=float)
    parser.add_argument("--jitter", choices=JITTERS, default="common", help="of computation times (default: common)")
    option(parser, "--sigma", "SIGMA", "tail of the stragglers' distribution", 1.5)
    option(parser, "--seed", "N", "of the jitter", 0)
    option(parser, "--racks", "N", "in a two-level tree (default: 1, one switch)", type=int)
    option(parser, "--core-rate", "RATE", "of a rack's link to the core (default: workers')")
    option(parser, "--latency-us", "US", "of what a worker waits for (default: 0)", type=float)
    option(parser, "--trace", "FILE", "lines `seconds,rate`, or directly 0=2gbit,60=1gbit")
    option(parser, "--trace-workers", "N", "whose links follow the trace (default: all)", nargs="+", type=int)
    option(parser, "--measured-on", "NAME", "workload of the measured sizes (default: resnet50's, else resnet's)")
    switch(parser, "--no-codec-times", "codecs take no time: what the network alone allows")
    add_json(parser, csv=True)
    option(parser, "--details", "FILE", "write every round, link and worker of every run", type=Path)
    option(parser, "--plot", "FILE", "draw the records: PNG or SVG", [], nargs="+", type=Path)
    switch(parser, "--wide", "all columns of the table")
    option(parser, "--chrome-trace", "FILE", "spans of a single run's rounds, for Perfetto", type=Path)
    option(parser, "--trace-rounds", "N", "rounds in the Chrome trace", 5)


def run(args: argparse.Namespace) -> int:
    checks.finite("--seconds", args.seconds or 0.0, 0)
    checks.count("--trace-rounds", args.trace_rounds)
    runs = make_runs(args)
    if args.chrome_trace and len(runs) > 1:
        raise InvalidArgument(f"a Chrome trace shows one run, and these are {len(runs)}: name one scheme, rate, size")
    goal = SampleGoal(args.samples, args.batch, args.budget) if args.samples is not None else None
    if goal is None and args.budget is not None:
        raise InvalidArgument("--budget bounds what --samples take: give --samples, and --batch")
    for path in args.plot:
        if path.suffix not in (".png", ".svg"):
            raise InvalidArgument(f"--plot {path}: expected a name that ends in .png or .svg")
    records: list[dict[str, Any]] = []
    details: list[dict[str, Any]] = []
    one_run = runs[0].seconds or float(max(one.rounds or 1 for one in runs))
    unit = "seconds" if runs[0].seconds else "rounds"
    progress = Progress(f"{unit} simulated", round(one_run * len(runs)))
    for index, one in enumerate(runs):

        def show(n_rounds: int, now_s: float, done: float = index * one_run) -> None:
            progress.reach(round(done + (now_s if unit == "seconds" else n_rounds)))

        simulation, record = one.do(show)
        records.append(record)
        details += simulation.metrics.details(record) if args.details else []
    records = goal.rank(records) if goal else records
    for path, content in ((args.json, records), (args.details, details)):
        if path:
            write_json(path, content)
    if args.csv:
        write_csv(args.csv, records)
    if args.chrome_trace:
        n_events = write_trace(args.chrome_trace, simulation, n_rounds=args.trace_rounds)
        print(f"{n_events} events in {args.chrome_trace}: open it at ui.perfetto.dev")
    print_grid(make_table(records), args.wide)
    for path in args.plot:
        plot_sweep(records, path)
        print(f"plot: {path}")
    return 0


def make_runs(args: argparse.Namespace) -> list[SimulatedRun]:
    specs = [name for spec in args.scheme for name in (registry.names() if spec == "all" else [spec])]
    seconds = args.seconds if args.seconds is not None or args.rounds is not None or args.samples is not None else 200.0
    jitter = jitter_by_name(args.jitter, args.sigma, args.seed)
    codecs, keeps_spans = (args.measured_on, not args.no_codec_times), args.chrome_trace is not None
    runs = []
    for model, make_setting, spec in itertools.product(_models(args), _networks(args), specs):
        name, options = parse_spec(spec)
        registry.by_name(name, options, *codecs)  # a wrong name fails at once
        rounds = rounds_of(spec, args.rounds or ROUNDS) if args.samples is not None else args.rounds
        setting = make_setting(model, jitter=jitter)
        runs.append(SimulatedRun(name, setting, seconds, rounds, options, *codecs, keeps_spans))
    return runs


def _models(args: argparse.Namespace) -> list[WorkloadTimes]:
    if args.model and args.workload:
        raise InvalidArgument("--model is a workload of your own: leave --workload out, or --model")
    names = args.workload or ["resnet50-4blocks"]
    models = [load_model(args.model)] if args.model else [workloads.by_name(name) for name in names]
    return models if args.step_ms is None else [model.scaled(args.step_ms / 1e3) for model in models]


def _networks(args: argparse.Namespace) -> list[Callable[..., Setting]]:
    """What makes a setting of a model, for each number of workers and rate."""
    trace, workers = parse_trace(args.trace) if args.trace else None, tuple(args.trace_workers or ()) or None
    traced: dict[str, Any] = {"trace": trace, "traced_workers": workers}
    if args.cluster:
        for name in ("rate", "racks", "core-rate", "latency-us"):
            if getattr(args, name.replace("-", "_")) is not None:
                raise InvalidArgument(f"--{name}: the cluster in {args.cluster} says that; leave one of the two out")

        def of_cluster(workload: WorkloadTimes, n: int | None = None, **more: Any) -> Setting:
            setting = load_cluster(args.cluster, workload)
            return setting.of_workers(setting.n_workers if n is None else n).replace(**traced, **more)

        return [partial(of_cluster, n=n) for n in args.workers or [None]]
    core_bps = parse_link_rate(args.core_rate) if args.core_rate else None
    racks = 1 if args.racks is None else args.racks
    links: dict[str, Any] = {"racks": racks, "core_bps": core_bps, "latency_s": (args.latency_us or 0.0) / 1e6}
    rates = [parse_link_rate(rate) for rate in args.rate or ["2.5gbit"]]
    sizes = itertools.product(args.workers or [16], rates)
    return [partial(Setting, n_workers=n, rate_bps=rate, **links, **traced) for n, rate in sizes]


_TABLE = Table(
    [
        Column("rounds", form=".0f"), Column("round_s", "round s", form=".3f"), Column("utilisation", "use, %", 100, ".1f"),
        Column("wait_s", "wait s", form=".3f"), Column("row", "ROW", form=".2f"), Column("osf", "OSF", form=".3f"),
        Column("bits_per_value", "bits", form=".2f"), Column("seconds", form=".0f"),
    ],
    rows=("scheme", "workers", "Gb/s"),
)  # fmt: skip
_CAPTION = (
    "use: utilisation of the links; wait: mean of a worker and round; ROW, OSF: means over rounds; bits: sent of each "
    "value, all copies one"
)
_SEARCHED = Table(
    [
        Column("effective_round_s", "step s", form=".3f"), Column("samples_per_s", "samples/s", form=",.0f"),
        Column("hours", form=",.2f"), Column("worker_hours", "worker hours", form=",.1f"), Column("budget"), Column("level"),
        Column("lost_share", "lost, %", 100, ".1f"),
    ],
    rows=("scheme", "workers", "Gb/s"),
)  # fmt: skip


def make_table(records: Sequence[dict[str, Any]]) -> Grid:
    """The records, for people; of a search in its order."""
    shown = [{**record, "scheme": spec_of(record), "Gb/s": f"{record['rate_bps'] / 1e9:g}"} for record in records]
    table, caption = _TABLE, _CAPTION
    if "hours" in records[0]:  # of a search
        shown = [{**record, "budget": "within" if record["in_budget"] else "beyond"} for record in shown]
        table, caption = _SEARCHED, ""
    axes: dict[str, list[Any]] = {axis: [] for axis in ("workload", *table.rows)}
    grid = make_grid(Experiment("simulated", "", "", "", axes), table, shown)
    workloads_of = ", ".join(dict.fromkeys(record["workload"] for record in records))
    return replace(grid, title=f"simulated {workloads_of}: {records[0]['jitter']} jitter", caption=caption)


def plot_sweep(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Four panels over whatever varies most: rates, workers or schemes. Raises: GradwireError, Unsupported."""
    if unfinished := [record["scheme"] for record in records if record["compute_s"] is None]:
        raise InvalidArgument(
            f"nothing to plot for {', '.join(dict.fromkeys(unfinished))}: no round ended in the time that was simulated; "
            "raise --seconds, or give --rounds"
        )
    varied = {field: len({record[field] for record in records}) for field in ("rate_bps", "workers")}
    x = max(varied, key=lambda field: varied[field])
    title, scale = {"rate_bps": ("link rate, Gb/s", 1e-9), "workers": ("workers", 1.0)}[x]
    if varied[x] == 1:
        x, title, scale = "scheme", "scheme", 1.0
    shown = [{**record, "wait_share": (record["wait_s"] or 0.0) / record["compute_s"]} for record in records]
    measures = [Column("rounds"), Column("utilisation", "link utilisation, %", 100),
                Column("wait_share", "T_wait / computation"), Column("row", "ROW")]  # fmt: skip
    if "hours" in shown[0]:  # of a search
        measures[0], measures[3] = Column("hours"), Column("worker_hours", "worker hours")
    axes: dict[str, list[Any]] = {field: [] for field in ("scheme", "options", "workload", "workers", "rate_bps")}
    summary = Summary(Experiment("sweep", "", "", "", axes), shown)
    plots = [Plot(x, one, style="bars" if x == "scheme" else "lines", x_title=title, x_scale=scale) for one in measures]
    draw_panels([(plot, series_of(plot, summary)) for plot in plots], path)
