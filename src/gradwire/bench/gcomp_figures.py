"""gradwire bench gcomp-figures: the GComp paper's figures about gradients and codes, from gradient files."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.table import Table

from gradwire.bench.figures import numbers
from gradwire.bench.figures.huffman import time_decoders
from gradwire.bench.figures.numbers import Records
from gradwire.errors import GradwireError, Unsupported
from gradwire.results.console import make_console
from gradwire.results.records import write_json
from gradwire.telemetry.environment import describe_environment
from gradwire.workloads.gradients import GradientFile, load_gradients


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gradwire bench gcomp-figures`."""
    parser.add_argument(
        "--gradients", nargs="+", required=True, metavar="FILE.npz", help="S#1, S#2, ...: in the order of training"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of plots and numbers (runs/gcomp-figures-*)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here too")


def run(args: argparse.Namespace) -> int:
    """Compute the numbers, draw the plots, print the tables."""
    try:
        from gradwire.bench.figures import plots
    except ImportError as error:
        raise Unsupported(f"the figures need matplotlib ({error}); pip install 'gradwire[report]'") from error
    files = [load_gradients(path) for path in args.gradients]
    folder: Path = args.out or Path("runs") / time.strftime("gcomp-figures-%Y%m%d-%H%M%S")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GradwireError(f"could not make {folder}: {error.strerror or error}") from error
    results = measure(files)
    plots.plot_values(files, folder)
    plots.plot_ratio_and_zeros(files, results["values"], folder)
    plots.plot_cross_tables(results["cross_tables"], folder)
    if results["table_refresh"]:
        plots.plot_table_refresh(results["table_refresh"], folder)
    plots.plot_decoders(results["decoders"], folder)
    plots.plot_ablation(results["mantissa_ablation"], folder)
    console = make_console()
    for name, records in results.items():
        console.print(make_table(name, records))
    environment = describe_environment()
    flat = [{"figure": name, **record, **environment} for name, records in results.items() for record in records]
    write_json(folder / "gcomp_figures.json", flat)
    if args.json:
        write_json(args.json, flat)
    console.print(f"plots and numbers: {folder}")
    return 0


def measure(files: Sequence[GradientFile]) -> dict[str, Records]:
    """Every figure's numbers by name."""
    figures: dict[str, Callable[[Sequence[GradientFile]], Records]] = {
        "values": numbers.describe_values,
        "cross_tables": numbers.cross_tables,
        "table_refresh": numbers.table_refresh,
        "mantissa_ablation": numbers.mantissa_ablation,
    }
    return {**{name: function(files) for name, function in figures.items()}, "decoders": time_decoders()}


def make_table(name: str, records: Records) -> Table:
    """One figure's records, for people: wide ones with a column a record."""
    table = Table(title=name.replace("_", " "))
    columns = list(dict.fromkeys(key for record in records for key in record))
    rows = [[_cell(record.get(column)) for column in columns] for record in records]
    headings = [column.replace("_", " ") for column in columns]
    if len(columns) > 7:
        turned = list(zip(headings, *rows, strict=True))
        headings, rows = list(turned[0]), [list(row) for row in turned[1:]]
    for heading in headings:
        table.add_column(heading)
    for row in rows:
        table.add_row(*row)
    return table


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
