"""`gradwire bench run`: measure experiments into the store."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from gradwire.errors import InvalidArgument
from gradwire_lab.bench import provenance
from gradwire_lab.bench.catalogue import EXPERIMENTS, book
from gradwire_lab.bench.runner import Runner
from gradwire_lab.ranks.supervisor import end_on_signals
from gradwire_lab.results.experiment import Experiment, Table
from gradwire_lab.results.grids import make_grid
from gradwire_lab.results.store import Store, find_root, machine_name
from gradwire_lab.results.tables import print_grid


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """Where results are."""
    parser.add_argument(
        "--root", type=Path, metavar="DIR", help="the checkout that has results/ (default: around this folder)"
    )
    parser.add_argument("--machine", metavar="NAME", help="folder of this machine in results/ (by processor and cores)")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"), metavar="DIR",
                        help="working files: logs, gradients, trainings (runs/bench)")  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gradwire bench run`."""
    parser.add_argument("key", nargs="*", metavar="KEY", help="an experiment, or the beginning of several keys; `all`: "
                        "the catalogue's first list; `long`: its second; `gradwire bench list` has them")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="the small set of `make bench`, under half an hour")
    parser.add_argument(
        "--list", action="store_true", help="list what would be measured and how long it takes, then exit"
    )
    parser.add_argument(
        "--missing", action="store_true", help="only what has never been measured, not even by older code"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="WORD",
        help="only runs whose names, as --list shows them, hold all of these words",
    )
    parser.add_argument("--fresh", action="store_true", help="also measure again what is finished")
    parser.add_argument("--wide", action="store_true", help="all columns of the tables")
    add_store_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure what is not finished, print the tables; status 1 if a run failed."""
    if not args.key and not args.quick:
        raise InvalidArgument("name experiments by KEY, or `all`, or --quick; `gradwire bench list` has them")
    chosen = choose(EXPERIMENTS, args.key, quick=args.quick)
    store = open_store(args)
    runner = Runner(store, lambda text: print(text, flush=True), args.folder)
    left = runner.plan(chosen, fresh=args.fresh, missing=args.missing)
    n_finished = sum(len(experiment.groups()) for experiment in chosen) - len(left)
    left = [run for run in left if all(word in run.name for word in args.only)]
    if args.list:
        for one in left:
            print(f"{duration(runner.estimate_s([one])):>8}  {one.name} ({len(one.cells)} cells)")
        print(f"{len(left)} runs, about {duration(runner.estimate_s(left))}")
        return 0
    with end_on_signals():
        status = runner.run(left, n_finished)
    show(chosen, store, args.wide)
    return status


def show(experiments: Sequence[Experiment], store: Store, wide: bool) -> None:
    """The tables of what this machine's store has."""
    for experiment in experiments:
        records = [record for record in store.read(experiment.key) if "absent" not in record]
        for table in experiment.show:
            if records and isinstance(table, Table):
                print()
                print_grid(make_grid(experiment, table, records), wide)
        if records:
            print(f"records: {store.path(experiment.key)}")


def choose(experiments: Sequence[Experiment], keys: Sequence[str], *, quick: bool = False) -> list[Experiment]:
    """Those that are named by `keys`; all without any. Raises: InvalidArgument (none is).

    A key names its own experiment, or, if there is none, those whose keys begin with it. `all` is the first list, `long`
    the second one.
    """
    known, wanted = {one.key for one in experiments}, set()
    lists = {name: {one.key for one in experiments if one.is_long == (name == "long")} for name in ("all", "long")}
    for key in keys:
        named = lists.get(key) or ({key} if key in known else {other for other in known if other.startswith(key)})
        if not named:
            raise InvalidArgument(f"no experiment's key begins with {key}; `gradwire bench list` has them")
        wanted |= named
    return [one for one in experiments if (not quick or one.quick) and (not keys or one.key in wanted)]


def open_store(args: argparse.Namespace) -> Store:
    """The store of this machine in the checkout, of the wanted name. Raises: InvalidArgument."""
    about = provenance.describe_run()
    root = args.root or find_root(Path.cwd())
    book(root)  # an experiment that cannot be shown is found before hours are spent on it
    return Store(root / "results", args.machine or machine_name(str(about["cpu"]), int(about["n_cores"])))


def duration(seconds: float) -> str:
    """For people."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
