"""Measures that are commands in processes of their own: `gradwire bench` train, allreduce, codec, regret; `gradwire train`."""

import functools
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from gradwire.errors import GradwireError
from gradwire.registry import parse_spec, spec_of
from gradwire_lab.bench.measures import Call, Measured
from gradwire_lab.bench.measures.gradients import gradient_file
from gradwire_lab.ranks.supervisor import run_to_end
from gradwire_lab.results.records import Record, read_lines

_GRADWIRE = [sys.executable, "-m", "gradwire"]
# What is shown of the output of a command that failed; all of it is in its log.
_SHOWN_LINES = 12
_QUANTISERS = ("one-bit", "two-bit")
# Of a step's record, what is kept of it.
_STEP_FIELDS = ("step", "elapsed_s", "iteration_s", "bits_per_value", "first_bits_per_value", "loss")


def train(call: Call, bench: str = "train") -> Measured:
    """`bench train`, or `regret`, with the cells' schemes in turns; with `then` a record for each phase."""
    records = run_command(bench, call.arguments("scheme"), call)
    # As the schemes were given, though records may spell options otherwise.
    cells = dict(zip(dict.fromkeys(map(spec_of, records)), call.cells, strict=True))
    return [(cells[spec_of(record)], record) for record in records]


regret = functools.partial(train, bench="regret")


def allreduce(call: Call) -> Measured:
    """`bench allreduce` over the cells' schemes, and sizes if these are together too."""
    axes = [axis for axis in ("n_bytes", "scheme") if axis in call.cells[0] and axis not in call.shared]
    cells = sorted(call.cells, key=lambda cell: [call.values(axis).index(cell[axis]) for axis in axes])
    return list(zip(cells, run_command("allreduce", _with_file(call, *axes), call), strict=True))


def codec(call: Call) -> Measured:
    """`bench codec` of one gradient; a baseline whose package is missing has no record."""
    records = {record["codec"]: record for record in run_command("codec", _with_file(call, "codec"), call)}
    return [(cell, records[cell["codec"]]) for cell in call.cells if cell["codec"] in records]


def _with_file(call: Call, *axes: str) -> dict[str, Any]:
    arguments = call.arguments(*axes)
    if "gradients" in arguments:
        arguments["gradients"] = str(gradient_file(str(arguments["gradients"]), call.folder))
    return arguments


def overlap(call: Call) -> Measured:
    """`bench train --overlap`, each record with what follows from its neighbours' (`add_bounds`)."""
    found = train(call)
    bounds = add_bounds({str(cell["scheme"]): record for cell, record in found})
    return [(cell, {**record, **bounds[str(cell["scheme"])]}) for cell, record in found]


def add_bounds(records: Mapping[str, Record]) -> dict[str, Record]:
    """{scheme spec: fields}, from the records of one run by scheme spec.

    computed_s, codec_busy_s, wire_s: C, K and X, a step's computation, codec work and transfer, each by itself. speed_up:
    over the bare quantiser; bound_share: of what overlap alone could give it, max(C + K, X) a step, by its own figures.
    overlap_x, exposed_codec_x: against the codec on the training thread.
    """
    found: dict[str, Record] = {}
    for spec, record in records.items():
        name, options = parse_spec(spec)
        codec = next((one for one in _QUANTISERS if name in (one, f"ddp-{one}") or options.get("codec") == one), "")
        bare, on_thread = records.get(codec), records.get(f"ddp-{codec}")
        codec_s = record["codec_s"] or 0.0
        # A codec that works between the gradients: its own figure for the computation holds some of it.
        alone = records.get("ddp", bare or record)
        compute_s = (alone if record is on_thread else record)["compute_s"]
        fields: dict[str, Any] = {"computed_s": compute_s, "codec_busy_s": codec_s, "wire_s": _wire_s(record, bare)}
        for name in ("overlap", "exposed_codec"):
            mine, theirs = record.get(f"{name}_s"), (on_thread or {}).get(f"{name}_s")
            fields[f"{name}_x"] = mine / theirs if mine is not None and theirs else None
        if bare is not None:
            longest_s = max(bare["compute_s"] + (bare["codec_s"] or 0.0), _wire_s(bare, bare))
            fields["speed_up"] = bare["iteration_s"] / record["iteration_s"]
            fields["bound_share"] = longest_s / record["iteration_s"]
        found[spec] = fields
    return found


