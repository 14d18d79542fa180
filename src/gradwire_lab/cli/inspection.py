"""Say what a file or folder of gradwire's holds: a message, a table, a run, benchmark results, a checkpoint, gradients."""

import argparse
import importlib
import json
import os
import pickle
import struct
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradwire.errors import CorruptMessage, InvalidArgument
from gradwire_lab.cli.options import add_json
from gradwire_lab.results.records import write_json
from gradwire_lab.results.tables import Grid, print_grid

# The first four bytes of a message: its kind, and the module that describes it.
_MESSAGES = {
    b"GWEF": ("embedded-float", "embedded_float"),
    b"GWGC": ("GComp", "gcomp"),
    b"GWGE": ("general", "general"),
    b"GWTF": ("truncated-float", "truncated_float"),
}
_MAX_LISTED = 20  # records or steps beyond this are counted, not shown
_MAX_DEPTH = 3
_FORMAT_ADVICE = (
    "expected a message or Huffman table (docs/format.md), a run folder or JSON file of gradwire train or bench, "
    "a checkpoint, or a gradient file (.npz)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="files or folders")
    add_json(parser, "write a list with one record per path")


def run(args: argparse.Namespace) -> int:
    records = []
    for path in args.paths:
        found = inspect_path(path)
        records.append({"path": str(path), **found})
        # Without a terminal's escape sequences: names come from files that anyone may have written.
        shown = {key: _show(value) for key, value in _rows(found) if key not in ("path", "kind")}
        rows = [[_printable(key), _printable(value)] for key, value in shown.items()]
        print_grid(Grid(_printable(f"{path}: {found['kind']}", 1000), ["", ""], rows))
    if args.json is not None:
        write_json(args.json, records)
    return 0


def inspect_path(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `path` holds, as plain values; `kind` says what it is. Messages are checked as far as their headers go,
    checkpoints are loaded with `weights_only=True`. Raises: InvalidArgument (nothing there, or nothing of gradwire's),
    CorruptMessage, IncompatibleVersion."""
    path = Path(path)
    try:
        if path.is_dir():
            return _inspect_folder(path)
        with path.open("rb") as file:
            head = file.read(4)
        if head in _MESSAGES:
            return _inspect_message(path, *_MESSAGES[head])
        return {b"GWHT": _inspect_table, b"PK\x03\x04": _inspect_zip}.get(head, _inspect_json)(path)
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}") from error


def _inspect_folder(folder: Path) -> dict[str, Any]:
    from gradwire_lab.training.checkpoints import find_newest

    if (folder / "config.json").is_file():
        return _inspect_run(folder)
    checkpoint = folder if (folder / "shared.pt").is_file() else find_newest(folder)
    if checkpoint is None:
        raise InvalidArgument(f"{folder} holds neither config.json (a run) nor shared.pt (a checkpoint)")
    files = sorted(path.name for path in checkpoint.glob("*.pt"))
    return {**_inspect_torch_file(checkpoint / "shared.pt"), "kind": "checkpoint of gradwire train", "files": files}


def _inspect_run(folder: Path) -> dict[str, Any]:
    summary = folder / "summary.json"
    source = summary if summary.is_file() else folder / "config.json"
    content = _read_json(source)
    if not isinstance(content, dict):
        raise CorruptMessage(f"{source} holds no JSON object")
    steps = folder / "steps.jsonl"
    n_steps = sum(1 for _ in steps.open("rb")) if steps.is_file() else 0
    kind = "run of gradwire train" if source is summary else "run of gradwire train, not finished (no summary.json)"
    return {"kind": kind, "steps_logged": n_steps, **content}


def _inspect_json(path: Path) -> dict[str, Any]:
    from gradwire_lab.report import BENCH_FIELDS

    content = _read_json(path)
    if isinstance(content, dict):
        return {"kind": "JSON object", **content}
    if not isinstance(content, list) or not all(isinstance(record, dict) for record in content):
        raise InvalidArgument(f"{path} is JSON, but no record or list of records; {_FORMAT_ADVICE}")
    kinds = Counter(
        next((f"bench {kind}" for kind, (known, _) in BENCH_FIELDS.items() if {*known} <= {*record}), "another kind")
        for record in content
    )
    names = dict.fromkeys(str(record.get("scheme") or record.get("codec")) for record in content)
    return {
        "kind": "records of " + ", ".join(f"{kind} ({n})" for kind, n in kinds.items()) if content else "empty list",
        "n_records": len(content),
        "names": list(names)[:_MAX_LISTED],
        "fields": list(dict.fromkeys(key for record in content for key in record)),
    }


def _inspect_message(path: Path, kind: str, codec: str) -> dict[str, Any]:
    import torch

    message = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    parts = importlib.import_module(f"gradwire.codecs.{codec}").describe(message)
    hexadecimal = {"table_id": f"{parts['table_id']:#018x}"} if "table_id" in parts else {}
    return {"kind": f"{kind} message", **parts, **hexadecimal}


def _inspect_table(path: Path) -> dict[str, Any]:
    from gradwire.codecs.huffman import HuffmanTable

    table = HuffmanTable.from_bytes(path.read_bytes())
    *lengths, escape = table.lengths
    return {
        "kind": "Huffman table", "table_id": f"{table.id:#018x}", "exponent_bits": table.exponent_bits,
        "n_coded_exponents": sum(length > 0 for length in lengths), "escape_code_bits": escape or None,
        "longest_code_bits": max(*lengths, escape),
    }  # fmt: skip


def _inspect_zip(path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except zipfile.BadZipFile as error:
        raise CorruptMessage(f"{path} begins like an archive, but is none: {error}") from error
    if any(name.endswith(".npy") for name in names):
        return _inspect_gradients(path)
    return _inspect_torch_file(path)


def _inspect_gradients(path: Path) -> dict[str, Any]:
    from gradwire_lab.workloads.gradients import load_gradients

    file = load_gradients(path)
    optimizer, hyper = (file.state.optimizer, file.state.hyper) if file.state else (f"none ({file.missing})", {})
    return {
        "kind": "gradient file", "n_elements": file.gradient.size,
        "share_of_zeros": float((file.gradient == 0).mean()) if file.gradient.size else 0.0,
        "optimizer": optimizer, **{f"optimizer_{key}": value for key, value in hyper.items()},
    }  # fmt: skip


def _inspect_torch_file(path: Path) -> dict[str, Any]:
    import torch

    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError, struct.error) as error:
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise CorruptMessage(f"{path} does not load with weights_only=True: {reason}") from error
    if not isinstance(content, dict):
        raise InvalidArgument(f"{path} is a torch file that holds a {type(content).__name__}; {_FORMAT_ADVICE}")
    is_state = {"scheme", "configuration", "world_size", "rank"} <= content.keys()
    kind = "gradwire state_dict" if is_state else "checkpoint file" if "identity" in content else "torch file"
    return {"kind": kind, **{key: _describe_nested(value) for key, value in content.items()}}


def _describe_nested(value: Any) -> Any:
    """Plain values as they are; tensors, and whatever holds tensors, by number and size."""
    tensors = _tensors_in(value)
    n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return f"{len(tensors)} tensors, {n_bytes:,} bytes" if tensors else value


def _tensors_in(value: Any) -> list[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for child in children for tensor in _tensors_in(child)]


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        if path.suffix in (".json", ".jsonl"):
            raise CorruptMessage(f"{path} is no JSON: {error}") from error
        raise InvalidArgument(f"{path} is nothing that gradwire writes; {_FORMAT_ADVICE}") from error


def _printable(text: str, most: int = 52) -> str:  # with the name beside it, 80 columns
    shown = "".join(one if one.isprintable() or one == "\n" else repr(one)[1:-1] for one in text)
    return shown if len(shown) <= most else f"{shown[: most - 12]}... (--json)"


def _rows(record: dict[str, Any], above: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """What a table shows of a record, a row each: a value that lies within another one is called "outer.inner"."""
    for key, value in record.items():
        if isinstance(value, dict) and value and depth < _MAX_DEPTH:
            yield from _rows(value, f"{above}{key}.", depth + 1)
        else:
            yield f"{above}{key}", value


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, list) and len(value) <= 2 * _MAX_LISTED and not any(isinstance(v, dict | list) for v in value):
        return ", ".join(map(str, value))
    if isinstance(value, list | dict):
        return f"{len(value)} entries (in full with --json)" if value else "none"
    return str(value)
