"""Flat records in files: JSON, CSV, JSONL, which no full disk or dead rank costs; by experiment `results/MACHINE/KEY.jsonl`."""

import contextlib
import csv
import io
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from gradwire.errors import CorruptMessage, GradwireError, InvalidArgument
from gradwire_lab.results.experiment import Cell, Experiment

Record = dict[str, Any]


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by a record, a list of them, or what holds some; the old file stays whole if that fails. What is
    not finite (the loss of a run that diverged) becomes null: JSON has no NaN. Raises: GradwireError."""
    write_text(path, json.dumps(finite(value), indent=1, allow_nan=False, default=str) + "\n")


def write_csv(path: Path, records: Sequence[Record]) -> None:
    """Replace `path` by a table of `records`, the columns in order of first appearance. Raises: GradwireError."""
    columns = list(dict.fromkeys(key for record in records for key in record))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="")
    writer.writeheader()
    writer.writerows(records)
    write_text(path, text.getvalue())


def write_text(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content`; the old file stays whole if that fails. Raises: GradwireError."""
    partial = path.with_name(f"{path.name}.partial")
    with _writing(path, partial):
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)


@contextlib.contextmanager
def _writing(path: Path, partial: Path | None = None) -> Iterator[None]:
    """What fails in it is a GradwireError that says what to do; it leaves no `partial` file."""
    try:
        yield
    except OSError as error:
        with contextlib.suppress(OSError):
            if partial:
                partial.unlink()
        raise GradwireError(
            f"could not write {path}: {error.strerror or error}; what was written before is kept. "
            "Free some space or name another file, then run again"
        ) from error


class RecordLog:
    """An append-only JSONL file: every record is on the disk (fsync) before the next measurement starts."""

    def __init__(self, path: Path) -> None:
        """Raises: GradwireError: that it can be written is checked before hours of measuring."""
        self.path = path
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab+") as file:
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":  # the last line is torn
                        file.write(b"\n")

    def append(self, records: Iterable[Record]) -> None:
        """Add `records` and force them to the disk. Raises: GradwireError; what was written before stays."""
        lines = "".join(map(_line, records))
        with _writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[Record]:
        """Every whole record of the file; a last line torn by a crash or a full disk is not one."""
        return read_lines(self.path, is_log=True)


def _line(record: Record) -> str:
    return json.dumps(finite(record), allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """A record, or what holds some, whose NaN and infinities are null."""
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- measured records by machine and experiment

# Of a run: its sources and settings are as they were, are others now, or it was never measured.
State = Literal["current", "stale", "never"]


class Store:
    """The results of one machine.

    A record belongs to a cell by the values of its experiment's axes. New records of a cell replace all old ones of it;
    a file is replaced as a whole, so that whatever ends the process leaves either the old or the new one.
    """

    def __init__(self, folder: Path, machine: str) -> None:
        self.folder, self.machine = folder, machine

    def path(self, key: str) -> Path:
        return self.folder / self.machine / f"{key}.jsonl"

    def read(self, key: str) -> list[Record]:
        """An experiment's records, [] without any. Raises: CorruptMessage (file and line)."""
        return read_lines(self.path(key))

    def replace(self, experiment: Experiment, cells: Sequence[Cell], records: Iterable[Record]) -> None:
        """Put `records` in the place of all that is known of `cells`. Raises: InvalidArgument (not flat), GradwireError."""
        gone = {name_of(experiment, cell) for cell in cells}
        kept = [record for record in self.read(experiment.key) if name_of(experiment, record) not in gone]
        order = {name_of(experiment, cell): number for number, cell in enumerate(experiment.cells())}
        everything = sorted([*kept, *records], key=lambda record: order.get(name_of(experiment, record), len(order)))
        for record in everything:
            if nested := [key for key, value in record.items() if isinstance(value, dict | list | tuple)]:
                raise InvalidArgument(f"a result is a flat record, but {', '.join(nested)} holds others")
        write_text(self.path(experiment.key), "".join(map(_line, everything)))


def state_of(experiment: Experiment, cells: Sequence[Cell], records: Iterable[Record], code: str) -> State:
    """Whether `records` hold all cells of a run, all from one run, with these settings and this digest of its sources."""
    wanted = {name_of(experiment, cell) for cell in cells}
    found = {name: record for record in records if (name := name_of(experiment, record)) in wanted}
    if len(found) < len(wanted):
        return "never"
    runs = {(record.get("settings"), record.get("code"), record.get("run")) for record in found.values()}
    return "current" if len(runs) == 1 and next(iter(runs))[:2] == (experiment.settings(cells), code) else "stale"


def states_of(experiment: Experiment, stores: Iterable[Store], code: str) -> list[State]:
    """Of each of an experiment's runs, in the store that knows most of it: a page shows runs of several machines."""
    known = [store.read(experiment.key) for store in stores]
    order: list[State] = ["current", "stale", "never"]
    found = ({state_of(experiment, cells, records, code) for records in known} for cells in experiment.groups())
    return [min(states, key=order.index, default="never") for states in found]


def name_of(experiment: Experiment, record: Mapping[str, Any]) -> str:
    """The cell that a record is of; the same for a cell itself."""
    return json.dumps([str(record.get(axis)) for axis in experiment.axes])


def machine_name(cpu: str, n_cores: int) -> str:
    """`amd-epyc-2-cores`: the folder of a machine's results."""
    words = re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)|@.*|cpu|processor", "", cpu.lower())).strip("-")
    return f"{words or 'unknown'}-{n_cores}-core{'s' if n_cores != 1 else ''}"


def machines(folder: Path) -> list[str]:
    """The machines that have results, in order of name."""
    return sorted(path.name for path in folder.iterdir() if any(path.glob("*.jsonl"))) if folder.is_dir() else []


def find_root(start: Path) -> Path:
    """The checkout around `start`: the nearest folder that has both `docs` and `results`. Raises: InvalidArgument."""
    for folder in (start, *start.parents):
        if (folder / "docs").is_dir() and (folder / "results").is_dir():
            return folder
    raise InvalidArgument(f"{start} lies in no checkout of gradwire (a folder with docs and results): pass --root")


def read_lines(path: Path, is_log: bool = False) -> list[Record]:
    """A JSONL file's records, [] if there is no file. Raises: CorruptMessage (a line that is none, but in a log)."""
    records = []
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            why = f" but {type(record).__name__}"
        except json.JSONDecodeError as error:
            record, why = None, f" ({error.msg})"
        if isinstance(record, dict):
            records.append(record)
        elif not is_log:
            raise CorruptMessage(f"{path}:{number}: not a record{why}")
    return records
