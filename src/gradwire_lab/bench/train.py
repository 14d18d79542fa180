"""gradwire bench train: iteration time, its parts, bytes and loss of a workload under every scheme and baseline."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from gradwire.errors import InvalidArgument
from gradwire.registry import choose_specs, parse_spec, spec_of
from gradwire_lab import workloads
from gradwire_lab.bench import train_methods
from gradwire_lab.bench.launching import (
    check_rank_arguments,
    count_links,
    is_rank,
    needs_switch,
    run_in_ranks,
)
from gradwire_lab.ranks.netlab import parse_rate
from gradwire_lab.results.tables import Grid, print_grid

REFERENCE = "ddp"


def run(args: argparse.Namespace) -> int:
    """Measure as a rank, or start the ranks that do."""
    if args.steps < 1 or args.warmup < 1:
        raise InvalidArgument(
            f"--steps {args.steps} --warmup {args.warmup}: both count from 1 (DDP rebuilds its buckets after the first step)"
        )
    workloads.check_name(parse_spec(args.workload)[0])
    specs = choose_specs(args.scheme, train_methods.names(), train_methods.more())
    for spec in specs:
        train_methods.check_baseline_options(*parse_spec(spec))
    check_rank_arguments(args)
    check_changes(args)
    if not is_rank():
        return run_in_ranks("train", args, switch=needs_switch(specs))
    return _run_rank(args, specs)


def check_changes(args: argparse.Namespace) -> None:
    """Raises: InvalidArgument (`--then` without links that can be changed, or with what is no rate)."""
    if not args.then:
        return
    n_links = count_links(args)
    if args.log is None and (is_rank() or not args.rate or "none" in args.rate):
        raise InvalidArgument("--then changes the links of the test network: give the rate to begin with, --rate RATE")
    for rates in args.then:
        each = [parse_rate(word) for word in rates.split(",")]
        if None in each or len(each) not in (1, n_links):
            raise InvalidArgument(
                f"--then {rates}: expected one rate such as 100mbit, or {n_links} with commas between"
            )


def _run_rank(args: argparse.Namespace, specs: Sequence[str]) -> int:
    import torch.distributed as dist

    from gradwire_lab.bench.train_rank import TrainBench

    options: dict[str, Any] = {"batch_size": args.batch_size, "optimizer": args.optimizer}
    name, own_options = parse_spec(args.workload)
    named = own_options | {key: value for key, value in options.items() if value is not None}
    dist.init_process_group("gloo")
    try:
        workload = workloads.by_name(name, compute=args.compute, **named)
        bench = TrainBench(args, workload, specs)
        records = bench.run()
        if bench.rank == 0:
            for phase in range(1 + len(args.then)):
                print_grid(make_grid([record for record in records if record["phase"] == phase]), args.wide)
    finally:
        dist.destroy_process_group()
    return 0


def make_grid(records: Sequence[dict[str, Any]]) -> Grid:
    """The records of one network, for people."""
    first = records[0]
    network = first["rates"] if first["rate_bps"] else f"not shaped ({first['network']})"
    if first["phase"]:
        network = f"then {network}"
    marks = [f"computation {first['compute']}"] if first["compute"] != "real" else []
    marks += ["methods one after another"] if not first["is_interleaved"] and len(records) > 1 else []
    reference = next((record["iteration_s"] for record in records if record["scheme"] == REFERENCE), None)
    rows = []
    for record in records:
        rows.append(
            [
                spec_of(record),
                f"{record['iteration_s'] * 1e3:.1f}",
                f"({record['iteration_s_low'] * 1e3:.0f}-{record['iteration_s_high'] * 1e3:.0f})",
                "-" if reference is None else f"{record['iteration_s'] / reference:.2f}",
                _ms(record["exposed_s"]),
                f"{record['wire_bytes'] / 1e6:.3f}",
                f"{record['loss']:.4f}",
                _ms(record["codec_s"]),
                _ms(record["compute_s"]),
                _ms(record["wait_s"]),
                f"{record['wire_ratio']:.3f}",
                f"{record['samples_per_s']:.1f}",
                f"{record['loss_after_s']:.4f}",
            ]
        )
    return Grid(
        ", ".join([f"{first['workload']}, {first['ranks']} ranks, {network}, {first['n_steps']} steps", *marks]),
        ["scheme", "step ms", "quartiles", "x ddp", "exposed", "MB sent", "loss", "codec", "compute", "wait", "ratio",
         "samples/s", f"loss at {first['loss_at_s']:.1f} s"],
        rows,
        f"ms a step, medians; codec time is busy time, hidden or not; loss: mean of the last steps, and of those before "
        f"{first['loss_at_s']:.1f} s",
    )  # fmt: skip


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f}"
