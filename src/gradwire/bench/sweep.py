"""gradwire bench sweep: every row of the sweep's table, one after another; what is finished is not measured again."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gradwire.bench.sweep_table import OUT, Row, choose_rows
from gradwire.errors import GradwireError, InvalidArgument
from gradwire.results.console import make_console
from gradwire.results.records import RecordLog, write_csv, write_json

# What is shown of the output of a row that failed; all of it is in its log.
_SHOWN_LINES = 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gradwire bench sweep`."""
    parser.add_argument("--quick", action="store_true", help="the small set, under half an hour on two cores")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the results (runs/sweep-quick, runs/sweep)")
    parser.add_argument("--only", nargs="+", default=[], metavar="KEY", help="rows whose keys begin with one of these")
    parser.add_argument("--fresh", action="store_true", help="measure again what is finished")
    parser.add_argument("--list", action="store_true", help="print the rows and stop")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all records here too")


def run(args: argparse.Namespace) -> int:
    """Run what is not finished; status 1 if a row failed."""
    rows = choose_rows(args.quick, tuple(args.only))
    if not rows:
        raise InvalidArgument(f"no row's key begins with {' or '.join(args.only)}; --list shows the keys")
    console = make_console()
    if args.list:
        for row in rows:
            print(f"{row.key:28} {row.estimate_s:5.0f} s  gradwire bench {row.bench} {' '.join(row.arguments)}")
        return 0
    out: Path = args.out or Path("runs/sweep-quick" if args.quick else "runs/sweep")
    sweep = Sweep(out.resolve(), lambda text: console.print(text, highlight=False, markup=False), args.json)
    return sweep.run(rows, fresh=args.fresh)


class Sweep:
    """One results folder: results.jsonl grows a row at a time, results.json and results.csv are made from it.

    Args:
        out: the folder; made if need be.
        say: where progress goes.
        call: runs one row's command and returns its exit status; the default starts a process.
    """

    def __init__(
        self,
        out: Path,
        say: Callable[[str], None],
        json_path: Path | None = None,
        call: Callable[[Sequence[str], Path], int] | None = None,
    ) -> None:
        self.out, self._say, self._json_path = out, say, json_path
        self._call = call or call_process
        self._log = RecordLog(out / "results.jsonl")

    def run(self, rows: Sequence[Row], fresh: bool = False) -> int:
        """Measure the rows that are not finished. Raises: GradwireError (results cannot be written)."""
        finished = set() if fresh else self.finished_keys(rows)
        left = [row for row in rows if row.key not in finished]
        if finished:
            self._say(f"{len(finished)} of {len(rows)} rows are finished in {self.out} and are not measured again")
        pace, failed = _Pace(), []
        if left:
            self._say(
                f"{len(left)} rows, about {_format_duration(pace.estimate_s(left))} on two cores with nothing else running; "
                "what is finished is kept when this is stopped, and the same command goes on from there"
            )
        for number, row in enumerate(left, start=1):
            remaining_s = pace.estimate_s(left[number - 1 :])
            self._say(
                f"[{number}/{len(left)}] {row.key}: about {row.estimate_s * pace.factor:.0f} s; "
                f"{_format_duration(remaining_s)} left in all"
            )
            if not self._measure(row, pace):
                failed.append(row.key)
        self._export()
        self._say(f"results: {self.out / 'results.json'}, {self.out / 'results.csv'}")
        if failed:
            again = "the same command measures only what is missing"
            self._say(f"{len(failed)} of {len(left)} rows failed: {', '.join(failed)}; {again}")
        return 1 if failed else 0

    def finished_keys(self, rows: Sequence[Row]) -> set[str]:
        """Rows whose last attempt ended well with the arguments that they have now."""
        last = {record["row"]: record for record in self._log.read() if "status" in record}
        return {
            row.key
            for row in rows
            if row.key in last and last[row.key]["status"] == "done" and last[row.key]["call"] == _call_of(row)
        }

    def records(self) -> list[dict[str, Any]]:
        """The records of every row's last attempt."""
        everything = self._log.read()
        last = {record["row"]: record["attempt"] for record in everything}
        return [
            {key: value for key, value in record.items() if key != "attempt"}
            for record in everything
            if "status" not in record and record["attempt"] == last[record["row"]]
        ]

    def _measure(self, row: Row, pace: _Pace) -> bool:
        results, log = self.out / "partial" / f"{row.key}.json", self.out / "logs" / f"{row.key}.txt"
        try:
            for path in (results, log):
                path.parent.mkdir(parents=True, exist_ok=True)
            results.unlink(missing_ok=True)
        except OSError as error:
            raise GradwireError(f"could not write in {self.out}: {error.strerror or error}") from error
        arguments = [argument.replace(OUT, str(self.out)) for argument in row.arguments]
        command = [sys.executable, "-m", "gradwire", "bench", row.bench, *arguments]
        if row.bench != "dump-gradients":
            command += ["--json", str(results)]
        started = time.monotonic()
        attempt = f"{row.key} {time.time():.3f}"
        status = self._call(command, log)
        elapsed_s = time.monotonic() - started
        records = json.loads(results.read_text(encoding="utf-8")) if results.is_file() else []
        self._log.append(
            [{"row": row.key, "attempt": attempt, "bench": row.bench, **record} for record in records]
            + [
                {
                    "row": row.key,
                    "attempt": attempt,
                    "status": "done" if status == 0 else "failed",
                    "exit_status": status,
                    "call": _call_of(row),
                    "elapsed_s": elapsed_s,
                }
            ]
        )
        self._export()
        if status == 0:
            pace.add(row, elapsed_s)
            self._say(f"    {len(records)} records in {elapsed_s:.0f} s")
        else:
            self._say(f"    failed with status {status} after {elapsed_s:.0f} s, {len(records)} records kept; {log}:")
            for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]:
                self._say(f"    | {line}")
        return status == 0

    def _export(self) -> None:
        records = self.records()
        write_json(self.out / "results.json", records)
        write_csv(self.out / "results.csv", records)
        if self._json_path:
            write_json(self._json_path, records)


class _Pace:
    """How this machine compares with the estimates of the table."""

    def __init__(self) -> None:
        self._estimated_s, self._elapsed_s = 0.0, 0.0

    def add(self, row: Row, elapsed_s: float) -> None:
        self._estimated_s += row.estimate_s
        self._elapsed_s += elapsed_s

    @property
    def factor(self) -> float:
        return self._elapsed_s / self._estimated_s if self._estimated_s else 1.0

    def estimate_s(self, rows: Sequence[Row]) -> float:
        return self.factor * sum(row.estimate_s for row in rows)


def call_process(command: Sequence[str], log: Path) -> int:
    """Run `command` with its output in `log`; returns its exit status. Raises: GradwireError (the log)."""
    try:
        with log.open("wb") as output:
            return subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    except OSError as error:
        raise GradwireError(f"could not write {log} or start the row: {error.strerror or error}") from error


def _call_of(row: Row) -> str:
    return " ".join((row.bench, *row.arguments))


def _format_duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
