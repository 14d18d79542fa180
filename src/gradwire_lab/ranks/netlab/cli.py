"""Run a command in ranks with shaped links between them, check the links' rates, or clean up after a crash."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from gradwire.errors import InvalidArgument
from gradwire_lab.ranks.launch import start_ranks
from gradwire_lab.ranks.netlab.check import RateCheck, measure_rate
from gradwire_lab.ranks.netlab.lab import MTU, QUEUE_MS, LinkCounters
from gradwire_lab.ranks.netlab.rate import format_rate, parse_rate
from gradwire_lab.ranks.netlab.schedule import Schedule, parse_event
from gradwire_lab.ranks.netlab.stale import end_stale_labs
from gradwire_lab.ranks.supervisor import end_on_signals

_RATE_HELP = "rate of every link, each way: 100mbit, 2.5gbit, none for loopback (default: %(default)s)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `run`, `check` and `clean`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    run_parser = actions.add_parser(
        "run",
        help="run a command in every rank",
        usage="%(prog)s [options] -- COMMAND [ARGUMENT ...]",
        description="Run a command in every rank, with torchrun's environment variables and its own rate-limited link.",
    )
    run_parser.add_argument("--ranks", type=int, default=4, metavar="N", help="default: %(default)s")
    run_parser.add_argument(
        "--ranks-per-node", type=int, default=1, metavar="N", help="ranks that share one link (default: %(default)s)"
    )
    run_parser.add_argument("--rate", default="1gbit", metavar="RATE", help=_RATE_HELP)
    run_parser.add_argument(
        "--straggler", action="append", default=[], metavar="RANK=RATE", help="give one rank another rate; repeatable"
    )
    run_parser.add_argument(
        "--at",
        action="append",
        default=[],
        metavar="SECONDS:EVENT",
        help="in mid-run: 10:rate:2=100mbit, 10:down:2, 12:up:2, 5:stop:1, 6:continue:1, 9:kill:3; repeatable",
    )
    run_parser.add_argument(
        "--grace",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds that the other ranks get to end when one fails (default: %(default)s)",
    )
    run_parser.add_argument("--timeout", type=float, metavar="S", help="end the run after this long, with status 124")
    run_parser.add_argument("--counters", action="store_true", help="print what each link has carried, at the end")
    run_parser.add_argument("--mtu", type=int, default=MTU, metavar="BYTES", help="of the links (default: %(default)s)")
    run_parser.add_argument(
        "--queue-ms", type=float, default=QUEUE_MS, metavar="MS", help="of each link's queues (default: %(default)s)"
    )
    run_parser.add_argument(
        "--require-shaping",
        action="store_true",
        help="fail instead of running on loopback if links cannot be limited",
    )
    run_parser.add_argument("rank_command", nargs="+", metavar="COMMAND", help="the command and its arguments")

    check_parser = actions.add_parser(
        "check", help="measure the links' rates", description="Compare set rates with what Gloo's all_reduce gets."
    )
    check_parser.add_argument("--ranks", type=int, default=4, metavar="N", help="default: %(default)s")
    check_parser.add_argument("--rates", nargs="+", default=["100mbit", "500mbit", "1gbit", "2gbit"], metavar="RATE")
    check_parser.add_argument("--seconds", type=float, default=1.0, help="per all-reduce (default: %(default)s)")
    check_parser.add_argument("--repeats", type=int, default=5, metavar="N", help="default: %(default)s")
    check_parser.add_argument("--tolerance", type=float, default=0.05, help="status 1 beyond it (default: %(default)s)")
    check_parser.add_argument("--json", type=Path, metavar="FILE", help="one record a rate")

    actions.add_parser(
        "clean",
        help="end what crashed runs left behind",
        description="End labs whose owner is dead: ranks, namespaces and links.",
    )


def run(args: argparse.Namespace) -> int:
    """Do `args.action`; returns the exit status."""
    logging.basicConfig(format="gradwire: %(message)s", level=logging.INFO)
    if args.action == "clean":
        return _clean()
    return _check(args) if args.action == "check" else _run(args)


def _run(args: argparse.Namespace) -> int:
    n_links = max(1, args.ranks // max(1, args.ranks_per_node))
    rates: list[str | float | None] = [args.rate] * n_links
    for straggler in args.straggler:
        rank, equals, rate = straggler.partition("=")
        if not equals or not rank.isdecimal() or int(rank) >= n_links:
            raise InvalidArgument(f"--straggler {straggler}: write RANK=RATE, with a rank from 0 to {n_links - 1}")
        rates[int(rank)] = rate
    if parse_rate(args.rate) is None and args.at and not args.straggler:
        raise InvalidArgument("--at changes a lab's links and ranks; with --rate none there is no lab")
    events = [parse_event(text, args.ranks) for text in args.at]
    rate = rates if args.straggler else args.rate
    counters: list[LinkCounters] | None = None
    options = {
        "mtu": args.mtu, "queue_ms": args.queue_ms, "require_shaping": args.require_shaping,
        "ranks_per_node": args.ranks_per_node,
    }  # fmt: skip
    with (
        end_on_signals(),
        start_ranks(args.rank_command, args.ranks, rate, grace_s=args.grace, **options) as launch,
    ):
        if launch.lab is not None and events:
            with Schedule(launch.lab, events) as schedule:
                result = launch.wait(args.timeout)
            for event, trouble in schedule.done:
                if trouble is not None:
                    print(f"gradwire: at {event}: {trouble}", file=sys.stderr)
        else:
            result = launch.wait(args.timeout)
        counters = launch.counters() if args.counters else None
        if args.counters and counters is None:
            print("gradwire: no counters: on loopback the kernel does not tell ranks apart", file=sys.stderr)
    if counters is not None:
        Console(stderr=True).print(_counter_table(counters))
    if result.status != 0:
        print(f"gradwire: {result}", file=sys.stderr)
    return result.status


def _counter_table(counters: list[LinkCounters]) -> Table:
    table = Table("rank", title="frames on the links, headers included")
    for column in ("sent bytes", "packets", "drops", "received bytes", "packets", "drops"):
        table.add_column(column, justify="right")
    for rank, link in enumerate(counters):
        numbers = (
            link.sent_bytes,
            link.sent_packets,
            link.sent_drops,
            link.received_bytes,
            link.received_packets,
            link.received_drops,
        )
        table.add_row(str(rank), *(f"{number:,}" for number in numbers))
    return table


def _check(args: argparse.Namespace) -> int:
    if not 0.01 <= args.seconds <= 60 or not 1 <= args.repeats <= 100:
        raise InvalidArgument("--seconds is from 0.01 to 60, --repeats from 1 to 100")
    checks: list[RateCheck] = []
    console = Console()
    table = Table(title=f"Gloo all_reduce, {args.ranks} ranks, payload without headers")
    for column in ("set", "measured (median)", "deviation", "lowest", "highest", "frames over payload", "drops"):
        table.add_column(column, justify="right")
    for rate in args.rates:
        parse_rate(rate)
    for rate in args.rates:
        with end_on_signals(), console.status(f"{rate} ..."):
            checks.append(measure_rate(args.ranks, rate, args.seconds, args.repeats))
        check = checks[-1]
        shares = (check.deviation, check.lowest_bps / check.set_bps, check.highest_bps / check.set_bps)
        table.add_row(
            format_rate(check.set_bps),
            f"{check.payload_bps / 1e6:,.1f} Mb/s",
            *(f"{share:.1%}" for share in shares),
            f"{check.wire_overhead:.1%}",
            str(check.drops),
        )
        if args.json is not None:  # after each rate: what was measured stays if a later one fails
            try:
                args.json.write_text("".join(json.dumps(one.to_record()) + "\n" for one in checks))
            except OSError as error:
                raise InvalidArgument(f"cannot write {args.json}: {error.strerror}; give another --json") from error
    console.print(table)
    outside = [format_rate(check.set_bps) for check in checks if abs(check.deviation) > args.tolerance]
    if outside:
        print(
            f"gradwire: more than {args.tolerance:.0%} off: {', '.join(outside)}; is the machine busy?", file=sys.stderr
        )
    return 1 if outside else 0


def _clean() -> int:
    labs = end_stale_labs()
    for lab in labs:
        n_processes = len(lab.pids)
        print(f"ended a lab of dead process {lab.identity.split('.')[0]}: {n_processes} processes, and its namespaces")
    if not labs:
        print("nothing to clean: no lab of a dead owner")
    return 0
