"""Run a command in ranks with shaped links between them, check the links' rates, or clean up after a crash."""

import argparse
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import astuple

from gradwire.errors import InvalidArgument
from gradwire_lab.cli.options import add_json, add_ranks, add_way, option, switch
from gradwire_lab.ranks.launch import start_ranks
from gradwire_lab.ranks.netlab.check import RateCheck, measure_rate
from gradwire_lab.ranks.netlab.lab import DISTANT_MTU, MTU, QUEUE_MS, parse_event, scheduled
from gradwire_lab.ranks.netlab.rate import format_rate, parse_link, with_way
from gradwire_lab.ranks.netlab.stale import end_stale_labs
from gradwire_lab.ranks.supervisor import end_on_signals
from gradwire_lab.results.records import write_text
from gradwire_lab.results.tables import Grid, print_grid, to_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, prog=parser.prog)
    run = actions.add_parser(
        "run",
        help="run a command in every rank",
        usage="%(prog)s [options] -- COMMAND [ARGUMENT ...]",
        description="Run a command in every rank, with torchrun's environment variables and its own rate-limited link.",
    )
    add_ranks(run, 4, "1gbit")
    add_way(run)
    option(run, "--ranks-per-node", "N", "ranks that share one link", 1)
    option(run, "--straggler", "RANK=RATE", "give one rank another rate; repeatable", [], action="append")
    words = "in mid-run: 10:rate:2=100mbit, 10:delay:2=40ms, 10:down:2, 12:up:2, 5:stop:1, 6:continue:1, 9:kill:3; repeatable"
    option(run, "--at", "SECONDS:EVENT", words, [], action="append")
    option(run, "--grace", "S", "seconds that the other ranks get to end when one fails", 10.0)
    option(run, "--timeout", "S", "end the run after this long, with status 124", type=float)
    switch(run, "--counters", "print what each link has carried, at the end")
    option(run, "--mtu", "BYTES", f"of the links (default: {MTU}, with a distance {DISTANT_MTU})", type=int)
    option(run, "--queue-ms", "MS", "of each link's queues", QUEUE_MS, type=float)
    switch(run, "--require-shaping", "fail instead of running on loopback if links cannot be limited")
    run.add_argument("rank_command", nargs="+", metavar="COMMAND", help="the command and its arguments")

    words = "Compare set rates with what Gloo's all_reduce gets."
    check = actions.add_parser("check", help="measure the links' rates", description=words)
    option(check, "--ranks", "N", "processes to start here", 4)
    option(check, "--rates", "RATE", "of the links, one run each", ["100mbit", "500mbit", "1gbit", "2gbit"], nargs="+")
    add_way(check)
    option(check, "--seconds", "S", "per all-reduce", 1.0)
    option(check, "--repeats", "N", "all-reduces at each rate", 5)
    option(check, "--tolerance", "SHARE", "status 1 beyond it", 0.05)
    add_json(check, "write a JSON line a rate")

    words = "End labs whose owner is dead: ranks, namespaces and links."
    actions.add_parser("clean", help="end what crashed runs left behind", description=words)


def run(args: argparse.Namespace) -> int:
    logging.basicConfig(format="gradwire: %(message)s", level=logging.INFO)
    actions: dict[str, Callable[[argparse.Namespace], int]] = {"run": _run, "check": _check, "clean": _clean}
    return actions[args.action](args)


