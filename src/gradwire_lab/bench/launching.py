"""From one command to ranks and back: the launcher's side of `bench allreduce` and `bench train`."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradwire.errors import InvalidArgument
from gradwire.registry import parse_spec
from gradwire_lab.bench.link_changes import LinkChanges
from gradwire_lab.ranks.launch import start_ranks
from gradwire_lab.ranks.supervisor import end_on_signals
from gradwire_lab.results.records import RecordLog, write_csv, write_json

DEFAULT_RANKS = 4


def is_rank() -> bool:
    """Whether this process was started as a rank, by the launcher below or by torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_rank_arguments(args: argparse.Namespace) -> None:
    """Raises: InvalidArgument, before any rank is started."""
    from gradwire_lab.ranks.netlab import parse_rate

    if args.ranks is not None and args.ranks < 1:
        raise InvalidArgument(f"--ranks must be at least 1, got {args.ranks}")
    per_node = args.ranks_per_node
    if per_node < 1 or (args.ranks or DEFAULT_RANKS) % per_node:
        raise InvalidArgument(f"{args.ranks or DEFAULT_RANKS} ranks do not make whole nodes of {per_node}")
    for rate in args.rate or ():
        each = [parse_rate(word) for word in rate.split(",")]
        if len(each) not in (1, count_links(args)):
            whose = "ranks" if per_node == 1 else "nodes"
            raise InvalidArgument(f"--rate {rate}: {len(each)} rates for {count_links(args)} {whose}")


def count_links(args: argparse.Namespace) -> int:
    """One a rank, or one a node."""
    return int((args.ranks or DEFAULT_RANKS) // args.ranks_per_node)


def run_in_ranks(bench: str, args: argparse.Namespace, *, switch: bool = False) -> int:
    """Run `gradwire bench BENCH` in `--ranks` processes, once for each `--rate`; results so far outlive a failure.

    With `switch`, the emulation of an aggregating switch runs beside them.

    Raises: PeerLost (a rank failed; the message names it), GradwireError (results could not be written).
    """
    rates: Sequence[str] = args.rate or ["none"]
    with tempfile.TemporaryDirectory(prefix="gradwire-bench-") as folder:
        log = RecordLog(args.log or Path(folder) / "records.jsonl")
        command = [sys.executable, "-m", "gradwire", "bench", bench, *args.arguments, "--log", str(log.path)]
        changes = LinkChanges(log.path)

        def take_line(rank: int, line: str) -> None:
            if not changes.take(line):
                print(line, flush=True)  # only rank 0 writes on standard output, so lines need no rank before them

        for rate in rates:
            each: Any = rate.split(",") if "," in rate else rate
            n_ranks, nodes = args.ranks or DEFAULT_RANKS, {"ranks_per_node": args.ranks_per_node}
            with (
                end_on_signals(),
                start_ranks(command, n_ranks, each, on_line=take_line, switch=switch, **nodes) as launch,
            ):
                changes.serve(launch)
                try:
                    result = launch.wait()
                finally:
                    write_results(args, log.read())
            result.raise_if_failed()
    return 0


def write_results(args: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    """Write `--json` and `--csv`, where given and if there are records: an interrupted run leaves earlier results be.

    Raises: GradwireError.
    """
    if not records:
        return
    if args.json:
        write_json(args.json, records)
    if args.csv:
        write_csv(args.csv, records)


def needs_switch(specs: Sequence[str]) -> bool:
    """Whether one of them sums in the network: `dense-switch`, or any scheme with `aggregator=switch`."""
    parsed = [parse_spec(spec) for spec in specs]
    return any(name == "dense-switch" or options.get("aggregator") == "switch" for name, options in parsed)