def _wire_s(record: Mapping[str, Any], bare: Mapping[str, Any] | None) -> float:
    """The transfer alone: by the link's rate, or on an unshaped one by the bare quantiser's bytes and waiting."""
    if record["rate_bps"]:
        return 8.0 * float(record["wire_bytes"]) / float(record["rate_bps"])
    source = bare or record
    left_s = source["iteration_s"] - source["compute_s"] - (source["codec_s"] or 0.0)
    return max(0.0, float(left_s)) * float(record["wire_bytes"]) / max(1.0, float(source["wire_bytes"]))


def adaptation(call: Call) -> Measured:
    """AQGB's bits while links change `at` {second: rate} (its Fig. 9): a record for each `window_s` seconds."""
    (cell,) = call.cells
    out = (call.folder / "adaptation" / str(cell["scheme"]).replace(":", "-")).resolve()
    ranks = int(call.get("ranks"))
    lab = to_words({"ranks": ranks, "rate": call.get("rate")})
    for second, rate in call.get("at").items():
        lab += [word for rank in range(ranks) for word in ("--at", f"{second}:rate:{rank}={rate}")]
    train = {name: call.get(name) for name in ("workload", "steps", "bucket_mb")}
    words = to_words({**train, "scheme": cell["scheme"], "out": out})
    command = [*_GRADWIRE, "netlab", "run", *lab, "--", *_GRADWIRE, "train", *words]
    run_process(command, call.folder / "logs" / f"{call.key}.txt")
    return [(cell, record) for record in in_windows(read_steps(out), float(call.get("window_s", 4.0)))]


def read_steps(folder: Path) -> list[Record]:
    """The steps in which bits were counted, with `q_ratio`, the paper's Q: bits sent / 32."""
    return [
        {name: step[name] for name in _STEP_FIELDS}
        | {"q_ratio": step["bits_per_value"] / 32, "acknowledged_bps": step.get("acknowledged_bps", 0.0)}
        for step in read_lines(folder / "steps.jsonl")
        if "bits_per_value" in step
    ]


def in_windows(records: list[Record], window_s: float) -> list[Record]:
    """Means over windows of time, `from_s` on."""
    windows: dict[int, list[Record]] = {}
    for record in records:
        windows.setdefault(int(record["elapsed_s"] / window_s), []).append(record)
    return [
        {"from_s": index * window_s, "to_s": (index + 1) * window_s, "n_steps": len(inside)}
        | {key: fmean(record[key] for record in inside) for key in inside[0] if key not in ("step", "elapsed_s")}
        for index, inside in sorted(windows.items())
    ]


def to_words(arguments: Mapping[str, Any]) -> list[str]:
    """A command line: {"n_bytes": [4, 8], "quick": True} as --n-bytes 4 8 --quick."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is not None and value is not False:
            values = [] if value is True else value if isinstance(value, list | tuple) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return words


def run_command(bench: str, arguments: Mapping[str, Any], call: Call) -> list[Record]:
    """The records of `gradwire bench BENCH`; its output is in the log. Raises: GradwireError, with the output's end."""
    log = call.folder / "logs" / f"{call.key}-{bench}.txt"
    with tempfile.TemporaryDirectory(prefix="gradwire-bench-") as folder:
        out = Path(folder) / "records.json"
        run_process([*_GRADWIRE, "bench", bench, *to_words(arguments), "--json", str(out)], log)
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
