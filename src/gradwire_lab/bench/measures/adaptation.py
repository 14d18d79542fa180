"""How AQGB's bits follow a network that changes in mid-run (its Fig. 9), from the step records of a live training."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

from gradwire_lab.bench.measures import Call
from gradwire_lab.bench.measures.commands import run_process, to_words
from gradwire_lab.results.experiment import Cell
from gradwire_lab.results.store import Record, read_lines

_KEPT = ("step", "elapsed_s", "iteration_s", "bits_per_value", "first_bits_per_value", "loss")


def measure(call: Call) -> list[tuple[Cell, Record]]:
    """`gradwire train` inside `gradwire netlab run --at ...`: a record for each `window_s` seconds of training.

    Arguments: ranks, rate, at ({second: rate of all links}), scheme, workload, steps, bucket_mb, window_s.
    """
    (cell,) = call.cells
    out = (call.folder / "adaptation" / str(cell["scheme"]).replace(":", "-")).resolve()
    ranks = int(call.get("ranks"))
    events = [f"{second}:rate:{rank}={rate}" for second, rate in call.get("at").items() for rank in range(ranks)]
    lab = [*to_words({"ranks": ranks, "rate": call.get("rate")}), *(word for one in events for word in ("--at", one))]
    train = {name: call.get(name) for name in ("workload", "steps", "bucket_mb")} | {
        "scheme": cell["scheme"],
        "out": out,
    }
    gradwire = [sys.executable, "-m", "gradwire"]
    command = [*gradwire, "netlab", "run", *lab, "--", *gradwire, "train", *to_words(train)]
    run_process(command, call.folder / "logs" / f"{call.key}.txt")
    return [(cell, record) for record in in_windows(read_steps(out), float(call.get("window_s", 4.0)))]


def read_steps(folder: Path) -> list[Record]:
    """The steps in which bits were counted, with `q_ratio`, the paper's Q: bits sent / 32."""
    steps = [step for step in read_lines(folder / "steps.jsonl") if "bits_per_value" in step]
    return [
        {name: step[name] for name in _KEPT}
        | {"q_ratio": step["bits_per_value"] / 32, "acknowledged_bps": step.get("acknowledged_bps", 0.0)}
        for step in steps
    ]


def in_windows(records: list[Record], window_s: float) -> list[Record]:
    """Means over windows of time, `from_s` on."""
    windows: dict[int, list[Record]] = {}
    for record in records:
        windows.setdefault(int(record["elapsed_s"] / window_s), []).append(record)
    return [
        {
            "from_s": index * window_s,
            "to_s": (index + 1) * window_s,
            "n_steps": len(inside),
            **{key: fmean(record[key] for record in inside) for key in inside[0] if key not in ("step", "elapsed_s")},
        }
        for index, inside in sorted(windows.items())
    ]
