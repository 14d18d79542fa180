"""Writing results: flat records to JSON, CSV and JSONL; a full disk or a dead rank never costs what is measured."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.errors import GradwireError

Record = Mapping[str, Any]


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by a record, a list of them, or what holds some; the old file stays whole if that fails.

    What is not finite (the loss of a run that diverged) becomes null: JSON has no NaN. Raises: GradwireError.
    """
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise _write_error(path, error) from error


class RecordLog:
    """An append-only JSONL file: every record is on the disk (fsync) before the next measurement starts."""

    def __init__(self, path: Path) -> None:
        """Open `path` for appending, its folder made if need be. Raises: GradwireError."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:  # the check that it can be written comes before hours of measuring
                _end_torn_line(path, file)
        except OSError as error:
            raise _write_error(path, error) from error

    def append(self, records: Iterable[Record]) -> None:
        """Add `records` and force them to the disk. Raises: GradwireError; what was written before stays."""
        lines = "".join(json.dumps(finite(record), allow_nan=False) + "\n" for record in records)
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _write_error(self.path, error) from error

    def read(self) -> list[dict[str, Any]]:
        """Every whole record of the file; a last line torn by a crash or a full disk is not one."""
        records = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if isinstance(record, dict):
                records.append(record)
        return records


def _end_torn_line(path: Path, file: io.BufferedWriter) -> None:
    if path.stat().st_size:
        with path.open("rb") as existing:
            existing.seek(-1, os.SEEK_END)
            if existing.read(1) != b"\n":
                file.write(b"\n")


def finite(value: Any) -> Any:
    """A record, or what holds some, whose NaN and infinities are null."""
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write_error(path: Path, error: OSError) -> GradwireError:
    return GradwireError(
        f"could not write {path}: {error.strerror or error}; what was written before is kept. "
        "Free some space or name another file, then run again"
    )
