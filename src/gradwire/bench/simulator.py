"""gradwire bench simulator: the simulator against the test network; with --measure, the sizes that it predicts with."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from gradwire import schemes
from gradwire.errors import GradwireError, InvalidArgument
from gradwire.registry import parse_spec
from gradwire.results.console import make_console
from gradwire.results.records import RecordLog, write_json, write_text
from gradwire.simulator.schemes.measured import FORMAT, TABLE, MeasuredTable

Record = dict[str, Any]

# What is compared, where it is registered: a scheme of each kind of lane, and the two broadcasts.
_COMPARED = ("ddp", "plain", "gcomp", "acp-sgd", "broadcast", "broadcast:bits=32", "aqgb")
# The small set runs a small model at rates that make it wait as a large one does at ten times these.
_QUICK = ("gpt:step_ms=100", ("50mbit", "100mbit", "200mbit"), 9, 4)
_FULL = ("resnet50", ("500mbit", "1gbit", "2gbit"), 10, 4)
_GOAL = 0.1
# A reduction of so few bytes takes its hops' latency and nothing else.
_LATENCY_BYTES = 1024
# Measured by themselves elsewhere, and modelled by their control law.
_NOT_TABLED = ("aqgb", "broadcast")
# What its threshold decides between is measured; the threshold is the simulator's own.
_TABLED_AS = {"slimgc": "slimgc:threshold_bytes=0"}


@dataclass(frozen=True)
class Cell:
    """One call of a benchmark."""

    key: str
    bench: str
    arguments: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gradwire bench simulator`."""
    parser.add_argument(
        "--quick", action="store_true", help="a small model at low rates: about ten minutes on two cores"
    )
    parser.add_argument("--ranks", nargs="+", type=int, metavar="N", help="world sizes (2 4 8; with --measure 2 3 4)")
    parser.add_argument(
        "--rate", nargs="+", metavar="RATE", help="link rates (500mbit 1gbit 2gbit; quick 50, 100, 200mbit)"
    )
    parser.add_argument(
        "--scheme", nargs="+", metavar="NAME", help=f"what to compare ({' '.join(_COMPARED)}) or measure (all)"
    )
    parser.add_argument(
        "--workload",
        nargs="+",
        metavar="NAME",
        help="what is replayed, options as NAME:option=value,... (resnet50; quick gpt)",
    )
    parser.add_argument("--cores", type=int, metavar="N", help="predict for ranks that share so many (this machine's)")
    parser.add_argument("--steps", type=int, metavar="N", help="steps a scheme that count")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder of the results, where a run goes on (runs/simulator...)"
    )
    parser.add_argument("--fresh", action="store_true", help="measure again what is finished")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the comparison's records")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw predicted against measured: PNG or SVG")
    parser.add_argument(
        "--measure", action="store_true", help="measure sizes and codec times instead, for the simulator's table"
    )
    parser.add_argument(
        "--table", type=Path, default=TABLE, metavar="FILE", help="the table that --measure writes into"
    )


def run(args: argparse.Namespace) -> int:
    """Measure what is not finished, then compare or tabulate; status 1 if a cell failed."""
    console = make_console()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    if args.cores is not None and args.cores < 1:
        raise InvalidArgument(f"--cores {args.cores}: expected at least 1")
    if args.measure:
        return _measure_table(args, say)
    workload, rates, n_steps, n_warmup = _QUICK if args.quick else _FULL
    workload = args.workload[0] if args.workload else workload
    specs = args.scheme or [spec for spec in _COMPARED if _is_there(spec)]
    if "ddp" not in specs:
        specs = ["ddp", *specs]  # whose computation is every prediction's
    out = args.out or Path("runs/simulator-quick" if args.quick else "runs/simulator")
    measuring = Measuring(out, say, args.fresh)
    cells: dict[tuple[int, str], tuple[Cell, Cell]] = {}
    for n_ranks in args.ranks or (2, 4, 8):
        if n_ranks < 2:
            raise InvalidArgument(f"--ranks {n_ranks}: a comparison needs a network, and so at least 2 ranks")
        for rate in args.rate or rates:
            where = ("--ranks", str(n_ranks), "--rate", rate)
            tiny = (
                "--scheme",
                "plain",
                "gcomp",
                "--n-bytes",
                str(_LATENCY_BYTES),
                "--rounds",
                "7",
                "--budget",
                "1",
                *where,
            )
            steps = ("--steps", str(args.steps or n_steps), "--warmup", str(n_warmup))
            train = ("--compute", "emulate", "--workload", workload, "--scheme", *specs, *steps, *where)
            cells[n_ranks, rate] = (
                Cell(f"latency-{n_ranks}-{rate}", "allreduce", tiny),
                Cell(f"train-{n_ranks}-{rate}", "train", train),
            )
    records = measuring.run([cell for pair in cells.values() for cell in pair])
    compared: list[Record] = []
    for latency, train_cell in cells.values():
        if latency.key in records and train_cell.key in records:
            compared += _compare(records[latency.key], records[train_cell.key], workload, args.cores)
    if not compared:
        raise GradwireError(f"nothing could be measured; the logs are in {out / 'logs'}")
    write_json(args.json or out / "comparison.json", compared)
    console.print(make_table(compared))
    for line in summarise(compared):
        say(line)
    if args.plot:
        plot(compared, args.plot)
    return 1 if measuring.failed else 0


