"""gradwire bench codec: ratio and speed of every codec and its baselines on real gradients."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from gradwire.errors import InvalidArgument, Unsupported
from gradwire.telemetry.environment import describe_environment
from gradwire_lab.bench import codec_methods
from gradwire_lab.bench.codec_methods import TimedMethod
from gradwire_lab.bench.launching import write_results
from gradwire_lab.bench.level_rule import entropy_bits, exponent_histogram
from gradwire_lab.bench.measures.gradients import gradient_file
from gradwire_lab.bench.timing import Task, threads, time_interleaved
from gradwire_lab.results.experiment import Column, Table
from gradwire_lab.results.grids import tabulate
from gradwire_lab.results.tables import Grid, print_grid
from gradwire_lab.workloads.gradients import GradientFile, load_gradients

REFERENCE = "zstd"


def run(args: argparse.Namespace) -> int:
    """Measure, print a table a file and thread count, write the records."""
    threads = args.threads or sorted({1, len(os.sched_getaffinity(0))})
    if min(threads) < 1 or args.rounds < 1:
        raise InvalidArgument(f"--threads {args.threads} --rounds {args.rounds}: both count from 1")
    names = codec_methods.choose_specs(args.codec)
    # All of them, before anything is timed.
    files = [load_gradients(gradient_file(name, Path("runs/bench"))) for name in args.gradients]
    environment = describe_environment()
    records: list[dict[str, Any]] = []
    for file in files:
        for n_threads in threads:
            batch = measure(file, names, n_threads, args.rounds)
            records += [{**record, **environment} for record in batch]
            print_grid(make_grid(file, n_threads, batch), args.wide)
            # After every table: whoever stops the run keeps what was measured.
            write_results(args, records)
    return 0


def measure(file: GradientFile, names: Sequence[str], n_threads: int, n_rounds: int) -> list[dict[str, Any]]:
    """One flat record for each of `names` that can use `n_threads`, timed in turns; every sample's result is verified.

    The reference (zstd -1) runs along even if it is not among `names`: a ratio to it is only fair within one run.
    """
    with threads(n_threads):
        running = _start(file, dict.fromkeys([*names, REFERENCE]), n_threads)
        tasks: dict[str, Task] = {}
        for name, method in running.items():
            method.encode()
            tasks[f"{name} encode"] = Task(method.encode)
            tasks[f"{name} decode"] = Task(method.decode, method.poison, method.verify)
        timings = time_interleaved(tasks, n_rounds, what=f"{file.name}, samples")
    entropy = entropy_bits(exponent_histogram(file.gradient))
    records = []
    for name, method in ((name, running[name]) for name in names if name in running):
        n_bytes = method.n_bytes
        record: dict[str, Any] = {
            "codec": method.spec,
            "gradients": method.file.name,
            "threads": n_threads,
            "setting": method.setting,
            "importance": method.importance,
            "n_elements": method.file.gradient.size,
            "n_bytes": n_bytes,
            "encoded_bytes": method.encoded_bytes,
            "ratio": method.encoded_bytes / n_bytes,
            "exponent_bits": method.exponent_bits(),
            "exponent_entropy_bits": entropy,
            "bound_bytes": method.bound_bytes(),
            "verified": method.guarantee,
        }
        for way in ("encode", "decode"):
            timing, reference = timings[f"{name} {way}"], timings[f"{REFERENCE} {way}"]
            ends = ("", timing.median_s), ("_low", timing.high_s), ("_high", timing.low_s)  # the slow end of the times
            record |= {f"{way}_gb_per_s{end}": n_bytes / seconds / 1e9 for end, seconds in ends}
            # Bytes a second, not values.
            record[f"{way}_vs_zstd"] = n_bytes / file.gradient.nbytes * reference.median_s / timing.median_s
            record["n_samples"] = timing.n_samples
        records.append(record)
    return records


def _start(file: GradientFile, names: Iterable[str], n_threads: int) -> dict[str, TimedMethod]:
    running: dict[str, TimedMethod] = {}
    for name in names:
        try:
            if method := codec_methods.by_spec(name, file, n_threads):
                running[name] = method
        except Unsupported as error:
            if name == REFERENCE:
                raise
            print(f"left out: {error}", file=sys.stderr)
    return running


def make_grid(file: GradientFile, n_threads: int, records: Sequence[dict[str, Any]]) -> Grid:
    """The records of one file and thread count, for people."""
    entropy = entropy_bits(exponent_histogram(file.gradient))
    columns = [Column("ratio", form=".4f")]
    for way in ("encode", "decode"):
        speed = Column(f"{way}_gb_per_s", f"{way} GB/s", form=".2f", spread=True)
        columns += [speed, Column(f"{way}_vs_zstd", "x", form=".1f")]
    columns += [Column("over_bound", "over bound, %", 100, "+.2f"), Column("exponent_bits", form=".3f")]
    columns += [Column("setting"), Column("verified")]
    shown = [
        {**one, "over_bound": one["encoded_bytes"] / one["bound_bytes"] - 1 if one["bound_bytes"] else None}
        for one in sorted(records, key=lambda one: float(one["ratio"]))
    ]
    size = f"{file.gradient.size:,} values, {n_threads} thread{'s' if n_threads > 1 else ''}"
    title = f"{file.name}: {size}; exponent entropy {entropy:.3f} bits"
    caption = (
        "GB/s of the gradient, medians (quartiles); x: of zstd -1 in the same run; every round trip verified. Over "
    )
    caption += "bound: the message against its exponents' entropy and the bits chosen for the other parts"
    return tabulate(shown, Table(columns, rows=("codec",), title=title), caption)
