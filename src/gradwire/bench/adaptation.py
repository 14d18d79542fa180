"""gradwire bench adaptation: bits a value and acknowledged rate over the time of a run (AQGB's Fig. 9)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from gradwire.errors import CorruptMessage, InvalidArgument, Unsupported
from gradwire.results.console import make_console
from gradwire.results.records import write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gradwire bench adaptation`."""
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="folder that `gradwire train --scheme aqgb --out` wrote, for "
                        "instance inside `gradwire netlab run --at 30:rate:0=100mbit`")  # fmt: skip
    parser.add_argument(
        "--window", type=float, default=5.0, metavar="S", help="seconds that a line of the table covers (5)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one record a step")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it (.png, .svg, .pdf)")


def run(args: argparse.Namespace) -> int:
    """Read, print, write."""
    if not args.window > 0:
        raise InvalidArgument(f"--window {args.window}: expected more than 0 seconds")
    records = read_steps(args.run)
    make_console().print(make_table(records, args.window))
    if args.json is not None:
        write_json(args.json, records)
    if args.plot is not None:
        draw(records, args.plot)
    return 0


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """The steps in which bits were counted, with `q_ratio`, the paper's Q: bits sent / 32.

    Raises: InvalidArgument (no such run, or none of a broadcast scheme), CorruptMessage (a line that is no record).
    """
    path = folder / "steps.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read ({error}); give the folder of `gradwire train --out`") from error
    try:
        steps = [json.loads(line) for line in lines]
        records = [
            {
                "step": step["step"],
                "elapsed_s": step["elapsed_s"],
                "iteration_s": step["iteration_s"],
                "bits_per_value": step["bits_per_value"],
                "first_bits_per_value": step["first_bits_per_value"],
                "q_ratio": step["bits_per_value"] / 32,
                "acknowledged_bps": step.get("acknowledged_bps", 0.0),
                "loss": step["loss"],
            }
            for step in steps
            if "bits_per_value" in step
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptMessage(f"{path} is no log of gradwire train ({error!r})") from error
    if not records:
        raise InvalidArgument(f"{path} holds no bits: the run must be of --scheme aqgb or broadcast")
    return records


def make_table(records: list[dict[str, Any]], window_s: float) -> Table:
    """Means over windows of time."""
    table = Table(
        title="bits a value over time, means", caption="acknowledged: what the slowest peer gets of one sender"
    )
    for heading in ("s", "steps", "bits", "of them first stage", "Q", "acknowledged Mb/s", "ms a step"):
        table.add_column(heading, justify="right")
    windows: dict[int, list[dict[str, Any]]] = {}
    for record in records:
        windows.setdefault(int(record["elapsed_s"] / window_s), []).append(record)
    for index, inside in sorted(windows.items()):
        means = {key: fmean(record[key] for record in inside) for key in inside[0]}
        table.add_row(
            f"{index * window_s:g}-{(index + 1) * window_s:g}",
            str(len(inside)),
            f"{means['bits_per_value']:.1f}",
            f"{means['first_bits_per_value']:.1f}",
            f"{means['q_ratio']:.3f}",
            f"{means['acknowledged_bps'] / 1e6:.1f}",
            f"{means['iteration_s'] * 1e3:.0f}",
        )
    return table


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Q over time, and the acknowledged rate under it. Raises: Unsupported (no matplotlib)."""
    try:
        import matplotlib
    except ImportError as error:
        raise Unsupported(f"--plot needs matplotlib ({error}); pip install 'gradwire[report]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    times = [record["elapsed_s"] for record in records]
    figure, (upper, lower) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 5), constrained_layout=True)
    upper.step(times, [record["q_ratio"] for record in records], where="post", label="both stages")
    upper.step(times, [record["first_bits_per_value"] / 32 for record in records], where="post", label="first stage")
    upper.set_ylabel("Q: bits sent / 32")
    upper.set_ylim(0, 1.02)
    upper.legend()
    lower.step(times, [record["acknowledged_bps"] / 1e6 for record in records], where="post", color="tab:green")
    lower.set_ylabel("acknowledged, Mb/s")
    lower.set_xlabel("seconds of training")
    figure.savefig(path)
    pyplot.close(figure)
