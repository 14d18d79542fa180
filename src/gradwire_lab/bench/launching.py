"""From one command to ranks and back: the launcher's side of `bench allreduce`, `train` and `regret`.

Ranks may ask the launcher, which owns the links, to change them in the middle of a run: rank 0 asks on standard output, where
the launcher reads each line, and waits for the answer, a file beside the records' log.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradwire.errors import GradwireError, InvalidArgument
from gradwire.registry import parse_spec
from gradwire_lab.ranks.launch import run_gradwire
from gradwire_lab.ranks.netlab import Netlab
from gradwire_lab.ranks.netlab.rate import parse_rate, with_way
from gradwire_lab.results.records import RecordLog, write_csv, write_json

DEFAULT_RANKS = 4
_QUESTION = "gradwire bench: change links to "


def is_rank() -> bool:
    """Whether this process was started as a rank, by the launcher below or by torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_ranks(args: argparse.Namespace) -> None:
    """Raises: InvalidArgument, before any rank is started (ranks, nodes, rates, links that `--then` cannot change)."""
    n_ranks, per_node = args.ranks if args.ranks is not None else DEFAULT_RANKS, args.ranks_per_node
    if n_ranks < 1:
        raise InvalidArgument(f"--ranks must be at least 1, got {n_ranks}")
    if per_node < 1 or n_ranks % per_node:
        raise InvalidArgument(f"{n_ranks} ranks do not make whole nodes of {per_node}")
    n_links = n_ranks // per_node
    for rate in args.rate or ():
        n_rates = len([parse_rate(word) for word in rate.split(",")])
        if n_rates not in (1, n_links):
            raise InvalidArgument(
                f"--rate {rate}: {n_rates} rates for {n_links} {'ranks' if per_node == 1 else 'nodes'}"
            )
    then = getattr(args, "then", ())  # not every benchmark has it
    if then and args.log is None and (is_rank() or not args.rate or "none" in args.rate):
        raise InvalidArgument("--then changes the links of the test network: give the rate to begin with, --rate RATE")
    for rates in then:
        each = [parse_rate(word) for word in rates.split(",")]
        if None in each or len(each) not in (1, n_links):
            raise InvalidArgument(
                f"--then {rates}: expected one rate such as 100mbit, or {n_links} with commas between"
            )


def run_in_ranks(bench: str, args: argparse.Namespace, specs: Sequence[str] = ()) -> int:
    """Run `gradwire bench BENCH` in `--ranks` processes, once for each `--rate`; results so far outlive a failure.

    If one of `specs` sums in the network, the emulation of an aggregating switch runs beside them.

    Raises: PeerLost (a rank failed; the message names it), GradwireError (results could not be written).
    """
    with tempfile.TemporaryDirectory(prefix="gradwire-bench-") as folder:
        log = RecordLog(args.log or Path(folder) / "records.jsonl")
        command = ["bench", bench, *args.arguments, "--log", str(log.path)]
        started: list[Netlab] = []

        def take_line(rank: int, line: str) -> None:
            if line.startswith(_QUESTION):
                _answer(log.path, started[-1], line)
            else:
                print(line, flush=True)  # only rank 0 writes on standard output, so lines need no rank before them

        how: dict[str, Any] = {"switch": needs_switch(specs), "ranks_per_node": args.ranks_per_node}
        for rate in [with_way(args, one) for one in args.rate or ["none"]]:
            each = rate.split(",") if "," in rate else rate
            try:
                run_gradwire(command, args.ranks or DEFAULT_RANKS, each, take_line, on_start=started.append, **how)
            finally:
                write_results(args, log.read())
    return 0


def change_links(log: Path, number: int, rates: str, patience_s: float = 20.0) -> None:
    """Rank 0's side: have every link changed to `rates` ("100mbit", or one a rank with commas), the run's `number`th change.

    Raises: GradwireError (the launcher could not, or did not answer in `patience_s`).
    """
    path = _answer_path(log, number)
    print(f"{_QUESTION}{number} {rates}", flush=True)
    deadline = time.monotonic() + patience_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise GradwireError(f"the launcher did not change the links to {rates} within {patience_s:.0f} s")
        time.sleep(0.01)
    answer = path.read_text(encoding="utf-8")
    path.unlink()
    if answer:
        raise GradwireError(f"links were not changed to {rates}: {answer}")


def _answer(log: Path, lab: Netlab, question: str) -> None:
    """Change the lab's links as asked, and say so, or why not."""
    number, rates = question.removeprefix(_QUESTION).split(" ")
    answer, each = "", rates.split(",")
    try:
        if not lab.shaped:
            raise GradwireError("the ranks have no shaped links")
        for rank in range(lab.network.n_ranks_on_machine or 0):
            lab.set_rate(rank, each[rank % len(each)])
    except GradwireError as error:
        answer = str(error)
    _answer_path(log, int(number)).write_text(answer, encoding="utf-8")


def _answer_path(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.links-{number}")


def write_results(args: argparse.Namespace, records: list[dict[str, Any]]) -> None:
    """Write `--json` and `--csv`, where given and if there are records: an interrupted run leaves earlier results be.

    Raises: GradwireError.
    """
    if records and args.json:
        write_json(args.json, records)
    if records and args.csv:
        write_csv(args.csv, records)


def needs_switch(specs: Sequence[str]) -> bool:
    """Whether one of them sums in the network: `dense-switch`, or any scheme with `aggregator=switch`."""
    parsed = [parse_spec(spec) for spec in specs]
    return any(name == "dense-switch" or options.get("aggregator") == "switch" for name, options in parsed)
