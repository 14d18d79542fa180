"""`gradwire bench list`: the catalogue, and what of it is measured."""

from __future__ import annotations

import argparse
from pathlib import Path

from gradwire_lab.bench.catalogue import EXPERIMENTS
from gradwire_lab.bench.runner import Runner
from gradwire_lab.cli.bench.running import add_store_arguments, choose, duration, open_store
from gradwire_lab.results.tables import Grid, print_grid


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gradwire bench list`."""
    parser.add_argument("key", nargs="*", metavar="KEY", help="an experiment, or the beginning of several keys (all)")
    parser.add_argument("--quick", action="store_true", help="those of `make bench` alone")
    parser.add_argument("--wide", action="store_true", help="the papers' figures and the runs too")
    add_store_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print a line an experiment."""
    chosen = choose(EXPERIMENTS, args.key, quick=args.quick)
    store = open_store(args)
    runner = Runner(store, print, Path(args.folder))
    rows = []
    for experiment in chosen:
        left = runner.plan([experiment])
        n_runs = len(experiment.groups())
        rows.append(
            [
                experiment.key,
                f"{n_runs - len(left)}/{n_runs}",
                duration(runner.estimate_s(left)) if left else "-",
                experiment.question,
                "; ".join(f"{paper} {figure}" for paper, figure in experiment.of),
            ]
        )
    if args.wide:
        print_grid(Grid("", ["key", "runs done", "left", "question", "figures"], rows), wide=True)
        for one in runner.plan(chosen):
            print(f"  left: {one.name}")
    else:
        print_grid(Grid("", ["key", "runs done", "left"], [row[:3] for row in rows]))
        print("`--wide`: questions, figures and runs; `gradwire bench run KEY` measures what is left")
    return 0
