"""JSON lines: a file that only ever holds whole records, whatever happens to the disk or the process."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.telemetry.recorder import BucketRecord, StepRecord

__all__ = ["JsonLines", "JsonlSink"]

_log = logging.getLogger("gradwire.telemetry")


class JsonLines:
    """Appends records to a file, one line each, each with one unbuffered write: a killed process loses no whole line.

    When the disk is full (or fails), the half-written line is cut off again, one error is logged, and later records are
    dropped: what was written stays readable, and the caller's work goes on.
    """

    def __init__(self, path: str | os.PathLike[str], append: bool = False) -> None:
        """Raises: OSError, if the file cannot be created at all."""
        self.path = Path(path)
        self.error: OSError | None = None  # None while all is well
        self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if append else os.O_TRUNC)
        self._file = os.open(self.path, flags, 0o644)
        self._good_bytes = os.fstat(self._file).st_size

    def append(self, record: Mapping[str, Any]) -> None:
        """Write `record` as one line. Infinities and NaN become null: JSON has none. Raises: TypeError (a value that is
        no plain value), ValueError (after `close`)."""
        if self._file < 0:
            raise ValueError(f"{self.path} is closed")
        if self.error is not None:
            return
        line = (_dumps(record) + "\n").encode()
        try:
            rest = memoryview(line)
            while rest:  # a nearly full disk takes part of a line without an error
                rest = rest[os.write(self._file, rest) :]
            self._good_bytes += len(line)
        except OSError as error:
            self.error = error
            kept = "the whole lines before it are kept"
            try:
                os.ftruncate(self._file, self._good_bytes)
            except OSError:
                kept = "its last line may be cut short"
            _log.error("cannot write to %s: %s; %s, nothing more is logged there", self.path, error.strerror, kept)

    def close(self) -> None:
        """Close the file; further calls do nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class JsonlSink(JsonLines):
    """One line a step (`StepRecord.as_dict`), preceded by one line a bucket with `buckets=True`.

    Lines of buckets have the key `bucket`, lines of steps do not. `error`: the reason why the log ends early.
    """

    def __init__(self, path: str | os.PathLike[str], buckets: bool = False, append: bool = False) -> None:
        super().__init__(path, append)
        self._buckets = buckets

    def write_step(self, step_record: StepRecord, bucket_records: Sequence[BucketRecord]) -> None:
        if self._buckets:
            for record in bucket_records:
                self.append(record.as_dict())
        self.append(step_record.as_dict())


def _dumps(record: Mapping[str, Any]) -> str:
    try:
        return json.dumps(record, allow_nan=False, separators=(",", ":"))
    except ValueError:  # rare, so the common line pays for no walk over its values
        finite = {
            key: None if isinstance(value, float) and not abs(value) < float("inf") else value
            for key, value in record.items()
        }
        return json.dumps(finite, allow_nan=False, separators=(",", ":"))
