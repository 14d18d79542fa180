"""`gradwire bench list`, `run` and `render`: the catalogue, its records, and the pages that are made of them."""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from gradwire.errors import InvalidArgument
from gradwire_lab.bench.catalogue import EXPERIMENTS, book
from gradwire_lab.bench.measures import code_of
from gradwire_lab.bench.runner import ExperimentRun, Runner, describe_run
from gradwire_lab.ranks.supervisor import end_on_signals
from gradwire_lab.results.captions import duration
from gradwire_lab.results.experiment import Experiment, Table
from gradwire_lab.results.records import Store, find_root, machine_name, machines, states_of
from gradwire_lab.results.tables import Grid, make_grid, print_grid


def list_experiments(args: argparse.Namespace) -> int:
    """Print a line an experiment, and what is to be run again."""
    chosen = choose(EXPERIMENTS, args.key, quick=args.quick)
    store = open_store(args)
    names = [store.machine] if args.here else machines(store.folder)
    runner = Runner(store, print, Path(args.folder))
    rows: list[list[str]] = []
    left: list[ExperimentRun] = []
    n_stale = 0
    for experiment in chosen:
        code, runs = code_of(experiment), [ExperimentRun(experiment, cells) for cells in experiment.groups()]
        states = states_of(experiment, [Store(store.folder, name) for name in names], code)
        again = [run for run, state in zip(runs, states, strict=True) if state != "current"]
        count = Counter(states)
        left, n_stale = left + again, n_stale + count["stale"]
        figures = "; ".join(f"{paper} {figure}" for paper, figure in experiment.of)
        takes = duration(runner.estimate_s(again)) if again else "-"
        done, stale = f"{len(states) - count['never']}/{len(states)}", str(count["stale"] or "-")
        rows.append([experiment.key, done, stale, takes, experiment.question, figures])
    headings = ["key", "runs done", "stale", "left", "question", "figures"]
    shown = len(headings) if args.wide else 4
    print_grid(Grid("", headings[:shown], [row[:shown] for row in rows]), wide=args.wide)
    for one in left if args.wide else []:
        print(f"  left: {one.name}")
    for name, is_long in (("first list (`run all`)", False), ("second list (`run long`)", True)):
        mine = [experiment for experiment in chosen if experiment.is_long == is_long]
        hours = sum(experiment.seconds * len(experiment.groups()) for experiment in mine) / 3600
        print(f"{name}: {len(mine)} experiments, one pass about {hours:.1f} h")
    print(f"{n_stale} runs are stale (code or settings have changed), {len(left) - n_stale} were never measured")
    print("`--wide`: questions, figures and runs; `--here`: of this machine only; `gradwire bench run KEY` measures")
    return 0


def run_experiments(args: argparse.Namespace) -> int:
    """Measure what is not finished (here; of a whole list on any machine), print the tables; status 1 if a run failed."""
    if not args.key and not args.quick:
        raise InvalidArgument("name experiments by KEY, or `all`, or --quick; `gradwire bench list` has them")
    chosen = choose(EXPERIMENTS, args.key, quick=args.quick)
    store = open_store(args)
    runner = Runner(store, lambda text: print(text, flush=True), args.folder)
    left = runner.plan(chosen, fresh=args.fresh, missing=args.missing, anywhere=bool({"all", "long"} & set(args.key)))
    n_finished = sum(len(experiment.groups()) for experiment in chosen) - len(left)
    left = [run for run in left if all(word in run.name for word in args.only)]
    if args.list:
        for one in left:
            print(f"{duration(runner.estimate_s([one])):>8}  {one.name} ({len(one.cells)} cells)")
        print(f"{len(left)} runs, about {duration(runner.estimate_s(left))}")
        return 0
    with end_on_signals():
        status = runner.run(left, n_finished)
    for experiment in chosen:
        records = [record for record in store.read(experiment.key) if "absent" not in record]
        for table in (one for one in experiment.show if records and isinstance(one, Table)):
            print()
            print_grid(make_grid(experiment, table, records), args.wide)
        if records:
            print(f"records: {store.path(experiment.key)}")
    return status


def render_pages(args: argparse.Namespace) -> int:
    """Write, or check, docs/results.md, docs/results/*, and the marked parts of README.md and docs/*.md."""
    root = args.root or find_root(Path.cwd())
    pages = book(root)
    if args.name:
        print(pages.snippet(args.name), end="")
        return 0
    if args.check:
        stale = [f"stale: {path.relative_to(root)}" for path in pages.stale()]
        ending = "`gradwire bench render` makes them anew" if stale else "every page is what results/ say"
        print(*stale, ending, sep="\n")
        return 1 if stale else 0
    changed = pages.render()
    print(*(f"wrote {path.relative_to(root)}" for path in changed), f"{len(changed)} files changed", sep="\n")
    return 0


def choose(experiments: Sequence[Experiment], keys: Sequence[str], *, quick: bool = False) -> list[Experiment]:
    """Those that are named by `keys`; all without any. Raises: InvalidArgument (none is). A key names its own
    experiment, or else those that begin with it. `all` is the first list, `long` the second one."""
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
    about = describe_run()
    root = args.root or find_root(Path.cwd())
    book(root)  # an experiment that cannot be shown is found before hours are spent on it
    return Store(root / "results", args.machine or machine_name(str(about["cpu"]), int(about["n_cores"])))
