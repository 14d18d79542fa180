"""What a report is made of: run folders of `gradwire train` and JSON files of `gradwire bench`, read and checked."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.errors import CorruptMessage, InvalidArgument

Record = dict[str, Any]

_STEP_FIELDS = ("step", "loss", "iteration_s", "bytes_sent", "ratio", "encode_s", "decode_s", "exposed_s")

# kind: (fields that tell it from the others, of which these must be positive). Other fields may be null or missing.
_OF_CODEC = ("threads", "ratio", "encode_gb_per_s", "decode_gb_per_s")
BENCH_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "codec": (("codec", "gradients", *_OF_CODEC), _OF_CODEC),
    "allreduce": (("scheme", "ranks", "rate_bps", "n_bytes", "time_s"), ("ranks", "n_bytes", "time_s")),
    "train": (("scheme", "workload", "ranks", "rate_bps", "iteration_s"), ("ranks", "iteration_s")),
}
_ENVIRONMENT = ("cpu", "n_cores", "memory_bytes", "os", "python", "torch", "gradwire", "commit")
_UNITS = ("_s", "_bytes", "_bps", "_low", "_high", "_bits")


@dataclass
class LoggedRun:
    """One training run, as rank 0 logged it.

    Attributes:
        label: the scheme, with its options or the folder's name where another run of the workload has the same one.
        steps: sorted, each once; a loss that was not finite is None.
    """

    path: Path
    label: str
    steps: Sequence[Record]
    config: Mapping[str, Any]
    summary: Mapping[str, Any]

    @property
    def place(self) -> Record:
        """The configuration and the machine, flat."""
        nested = [one.get("environment") for one in (self.config, self.summary)]
        return {**self.config, **{k: v for one in nested if isinstance(one, dict) for k, v in one.items()}}


@dataclass(frozen=True)
class Inputs:
    """All that was found: runs, and bench records by kind (`codec`, `allreduce`, `train`)."""

    runs: Sequence[LoggedRun]
    records: Mapping[str, Sequence[Record]]

    def environments(self) -> list[Record]:
        """The distinct machines."""
        found = [{key: place[key] for key in _ENVIRONMENT if key in place} for place in self.places()]
        return list(
            {json.dumps(environment, default=str): environment for environment in found if environment}.values()
        )

    def places(self) -> list[Record]:
        """Where and when each run and record was measured."""
        records = [record for batch in self.records.values() for record in batch]
        nested = [record.get("environment") for record in records]
        return [run.place for run in self.runs] + [
            inner if isinstance(inner, dict) else record for inner, record in zip(nested, records, strict=True)
        ]


def load_inputs(paths: Sequence[str | os.PathLike[str]]) -> Inputs:
    """Read run folders, bench JSON files, and folders that hold either.

    Raises: InvalidArgument (nothing given, a path that is missing or holds nothing to report),
        CorruptMessage (a file that is not what its name promises).
    """
    if not paths:
        raise InvalidArgument("a report needs at least one run folder or bench JSON file")
    runs: list[LoggedRun] = []
    records: dict[str, list[Record]] = {kind: [] for kind in BENCH_FIELDS}
    for source in [source for path in dict.fromkeys(map(Path, paths)) for source in _sources(path)]:
        if source.is_dir():
            runs.append(_load_run(source))
        else:
            for number, record in enumerate(read_json(source)):
                records[_kind_of(record, f"{source}: record {number}")].append(record)
    for run in runs:
        what = (run.config.get("workload"), run.config.get("scheme"))
        same = [one for one in runs if (one.config.get("workload"), one.config.get("scheme")) == what]
        if len(same) > 1:
            are_apart = len({_words(one.config.get("scheme_options")) for one in same}) == len(same)
            run.label += " " + (_words(run.config.get("scheme_options")) if are_apart else f"({run.path.name})")
    for kind in ("allreduce", "train"):
        options = [_words(record.get("options") or record.get("scheme_options")) for record in records[kind]]
        variants = {(str(record["scheme"]), words) for record, words in zip(records[kind], options, strict=True)}
        for record, words in zip(records[kind], options, strict=True):
            scheme = str(record["scheme"])
            is_one = sum(name == scheme for name, _ in variants) == 1
            record["scheme"] = scheme if is_one else f"{scheme} {words}".strip()
    return Inputs(runs, records)


def _words(options: Any) -> str:
    return " ".join(f"{k}={v}" for k, v in options.items()) if isinstance(options, dict) else str(options or "")


def _sources(path: Path) -> list[Path]:
    """Run folders and JSON files at `path`: itself, or what it holds."""
    if not path.exists():
        raise InvalidArgument(f"{path} does not exist; give run folders of `gradwire train` or files of `--json`")
    if path.name == "demo.json" or (path / "demo.json").exists():
        raise InvalidArgument(
            f"{path} is of `gradwire demo`, whose page is the demo.svg beside its demo.json; a report takes run folders "
            "of `gradwire train --out` and files of `gradwire bench --json`"
        )
    if path.is_file() or _is_run(path):
        return [path]
    found = sorted(child for child in path.iterdir() if _is_run(child) or child.suffix in (".json", ".jsonl"))
    if not found:
        raise InvalidArgument(f"{path} holds nothing to report: no run of `gradwire train`, no file of `bench --json`")
    return found


def _is_run(path: Path) -> bool:
    return (path / "config.json").exists() or (path / "steps.jsonl").exists()


def _load_run(path: Path) -> LoggedRun:
    config, *more = read_json(path / "config.json")
    summary = read_json(path / "summary.json")[0] if (path / "summary.json").exists() else {}
    if more or not isinstance(config.get("scheme"), str):
        raise CorruptMessage(f"{path / 'config.json'}: is no configuration with a scheme")
    steps: dict[int, Record] = {}  # a resumed run repeats the steps after its checkpoint, the later ones count
    for number, record in enumerate(read_json(path / "steps.jsonl"), start=1):
        if "bucket" in record:
            continue
        for name in _STEP_FIELDS:
            if not (is_number(record.get(name)) or (name == "loss" and name in record and record[name] is None)):
                got = repr(record[name]) if name in record else "missing"
                raise CorruptMessage(f"{path / 'steps.jsonl'}: record {number}: {name} is {got}, expected a number")
        steps[int(record["step"])] = record
    if not steps:
        raise CorruptMessage(f"{path / 'steps.jsonl'}: holds no step; did the run end before its first one?")
    return LoggedRun(path, config["scheme"], [steps[step] for step in sorted(steps)], config, summary)


def _kind_of(record: Record, where: str) -> str:
    kind = next((kind for kind, (fields, _) in BENCH_FIELDS.items() if all(name in record for name in fields)), None)
    if kind is None:
        expected = "; ".join(f"{kind}: {' '.join(fields)}" for kind, (fields, _) in BENCH_FIELDS.items())
        raise CorruptMessage(f"{where}: its fields are of no kind that a report knows ({expected})")
    for name, value in record.items():
        is_needed = name in BENCH_FIELDS[kind][1]
        if is_needed and not (is_number(value) and value > 0):
            raise CorruptMessage(f"{where}: {name} is {value!r}, expected a positive number")
        if name.endswith(_UNITS) and not (value is None or is_number(value)):
            raise CorruptMessage(f"{where}: {name} is {value!r}, expected a number or null")
    return kind


def is_number(value: Any) -> bool:
    """Whether it is a number that a float holds."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def read_json(path: Path) -> list[Record]:
    """The objects of a JSON file: of a list, of a line each, or one alone. Raises: InvalidArgument, CorruptMessage."""
    try:
        text = path.read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if line.strip()] if path.suffix == ".jsonl" else [text]
        found = [json.loads(line) for line in lines]
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CorruptMessage(f"{path}: not JSON that gradwire writes ({error}); is it cut short?") from error
    records = [one for value in found for one in (value if isinstance(value, list) else [value])]
    if not all(isinstance(record, dict) for record in records):
        raise CorruptMessage(f"{path}: expected objects with fields, as `gradwire train` and `bench --json` write them")
    return records