def _is_there(spec: str) -> bool:
    name = parse_spec(spec)[0]
    return name == "ddp" or name in schemes.names()


class Measuring:
    """Runs cells as processes; what is in the folder's log with the same arguments is not measured again."""

    def __init__(
        self,
        out: Path,
        say: Callable[[str], None],
        fresh: bool = False,
        call: Callable[[Sequence[str], Path], int] | None = None,
    ) -> None:
        self._out, self._say, self._fresh = out, say, fresh
        self._log = RecordLog(out / "cells.jsonl")
        self._call = call or _call_process
        self.failed: list[str] = []

    def run(self, cells: Sequence[Cell]) -> dict[str, list[Record]]:
        """The records of each cell by key; those that failed are not among them. Raises: GradwireError."""
        finished: dict[str, list[Record]] = {}
        if not self._fresh:
            for entry in self._log.read():
                finished[f"{entry['key']} {entry['arguments']}"] = entry["records"]
        found: dict[str, list[Record]] = {}
        started_s, n_done = time.monotonic(), 0
        left = [cell for cell in cells if _name_of(cell) not in finished]
        if len(left) < len(cells):
            self._say(f"{len(cells) - len(left)} of {len(cells)} cells are finished in {self._out}")
        for cell in cells:
            if cell not in left:
                found[cell.key] = finished[_name_of(cell)]
                continue
            elapsed_s = time.monotonic() - started_s
            rest = f", about {elapsed_s / n_done * (len(left) - n_done):.0f} s left" if n_done > 1 else ""
            self._say(f"[{n_done + 1}/{len(left)}] {cell.key}{rest}")
            records = self._measure(cell)
            n_done += 1
            if records is None:
                self.failed.append(cell.key)
                self._say(f"  failed: see {self._out / 'logs' / (cell.key + '.txt')}")
                continue
            self._log.append([{"key": cell.key, "arguments": list(cell.arguments), "records": records}])
            found[cell.key] = records
        return found

    def _measure(self, cell: Cell) -> list[Record] | None:
        results, log = self._out / "partial.json", self._out / "logs" / f"{cell.key}.txt"
        log.parent.mkdir(parents=True, exist_ok=True)
        results.unlink(missing_ok=True)
        command = [sys.executable, "-m", "gradwire", "bench", cell.bench, *cell.arguments, "--json", str(results)]
        if self._call(command, log) != 0 or not results.is_file():
            return None
        records: list[Record] = json.loads(results.read_text(encoding="utf-8"))
        return records


def _name_of(cell: Cell) -> str:
    return f"{cell.key} {list(cell.arguments)}"


def _call_process(command: Sequence[str], log: Path) -> int:
    with log.open("w", encoding="utf-8") as file:
        return subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode


# ---- the comparison


def _compare(tiny: Sequence[Record], records: Sequence[Record], workload: str, n_cores: int | None) -> list[Record]:
    from gradwire.bench.simulator_predictions import predict

    hops = {"plain": "backend", "gcomp": "frames"}
    latencies_s = {hops[one["scheme"]]: one["time_s"] / (2 * (one["ranks"] - 1)) for one in tiny}
    return predict(records, latencies_s, workload, n_cores)


def make_table(records: Sequence[Record]) -> Table:
    """The comparison, for people."""
    table = Table(title="predicted and measured iteration times", caption="ms; medians, quartiles in brackets")
    table.add_column("scheme")
    for heading in ("ranks", "Mb/s", "predicted", "measured", "error"):
        table.add_column(heading, justify="right")
    for record in records:
        table.add_row(
            record["scheme"] + (f":{record['options']}" if record["options"] else ""),
            str(record["ranks"]),
            f"{record['rate_bps'] / 1e6:g}",
            f"{record['predicted_s'] * 1e3:.0f}",
            f"{record['measured_s'] * 1e3:.0f} ({record['measured_s_low'] * 1e3:.0f}-{record['measured_s_high'] * 1e3:.0f})",
            f"{100 * record['error']:+.1f} %",
        )
    return table


