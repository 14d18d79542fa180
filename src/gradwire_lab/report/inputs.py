"""What a report is made of: run folders of `gradwire train` and JSON files of `gradwire bench`, checked field by field.

Nothing here draws. Every complaint names the file and, where there is one, the line.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire.errors import CorruptMessage, InvalidArgument

__all__ = ["BENCH_FIELDS", "Inputs", "LoggedRun", "load_inputs"]

Record = dict[str, Any]
Column = npt.NDArray[np.float64]

_STEP_FIELDS = (
    "step",
    "loss",
    "iteration_s",
    "bytes_sent",
    "bytes_received",
    "ratio",
    *(f"{kind}_s" for kind in ("encode", "decode", "communicate", "exposed")),
)

# kind: (fields that tell it from the others, of which these must be numbers). All other fields may be null or missing.
BENCH_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "codec": (
        ("codec", "gradients", "threads", "ratio", "encode_gb_per_s", "decode_gb_per_s"),
        ("threads", "ratio", "encode_gb_per_s", "decode_gb_per_s"),
    ),
    "allreduce": (("scheme", "ranks", "rate_bps", "n_bytes", "time_s"), ("ranks", "n_bytes", "time_s")),
    "train": (("scheme", "workload", "ranks", "rate_bps", "iteration_s"), ("ranks", "iteration_s")),
}
_DEMO = "demo.json"
_ENVIRONMENT_FIELDS = (
    "cpu",
    "n_cores",
    "memory_bytes",
    "os",
    "python",
    "torch",
    "gradwire",
    "commit",
    "network",
    "date",
)


@dataclass(frozen=True)
class LoggedRun:
    """One training run, as rank 0 logged it.

    Attributes:
        label: unique in the report: the scheme, with the folder's name where two runs share a scheme.
        columns: name -> (n_steps,) float64, sorted by step; a loss that was not finite is NaN.
    """

    path: Path
    label: str
    scheme: str
    workload: str
    ranks: int | None
    columns: Mapping[str, Column]
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    environment: Mapping[str, Any]


@dataclass(frozen=True)
class Inputs:
    """All that was found: runs, and bench records by kind (`codec`, `allreduce`, `train`)."""

    runs: Sequence[LoggedRun]
    records: Mapping[str, Sequence[Record]]
    environments: Sequence[Mapping[str, Any]]  # the distinct machines, dates left out


def load_inputs(paths: Sequence[str | os.PathLike[str]]) -> Inputs:
    """Read run folders, bench JSON files, and folders that hold either.

    Raises: InvalidArgument (nothing given, a path that is missing or holds nothing to report),
        CorruptMessage (a file that is not what its name promises; with file and line).
    """
    if not paths:
        raise InvalidArgument("a report needs at least one run folder or bench JSON file")
    runs: list[LoggedRun] = []
    records: dict[str, list[Record]] = {kind: [] for kind in BENCH_FIELDS}
    for path in dict.fromkeys(Path(path) for path in paths):
        for source in _sources(path):
            if source.is_dir():
                runs.append(_load_run(source))
            else:
                for kind, record in _load_bench(source):
                    records[kind].append(record)
    runs = _label_runs(runs)
    for kind in ("allreduce", "train"):
        records[kind] = _label_records(records[kind])
    environments: dict[str, Mapping[str, Any]] = {}
    every_record = [record for batch in records.values() for record in batch]
    for environment in [run.environment for run in runs] + [_environment(record) for record in every_record]:
        same = {key: value for key, value in environment.items() if key not in ("date", "network")}
        if same:
            environments.setdefault(json.dumps(same, sort_keys=True, default=str), same)
    return Inputs(runs, records, list(environments.values()))


def _label_runs(runs: Sequence[LoggedRun]) -> list[LoggedRun]:
    """Runs of one scheme are told apart by its options, if these differ, else by their folders."""
    groups: dict[tuple[str, str], list[tuple[str, LoggedRun]]] = defaultdict(list)
    for run in runs:
        options = run.config.get("scheme_options")
        text = " ".join(f"{key}={value}" for key, value in options.items()) if isinstance(options, dict) else ""
        groups[run.workload, run.scheme].append((f"{run.scheme} {text}".strip(), run))
    labels = {}
    for (_, scheme), group in groups.items():
        by_options = len({label for label, _ in group}) == len(group)
        for label, run in group:
            named = scheme if len(group) == 1 else label if by_options else f"{scheme} ({run.path.name})"
            labels[run.path] = named
    return [replace(run, label=labels[run.path]) for run in runs]


def _label_records(records: Sequence[Record]) -> list[Record]:
    """A scheme that was measured with several sets of options is called by its name and these."""
    options: dict[str, set[str]] = defaultdict(set)
    for record in records:
        options[str(record["scheme"])].add(_options(record))
    return [
        {**record, "scheme": f"{record['scheme']} {_options(record)}".strip()}
        if len(options[str(record["scheme"])]) > 1
        else record
        for record in records
    ]


def _options(record: Record) -> str:
    return str(record.get("options") or record.get("scheme_options") or "")


def _sources(path: Path) -> list[Path]:
    """Run folders and JSON files at `path`: itself, or what it holds."""
    if not path.exists():
        raise InvalidArgument(f"{path} does not exist; give run folders of `gradwire train` or files of `--json`")
    if path.name == _DEMO or (path / _DEMO).exists():
        raise InvalidArgument(
            f"{path} is of `gradwire demo`, whose page is the demo.svg beside its demo.json; a report takes run folders "
            "of `gradwire train --out` and files of `gradwire bench --json`"
        )
    if path.is_file() or _is_run(path):
        return [path]
    found = sorted(child for child in path.iterdir() if _is_run(child) or child.suffix in (".json", ".jsonl"))
    if not found:
        raise InvalidArgument(
            f"{path} holds nothing to report: no config.json and steps.jsonl of `gradwire train`, no folder with them, "
            "no JSON file of `gradwire bench --json`"
        )
    return found


def _is_run(path: Path) -> bool:
    return (path / "config.json").exists() or (path / "steps.jsonl").exists()


def _load_run(path: Path) -> LoggedRun:
    config = _load_object(path / "config.json")
    summary = _load_object(path / "summary.json") if (path / "summary.json").exists() else {}
    scheme = config.get("scheme")
    if not isinstance(scheme, str) or not scheme:
        raise CorruptMessage(f"{path / 'config.json'}:1: `scheme` is {scheme!r}, expected a scheme's name")
    ranks = config.get("ranks", config.get("world_size"))
    environment = {**_environment(config), **_environment(summary)}
    return LoggedRun(
        path=path,
        label=scheme,
        scheme=scheme,
        workload=str(config.get("workload") or "workload not recorded"),
        ranks=ranks if isinstance(ranks, int) else None,
        columns=_load_steps(path / "steps.jsonl"),
        config=config,
        summary=summary,
        environment=environment,
    )


def _load_steps(path: Path) -> dict[str, Column]:
    rows: dict[int, Record] = {}  # by step: a resumed run repeats the steps after its checkpoint, the later ones count
    for number, line in enumerate(_read(path).splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = _parse(line, where)
        except json.JSONDecodeError as error:
            raise CorruptMessage(
                f"{where}: not JSON ({error.msg} at column {error.colno}); is the file cut short?"
            ) from error
        if not isinstance(record, dict):
            raise CorruptMessage(f"{where}: expected an object with the fields of a step, got {type(record).__name__}")
        if "bucket" in record:
            continue
        for field in _STEP_FIELDS:
            if field not in record:
                raise CorruptMessage(f"{where}: the step has no field {field!r}; expected {', '.join(_STEP_FIELDS)}")
            if not (_is_number(record[field]) or (field == "loss" and record[field] is None)):
                raise CorruptMessage(f"{where}: {field} is {record[field]!r}, expected a number")
        rows[int(record["step"])] = record
    if not rows:
        raise CorruptMessage(f"{path}: holds no step; did the run end before its first one?")
    ordered = [rows[step] for step in sorted(rows)]
    names = [name for name in ordered[0] if all(_is_number(row.get(name)) or name == "loss" for row in ordered)]
    columns = {name: np.array([np.nan if row[name] is None else row[name] for row in ordered], float) for name in names}
    columns["loss"][~np.isfinite(columns["loss"])] = np.nan
    return columns


def _load_bench(path: Path) -> list[tuple[str, Record]]:
    text = _read(path)
    try:
        if text.lstrip().startswith("{") and path.suffix == ".jsonl":
            records = [_parse(line, str(path)) for line in text.splitlines() if line.strip()]
        else:
            records = _parse(text, str(path))
    except json.JSONDecodeError as error:
        raise CorruptMessage(f"{path}:{_error_line(text, path, error)}: not JSON ({error.msg})") from error
    if not isinstance(records, list):
        raise CorruptMessage(f"{path}:1: expected a list of flat records as `gradwire bench --json` writes it")
    result = []
    for index, record in enumerate(records):
        problem, kind = _judge(record)
        if problem:
            raise CorruptMessage(f"{path}:{_line_of_record(text, index)}: record {index}: {problem}")
        result.append((kind, record))
    return result


def _judge(record: Any) -> tuple[str, str]:
    """(what is wrong or "", the record's kind)."""
    if not isinstance(record, dict):
        return f"expected an object, got {type(record).__name__}", ""
    kinds = [kind for kind, (fields, _) in BENCH_FIELDS.items() if all(field in record for field in fields)]
    if not kinds:
        expected = "; ".join(f"{kind}: {' '.join(fields)}" for kind, (fields, _) in BENCH_FIELDS.items())
        return f"its fields are of no kind that a report knows ({expected})", ""
    kind = kinds[0]
    for field in BENCH_FIELDS[kind][1]:
        if not _is_number(record[field]) or record[field] <= 0:
            return f"{field} is {record[field]!r}, expected a positive number", kind
    for field, value in record.items():
        if field.endswith(("_s", "_bytes", "_bps", "_low", "_high", "_bits")) and not (
            value is None or _is_number(value)
        ):
            return f"{field} is {value!r}, expected a number or null", kind
    return "", kind


def _environment(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The environment in a config, summary or record: nested under `environment`, or flat."""
    nested = fields.get("environment")
    source = nested if isinstance(nested, dict) else fields
    return {key: source[key] for key in _ENVIRONMENT_FIELDS if key in source}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _parse(text: str, where: str) -> Any:
    """The value of JSON text. Raises: json.JSONDecodeError, CorruptMessage (for the rest that a parser does not take)."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except (RecursionError, ValueError) as error:
        raise CorruptMessage(f"{where}: JSON that nobody would write ({error})") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise CorruptMessage(f"{path}:{line}: not UTF-8 text") from error
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}") from error


def _load_object(path: Path) -> Record:
    text = _read(path)
    try:
        value = _parse(text, str(path))
    except json.JSONDecodeError as error:
        raise CorruptMessage(f"{path}:{error.lineno}: not JSON ({error.msg})") from error
    if not isinstance(value, dict):
        raise CorruptMessage(f"{path}:1: expected an object, got {type(value).__name__}")
    return value


def _error_line(text: str, path: Path, error: json.JSONDecodeError) -> int:
    if path.suffix == ".jsonl":  # the error's own line counts from the start of the offending line
        return text[: text.index(error.doc)].count("\n") + error.lineno
    return error.lineno


def _line_of_record(text: str, index: int) -> int:
    """The line on which record `index` of a valid JSON list (or of JSON lines) starts."""
    decoder = json.JSONDecoder()
    position = 0
    for _ in range(index + 1):
        while text[position] in "[, \t\r\n":
            position += 1
        start, (_, position) = position, decoder.raw_decode(text, position)
    return text.count("\n", 0, start) + 1
