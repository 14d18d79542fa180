"""gradwire bench allreduce: time and bytes of every scheme's all-reduce beside the backend's own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from gradwire.errors import InvalidArgument
from gradwire.registry import choose_specs, spec_of
from gradwire_lab.bench import reducers
from gradwire_lab.bench.launching import check_rank_arguments, is_rank, needs_switch, run_in_ranks
from gradwire_lab.bench.sources import GradientSource
from gradwire_lab.results.tables import Grid, print_grid
from gradwire_lab.workloads.gradients import load_gradients

QUICK_SIZES = (1 << 10, 1 << 16, 1 << 20, 25_000_000)
FULL_SIZES = tuple(1 << power for power in range(10, 25, 2)) + (25_000_000, 100_000_000, 400_000_000)
REFERENCE = "ddp"


def run(args: argparse.Namespace) -> int:
    """Measure as a rank, or start the ranks that do."""
    args.rounds = args.rounds or (5 if args.quick else 9)
    args.budget = args.budget or (2.0 if args.quick else 20.0)
    if args.rounds < 1 or min(args.n_bytes or [4]) < 4:
        raise InvalidArgument(
            f"--rounds {args.rounds} --n-bytes {args.n_bytes}: rounds count from 1, bytes from 4 (one float32)"
        )
    specs = choose_specs(args.scheme, reducers.names(), reducers.BY_NAME_ONLY)
    file = load_gradients(args.gradients) if args.gradients else None
    source = GradientSource(file, args.density, args.pattern)
    check_rank_arguments(args)
    if not is_rank():
        return run_in_ranks("allreduce", args, switch=needs_switch(specs))
    return _run_rank(args, source, specs)


def _run_rank(args: argparse.Namespace, source: GradientSource, specs: Sequence[str]) -> int:
    from gradwire_lab.bench.allreduce_rank import AllReduceBench

    sizes = args.n_bytes or (QUICK_SIZES if args.quick else FULL_SIZES)
    if source.file is not None and not args.n_bytes:
        sizes = (source.file.gradient.nbytes,)
    dist.init_process_group("gloo")
    try:
        bench = AllReduceBench(args, source, specs)
        for n_bytes in sizes:
            records = bench.run_size(n_bytes)
            if bench.rank == 0:
                print_grid(make_grid(records), args.wide)
        bench.close()
    finally:
        dist.destroy_process_group()
    return 0


def make_grid(records: Sequence[dict[str, Any]]) -> Grid:
    """The records of one size, for people."""
    first = records[0]
    network = f"{first['rate_bps'] / 1e6:g} Mb/s" if first["rate_bps"] else f"not shaped ({first['network']})"
    size = format_bytes(first["n_bytes"])
    reference = next((record["time_s"] for record in records if record["scheme"] == REFERENCE), None)
    rows = []
    for record in records:
        kernel = record["kernel_bytes"]
        rows.append(
            [
                spec_of(record),
                f"{record['time_s'] * 1e3:.2f}",
                f"({record['time_s_low'] * 1e3:.2f}-{record['time_s_high'] * 1e3:.2f})",
                "-" if reference is None else f"{record['time_s'] / reference:.2f}",
                f"{record['wire_ratio']:.3f}",
                f"{record['wire_bytes']:,.0f}",
                f"{record['algorithm_gb_per_s']:.3f}",
                f"{record['bus_gb_per_s']:.3f}",
                "-" if kernel is None else f"{kernel:,.0f}",
                f"{record['relative_error']:.1e}",
                record["verified"],
            ]
        )
    return Grid(
        f"all-reduce of {size} ({first['gradients']}), {first['ranks']} ranks, {network}",
        ["scheme", "time ms", "quartiles", "x ddp", "ratio", "wire bytes", "algbw GB/s", "busbw GB/s", "kernel bytes",
         "error", "verified"],
        rows,
        "time: median over samples of the slowest rank; bytes: sent per rank, mean",
    )  # fmt: skip


def format_bytes(n_bytes: int) -> str:
    """1 KiB as "1 KiB", 25 MB as "25 MB": in the unit that divides it, else in bytes."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10), ("MB", 10**6), ("kB", 10**3)):
        if n_bytes % size == 0:
            return f"{n_bytes // size} {unit}"
    return f"{n_bytes:,} bytes"
