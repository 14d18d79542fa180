"""gradwire bench acp-figures: the ACP-SGD paper's tables and figures about time and volume, resumable."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gradwire.bench import acp_shapes
from gradwire.bench.acp_figures_table import PLANS, choose_plans
from gradwire.bench.figures import acp_numbers
from gradwire.bench.sweep import Sweep
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.results.console import make_console
from gradwire.results.records import write_csv, write_json, write_text

_SHAPES = "shapes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gradwire bench acp-figures`."""
    names = [_SHAPES, *(plan.name for plan in PLANS)]
    parser.add_argument("--figure", nargs="+", default=[], choices=names, metavar="NAME",
                        help=f"some of them: {', '.join(names)} (all)")  # fmt: skip
    parser.add_argument("--only", nargs="+", default=[], metavar="KEY", help="rows whose keys begin with one of these")
    parser.add_argument("--out", type=Path, default=Path("runs/acp-figures"), metavar="DIR", help="folder of the results "
                        "(runs/acp-figures); a row that is finished there is not measured again")  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="measure again what is finished")
    parser.add_argument(
        "--no-run", action="store_true", help="tables and plots of what is finished, nothing is measured"
    )
    parser.add_argument("--list", action="store_true", help="print the rows and stop")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all records here too")


def run(args: argparse.Namespace) -> int:
    """Measure what is missing, then print and write tables and plots; status 1 if a row failed."""
    plans = [] if args.figure == [_SHAPES] else choose_plans([name for name in args.figure if name != _SHAPES])
    rows = [row for plan in plans for row in plan.rows if not args.only or row.key.startswith(tuple(args.only))]
    if args.only and not rows:
        raise InvalidArgument(f"no row's key begins with {' or '.join(args.only)}; --list shows the keys")
    if args.list:
        for row in rows:
            print(f"{row.key:28} about {row.estimate_s:.0f} s: gradwire bench train {' '.join(row.arguments)}")
        print(f"all {len(rows)} rows: about {sum(row.estimate_s for row in rows) / 60:.0f} minutes")
        return 0
    try:
        from gradwire.bench.figures import acp_plots
    except ImportError as error:
        raise Unsupported(f"the figures need matplotlib ({error}); pip install 'gradwire[report]'") from error
    console = make_console()
    out: Path = args.out.resolve()
    sweep = Sweep(out, lambda text: console.print(text, highlight=False, markup=False))
    status = sweep.run(rows, fresh=args.fresh) if rows and not args.no_run else 0
    records = [record for record in sweep.records() if record["bench"] == "train"]
    figures: dict[str, list[dict[str, Any]]] = {}
    if not args.figure or _SHAPES in args.figure:
        figures |= {
            "table1_ratios": acp_shapes.describe_ratios(),
            "table2_traffic_mb": acp_shapes.describe_traffic(),
            "fig05_tensor_sizes": acp_shapes.describe_small_tensors(),
        }
        acp_plots.plot_sizes(out)
    for plan in plans:
        found = acp_numbers.describe_plan(plan.name, records)
        if found:
            figures[plan.name] = found
            acp_plots.plot_plan(plan.name, found, out)
    flat = [{"figure": name, **record} for name, found in figures.items() for record in found]
    write_json(out / "acp_figures.json", flat)
    if args.json:
        write_json(args.json, flat)
    for name, found in figures.items():
        write_csv(out / f"{name}.csv", found)
    titles = {plan.name: plan.shows for plan in PLANS}
    markdown = "\n".join(acp_numbers.to_markdown(titles.get(name, name), found) for name, found in figures.items())
    write_text(out / "acp_figures.md", markdown)
    console.print(markdown, markup=False, highlight=False, soft_wrap=True)
    console.print(f"plots and numbers: {out}")
    return status
