"""The options of commands that measure in ranks."""

from __future__ import annotations

import argparse
from pathlib import Path

from gradwire.bench.launching import DEFAULT_RANKS


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say where the ranks run and where results go; the same in every benchmark with ranks."""
    parser.add_argument("--ranks", type=int, metavar="N", help=f"ranks to start on this machine ({DEFAULT_RANKS})")
    parser.add_argument(
        "--rate",
        nargs="+",
        metavar="RATE",
        help="link rates to measure at, one run each: 100mbit, 1gbit, none (default); R,R,R,S: one a rank or node",
    )
    parser.add_argument(
        "--ranks-per-node", type=int, default=1, metavar="N", help="ranks that share a node and its link (1)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a list of flat records")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the records as a table")
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)  # JSONL of records, from rank 0 to its launcher