def _run(args: argparse.Namespace) -> int:
    for name in ("grace", "timeout"):
        if not 0 <= (getattr(args, name) or 0) <= 1e6:  # the kernel waits for 24 days at most
            raise InvalidArgument(f"--{name} {getattr(args, name)}: expected seconds from 0 to 1,000,000")
    n_links = max(1, args.ranks // max(1, args.ranks_per_node))
    own = with_way(args, args.rate)
    rates: list[str | float | None] = [own] * n_links
    for straggler in args.straggler:
        rank, equals, rate = straggler.partition("=")
        if not equals or not rank.isdecimal() or int(rank) >= n_links:
            raise InvalidArgument(f"--straggler {straggler}: write RANK=RATE, with a rank from 0 to {n_links - 1}")
        rates[int(rank)] = with_way(args, rate)
    if own == "none" and args.at and not args.straggler:
        raise InvalidArgument("--at changes a lab's links and ranks; with --rate none there is no lab")
    events = [parse_event(text, args.ranks) for text in args.at]
    rate = rates if args.straggler else own
    options = {name: getattr(args, name) for name in ("mtu", "queue_ms", "require_shaping", "ranks_per_node")}
    with end_on_signals(), start_ranks(args.rank_command, args.ranks, rate, grace_s=args.grace, **options) as launch:
        with scheduled(launch, events) as troubles:
            result = launch.wait(args.timeout)
        for trouble in troubles:
            print(f"gradwire: at {trouble}", file=sys.stderr)
        counters = launch.counters() if args.counters and launch.shaped else None
        if args.counters and counters is None:
            print("gradwire: no counters: on loopback the kernel does not tell ranks apart", file=sys.stderr)
    if counters is not None:
        rows = [[str(rank), *(f"{n:,}" for n in astuple(link))] for rank, link in enumerate(counters)]
        headings = ["rank", "sent bytes", "packets", "drops", "received bytes", "packets", "drops"]
        print(to_text(Grid("frames on the links, headers included", headings, rows), None), end="", file=sys.stderr)
    if result.status != 0:
        print(f"gradwire: {result}", file=sys.stderr)
    return result.status


def _check(args: argparse.Namespace) -> int:
    if not 0.01 <= args.seconds <= 60 or not 1 <= args.repeats <= 100:
        raise InvalidArgument("--seconds is from 0.01 to 60, --repeats from 1 to 100")
    links = [with_way(args, rate) for rate in args.rates]
    ways = [parse_link(link, 0, args.ranks) for link in links]
    checks: list[RateCheck] = []
    for link in links:
        with end_on_signals():
            checks.append(measure_rate(args.ranks, link, args.seconds, args.repeats))
        if args.json is not None:  # after each rate: what was measured stays if a later one fails
            write_text(args.json, "".join(json.dumps(one.to_record()) + "\n" for one in checks))
    rows = []
    for one in checks:
        shares = (one.deviation, one.lowest_bps / one.set_bps, one.highest_bps / one.set_bps, one.wire_overhead)
        measured = f"{one.payload_bps / 1e6:,.1f}"
        way = [f"{1e3 * one.round_trip_s:.2f}", f"{one.loss:.2%}"]
        rows.append([format_rate(one.set_bps), measured, *(f"{share:.1%}" for share in shares), str(one.drops), *way])
    headings = ["set", "Mb/s", "deviation", "lowest", "highest", "overhead", "drops", "rtt ms", "loss"]
    print_grid(Grid(f"Gloo all_reduce, {args.ranks} ranks, payload without headers", headings, rows), wide=True)
    # A connection over a lossy line does not fill it, whatever the line can do: there the way is what is checked.
    outside = [
        format_rate(one.set_bps)
        for one, way in zip(checks, ways, strict=True)
        if one.deviation > args.tolerance
        or (one.deviation < -args.tolerance and not way.is_distant)
        or not one.has_way_of(way, args.tolerance)
    ]
    if outside:
        print(f"gradwire: more than {args.tolerance:.0%} off: {', '.join(outside)}; a busy machine?", file=sys.stderr)
    return 1 if outside else 0


def _clean(_: argparse.Namespace) -> int:
    labs = end_stale_labs()
    for identity, pids in labs.items():
        print(f"ended a lab of dead process {identity.split('.')[0]}: {len(pids)} processes, and its namespaces")
    if not labs:
        print("nothing to clean: no lab of a dead owner")
    return 0
