"""gradwire switch: the emulation of a programmable switch that sums packets of integers, for tests and experiments.

A process that keeps to what a switch can do (docs/switch.md). It is no faster than the ranks' own all-reduce on one
machine, and proves nothing about a switch's speed; what it proves is that nothing more than a switch is needed.
"""

import argparse
import json

from gradwire import _native
from gradwire.errors import InvalidArgument
from gradwire_lab.cli.options import add_json, option
from gradwire_lab.ranks.rack_switch import RackSwitch
from gradwire_lab.ranks.supervisor import end_on_signals
from gradwire_lab.results.records import write_text

DEFAULT_PORT = 4790
DEFAULT_SLOTS = 4096  # x 2 versions x 1 KiB: 8 MiB of registers, what a switch's memory could hold
DEFAULT_LEASE_S = 300.0
_SLICE_S = 0.25  # signals are looked at this often


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "--address", "IP", "address to listen on", "127.0.0.1")
    option(parser, "--port", "P", "UDP port; 0: any free one", DEFAULT_PORT)
    option(parser, "--slots", "N", "a power of two, for all jobs", DEFAULT_SLOTS)
    words = "seconds; a job that is silent for longer loses its slots if another job needs them"
    option(parser, "--lease", "S", words, DEFAULT_LEASE_S)
    option(parser, "--above", "HOST:PORT", "another switch: this one sums a rack, and sends that on", None)
    option(parser, "--rack", "K/R", "below another: the number of this rack, and of all racks", "0/2")
    option(parser, "--ranks", "N,N", "below another: the ranks of this rack", "0")
    add_json(parser, "write the counters at the end")


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM, SIGHUP or Ctrl-C; then print the counters."""
    server: _native.SwitchServer | RackSwitch = (
        open_switch(args.address, args.port, args.slots, args.lease) if args.above is None else _open_rack(args)
    )
    print(f"gradwire switch: an emulation, at {args.address}:{server.port}, {args.slots} slots", flush=True)
    try:
        with end_on_signals():
            while True:
                server.run(_SLICE_S)
    except (KeyboardInterrupt, SystemExit):
        pass
    counters = json.dumps({"switch": "emulation", "epoch": server.epoch, **server.counters()})
    print(counters, flush=True)
    if args.json:
        write_text(args.json, counters + "\n")
    return 0


def open_switch(
    address: str, port: int, n_slots: int = DEFAULT_SLOTS, lease_s: float = DEFAULT_LEASE_S
) -> _native.SwitchServer:
    """A switch that listens and serves while its `run(seconds)` is called. Raises: InvalidArgument."""
    if not 0 <= port <= 65535:
        raise InvalidArgument(f"a port is from 0 to 65535, not {port}")
    if not 1 <= n_slots <= 1 << 20 or n_slots & (n_slots - 1):
        raise InvalidArgument(f"slots are a power of two from 1 to 1,048,576, not {n_slots}")
    if not lease_s > 0:
        raise InvalidArgument(f"the lease must be positive, got {lease_s}")
    return _native.SwitchServer(address, port, n_slots, lease_s)


def _open_rack(args: argparse.Namespace) -> RackSwitch:
    try:
        rack, n_racks = map(int, args.rack.split("/"))
        ranks = [int(rank) for rank in args.ranks.split(",")]
        host, port = args.above.rsplit(":", 1)
        above = host, int(port)
    except ValueError as error:
        raise InvalidArgument(
            f"--above is HOST:PORT, --rack K/R, --ranks N,N,..., not {args.above!r}, {args.rack!r}, {args.ranks!r}"
        ) from error
    return RackSwitch(args.address, args.port, args.slots, above, rack, n_racks, ranks)
