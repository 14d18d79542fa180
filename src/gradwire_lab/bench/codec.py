"""gradwire bench codec: ratio and speed of every codec and its baselines on real gradients."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradwire.errors import InvalidArgument, Unsupported
from gradwire.telemetry.environment import describe_environment
from gradwire_lab.bench import codec_methods
from gradwire_lab.bench.codec_methods import TimedMethod
from gradwire_lab.bench.launching import write_results
from gradwire_lab.bench.level_rule import entropy_bits, exponent_histogram
from gradwire_lab.bench.measures.gradient_files import gradient_file
from gradwire_lab.bench.timing import Task, Timing, threads, time_interleaved
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
    for name in names:
        if name in running:
            encode, decode = timings[f"{name} encode"], timings[f"{name} decode"]
            record = _record(running[name], encode, decode)
            record["exponent_entropy_bits"] = entropy
            share = running[name].n_bytes / file.gradient.nbytes  # bytes a second, not values
            record["encode_vs_zstd"] = share * timings[f"{REFERENCE} encode"].median_s / encode.median_s
            record["decode_vs_zstd"] = share * timings[f"{REFERENCE} decode"].median_s / decode.median_s
            records.append(record)
    return records


def _start(file: GradientFile, names: Sequence[str] | dict[str, None], n_threads: int) -> dict[str, TimedMethod]:
    running: dict[str, TimedMethod] = {}
    for name in names:
        try:
            method = codec_methods.by_spec(name, file, n_threads)
        except Unsupported as error:
            if name == REFERENCE:
                raise
            print(f"left out: {error}", file=sys.stderr)
            continue
        if method is not None:
            running[name] = method
    return running


def _record(method: TimedMethod, encode: Timing, decode: Timing) -> dict[str, Any]:
    n_bytes = method.n_bytes
    record: dict[str, Any] = {
        "codec": method.spec,
        "gradients": method.file.name,
        "threads": method.n_threads,
        "setting": method.setting,
        "importance": method.importance,
        "n_elements": method.file.gradient.size,
        "n_bytes": n_bytes,
        "encoded_bytes": method.encoded_bytes,
        "ratio": method.encoded_bytes / n_bytes,
        "exponent_bits": method.exponent_bits(),
        "bound_bytes": method.bound_bytes(),
        "verified": method.guarantee,
        "n_samples": encode.n_samples,
    }
    for way, timing in (("encode", encode), ("decode", decode)):
        record[f"{way}_gb_per_s"] = n_bytes / timing.median_s / 1e9
        record[f"{way}_gb_per_s_low"] = n_bytes / timing.high_s / 1e9  # quartiles: the slow end of the times
        record[f"{way}_gb_per_s_high"] = n_bytes / timing.low_s / 1e9
    return record


def make_grid(file: GradientFile, n_threads: int, records: Sequence[dict[str, Any]]) -> Grid:
    """The records of one file and thread count, for people."""
    entropy = entropy_bits(exponent_histogram(file.gradient))
    columns = [Column("ratio", form=".4f")]
    for way in ("encode", "decode"):
        columns += [
            Column(f"{way}_gb_per_s", f"{way} GB/s", form=".2f", spread=True),
            Column(f"{way}_vs_zstd", "x", form=".1f"),
        ]
    columns += [Column("over_bound", "over bound, %", 100, "+.2f"), Column("exponent_bits", form=".3f")]
    columns += [Column("setting"), Column("verified")]
    shown = []
    for record in sorted(records, key=lambda record: record["ratio"]):
        bound = record["bound_bytes"]
        shown.append({**record, "over_bound": record["encoded_bytes"] / bound - 1 if bound else None})
    size = f"{file.gradient.size:,} values, {n_threads} thread{'s' if n_threads > 1 else ''}"
    title = f"{file.name}: {size}; exponent entropy {entropy:.3f} bits"
    caption = (
        "GB/s of the gradient, medians (quartiles); x: of zstd -1 in the same run; every round trip verified. Over "
    )
    caption += "bound: the message against its exponents' entropy and the bits chosen for the other parts"
    return tabulate(shown, Table(columns, rows=("codec",), title=title), caption)
