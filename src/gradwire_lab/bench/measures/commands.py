"""Measures that are commands of `gradwire bench`, in processes of their own: train, allreduce, codec, regret."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gradwire.errors import GradwireError
from gradwire.registry import spec_of
from gradwire_lab.bench.measures import Call
from gradwire_lab.bench.measures.gradient_files import gradient_file
from gradwire_lab.ranks.supervisor import run_to_end
from gradwire_lab.results.experiment import Cell
from gradwire_lab.results.store import Record

# What is shown of the output of a command that failed; all of it is in its log.
_SHOWN_LINES = 12


def train(call: Call) -> list[tuple[Cell, Record]]:
    """`bench train` with the cells' schemes in turns; with `then` a record for each phase."""
    records = run_command("train", call.arguments("scheme"), call)
    in_order = dict.fromkeys(
        map(spec_of, records)
    )  # as the schemes were given, though they may spell options otherwise
    by_spec = dict(zip(in_order, call.values("scheme"), strict=True))
    cells = {cell["scheme"]: cell for cell in call.cells}
    return [(cells[by_spec[spec_of(record)]], record) for record in records]


def allreduce(call: Call) -> list[tuple[Cell, Record]]:
    """`bench allreduce` over the cells' schemes, and sizes if these are together too."""
    axes = [axis for axis in ("n_bytes", "scheme") if axis in call.cells[0] and axis not in call.shared]
    arguments = call.arguments(*axes)
    if "gradients" in arguments:
        arguments["gradients"] = str(gradient_file(str(arguments["gradients"]), call.folder))
    records = run_command("allreduce", arguments, call)
    sizes = call.values("n_bytes") if "n_bytes" in axes else [call.get("n_bytes")]
    places = [(size, scheme) for size in sizes for scheme in call.values("scheme")]
    cells = {(cell.get("n_bytes", sizes[0]), cell["scheme"]): cell for cell in call.cells}
    return [(cells[place], record) for place, record in zip(places, records, strict=True)]


def codec(call: Call) -> list[tuple[Cell, Record]]:
    """`bench codec` of one gradient; a baseline whose package is missing has no record."""
    arguments = call.arguments("codec")
    arguments["gradients"] = str(gradient_file(str(call.get("gradients")), call.folder))
    records = {record["codec"]: record for record in run_command("codec", arguments, call)}
    return [(cell, records[cell["codec"]]) for cell in call.cells if cell["codec"] in records]


def regret(call: Call) -> list[tuple[Cell, Record]]:
    """`bench regret` of the cells' schemes in turns; with `then` a record for each phase."""
    cells = {cell["scheme"]: cell for cell in call.cells}
    return [(cells[spec_of(record)], record) for record in run_command("regret", call.arguments("scheme"), call)]


def to_words(arguments: Mapping[str, Any]) -> list[str]:
    """A command line: {"n_bytes": [4, 8], "quick": True} as --n-bytes 4 8 --quick."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words += map(str, value) if isinstance(value, list | tuple) else [str(value)]
    return words


def run_command(bench: str, arguments: Mapping[str, Any], call: Call) -> list[Record]:
    """The records of `gradwire bench BENCH`; its output is in the log. Raises: GradwireError, with the output's end."""
    log = call.folder / "logs" / f"{call.key}-{bench}.txt"
    with tempfile.TemporaryDirectory(prefix="gradwire-bench-") as folder:
        out = Path(folder) / "records.json"
        command = [sys.executable, "-m", "gradwire", "bench", bench, *to_words(arguments), "--json", str(out)]
        run_process(command, log)
        records: list[Record] = json.loads(out.read_text(encoding="utf-8"))
    return records


def run_process(command: list[str], log: Path) -> None:
    """Run a command with its output in `log`. Raises: GradwireError if it fails, or the log cannot be written."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            status = run_to_end(command, output)
    except OSError as error:
        raise GradwireError(f"could not write {log} or start {command[0]}: {error.strerror or error}") from error
    if status:
        end = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]
        raise GradwireError("\n    | ".join([f"{' '.join(command[1:6])} ... ended with status {status}; {log}:", *end]))
