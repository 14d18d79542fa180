"""`gradwire bench list`: the catalogue, what of it is measured by the code as it is, and what is to be run again."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from gradwire_lab.bench.catalogue import EXPERIMENTS
from gradwire_lab.bench.measures import code_of
from gradwire_lab.bench.runner import ExperimentRun, Runner
from gradwire_lab.cli.bench.running import add_store_arguments, choose, duration, open_store
from gradwire_lab.results.experiment import Cell, Experiment
from gradwire_lab.results.store import State, Store, machines, state_of
from gradwire_lab.results.tables import Grid, print_grid


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gradwire bench list`."""
    parser.add_argument("key", nargs="*", metavar="KEY", help="an experiment, or the beginning of several keys (all)")
    parser.add_argument("--quick", action="store_true", help="those of `make bench` alone")
    parser.add_argument("--here", action="store_true", help="count only what this machine has measured")
    parser.add_argument("--wide", action="store_true", help="the papers' figures and the runs too")
    add_store_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print a line an experiment, and what is to be run again."""
    chosen = choose(EXPERIMENTS, args.key, quick=args.quick)
    store = open_store(args)
    names = [store.machine] if args.here else machines(store.folder)
    runner = Runner(store, print, Path(args.folder))
    rows, left = [], []
    for experiment in chosen:
        states = [_best_state(experiment, cells, store, names) for cells in experiment.groups()]
        again = [
            ExperimentRun(experiment, cells)
            for cells, state in zip(experiment.groups(), states, strict=True)
            if state != "current"
        ]
        left += again
        rows.append(
            [
                experiment.key,
                f"{len(states) - states.count('never')}/{len(states)}",
                str(states.count("stale") or "-"),
                duration(runner.estimate_s(again)) if again else "-",
                experiment.question,
                "; ".join(f"{paper} {figure}" for paper, figure in experiment.of),
            ]
        )
    headings = ["key", "runs done", "stale", "left", "question", "figures"]
    shown = len(headings) if args.wide else 4
    print_grid(Grid("", headings[:shown], [row[:shown] for row in rows]), wide=args.wide)
    for one in left if args.wide else []:
        print(f"  left: {one.name}")
    for name, is_long in (("first list (`run all`)", False), ("second list (`run long`)", True)):
        mine = [experiment for experiment in chosen if experiment.is_long == is_long]
        hours = sum(experiment.seconds * len(experiment.groups()) for experiment in mine) / 3600
        print(f"{name}: {len(mine)} experiments, one pass about {hours:.1f} h")
    n_stale = sum(int(row[2].replace("-", "0")) for row in rows)
    print(
        f"{n_stale} runs are stale, since code or settings have changed, and {len(left) - n_stale} were never measured"
    )
    print("`--wide`: questions, figures and runs; `--here`: of this machine only; `gradwire bench run KEY` measures")
    return 0


def _best_state(experiment: Experiment, cells: Sequence[Cell], store: Store, names: Sequence[str]) -> State:
    """Of a run, on the machine where it is most current."""
    code = code_of(experiment.measure)
    found = {state_of(experiment, cells, Store(store.folder, machine).read(experiment.key), code) for machine in names}
    return "current" if "current" in found else "stale" if "stale" in found else "never"