def summarise(records: Sequence[Record]) -> list[str]:
    """Median absolute errors, in all and by scheme and world size."""
    lines = [_line("all", records)]
    lines += [_line(name, [one for one in records if one["scheme"] == name]) for name in _distinct(records, "scheme")]
    lines += [_line(f"{n} ranks", [one for one in records if one["ranks"] == n]) for n in _distinct(records, "ranks")]
    return lines


def _line(name: str, records: Sequence[Record]) -> str:
    errors = [abs(record["error"]) for record in records]
    median = statistics.median(errors)
    verdict = "reached" if median <= _GOAL else "not reached"
    return f"{name}: median error {100 * median:.1f} %, largest {100 * max(errors):.1f} % (goal 10 % in the median: {verdict})"


def _distinct(records: Sequence[Record], field: str) -> list[Any]:
    return list(dict.fromkeys(record[field] for record in records))


def plot(records: Sequence[Record], path: Path) -> None:
    """Predicted against measured, a colour a scheme and a marker a world size. Raises: GradwireError."""
    from gradwire.simulator.plots import colour_of, new_figure, save

    figure, (panel,) = new_figure(1, width_in=5.0, height_in=4.4)
    names = _distinct(records, "scheme")
    for name in names:
        for n_ranks, marker in zip(_distinct(records, "ranks"), "os^Dv", strict=False):
            chosen = [one for one in records if one["scheme"] == name and one["ranks"] == n_ranks]
            if chosen:
                xs, ys = [one["measured_s"] for one in chosen], [one["predicted_s"] for one in chosen]
                panel.plot(xs, ys, marker, color=colour_of(name, names), markersize=5, label=f"{name}, {n_ranks} ranks")
    limits = [min(one["measured_s"] for one in records) * 0.8, max(one["measured_s"] for one in records) * 1.2]
    panel.plot(limits, limits, color="#999999", linewidth=1, label="predicted = measured")
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("measured iteration, s")
    panel.set_ylabel("predicted iteration, s")
    panel.legend(fontsize=6, frameon=False, ncols=2)
    save(figure, path)


# ---- the table of sizes


def _measure_table(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    specs = args.scheme or [_TABLED_AS.get(name, name) for name in schemes.names() if name not in _NOT_TABLED]
    measuring = Measuring(args.out or Path("runs/simulator-table"), say, args.fresh)
    content = _read_table(args.table)
    for workload in args.workload or ["resnet50"]:
        name, options = parse_spec(workload)
        cells = [
            Cell(
                f"{name}-{n_ranks}-{'-'.join(parse_spec(spec)[0] for spec in args.scheme or ['all'])}",
                "train",
                (
                    *("--compute", "emulate", "--workload", workload, "--scheme", *specs, "--ranks", str(n_ranks)),
                    *("--steps", str(args.steps or 4), "--warmup", "2"),
                ),
            )
            for n_ranks in args.ranks or (2, 3, 4)
        ]
        found = measuring.run(cells)
        records = [record for cell in cells for record in found.get(cell.key, [])]
        entry = content["workloads"].setdefault(name, {"schemes": {}})
        for spec in specs:
            scheme = parse_spec(spec)[0]
            rows = {row["ranks"]: row for row in entry["schemes"].get(scheme, [])}
            rows |= {record["ranks"]: _row(record) for record in records if record["scheme"] == scheme}
            if rows:
                entry["schemes"][scheme] = [rows[n_ranks] for n_ranks in sorted(rows)]
        if records:
            entry["provenance"] = {
                "command": f"gradwire bench simulator --measure --workload {name}"
                + "".join(f" ({key}={Path(str(value)).name})" for key, value in options.items()),
                **{key: records[0].get(key) for key in ("gradients", "cpu", "n_cores", "torch")},
            }
    write_text(args.table, json.dumps(content, indent=1, allow_nan=False) + "\n")
    say(f"table: {args.table}")
    return 1 if measuring.failed else 0


def _row(record: Record) -> Record:
    decode_s = record["decode_s"] or 0.0
    return {
        "ranks": record["ranks"],
        "n_values": record["n_bytes"] // 4,
        "sent_bytes": record["wire_bytes"],
        "encode_s": max(0.0, (record["codec_s"] or 0.0) - decode_s),
        "decode_s": decode_s,
        "commit": record["commit"],
        "date": record["date"],
    }


def _read_table(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {"format": FORMAT, "workloads": {}}
    MeasuredTable.load(path)  # refuses what is none, before an hour is spent
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
