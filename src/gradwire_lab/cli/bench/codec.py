"""`gradwire bench codec`: its options."""

from __future__ import annotations

import argparse
from pathlib import Path

from gradwire_lab.bench.codec import run

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gradwire bench codec`."""
    parser.add_argument("--gradients", nargs="+", required=True, metavar="FILE",
                        help=".npz files, or WORKLOAD@STEP for the gradients of a short training (gpt@50)")  # fmt: skip
    parser.add_argument(
        "--codec",
        nargs="+",
        default=["all"],
        metavar="NAME",
        help="codecs, of other libraries too; `all` is every one (default)",
    )
    parser.add_argument(
        "--threads", nargs="+", type=int, default=None, metavar="N", help="thread counts (default: 1 and the cores)"
    )
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="samples per codec, after one dropped (7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a list of flat records")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the records as a table")
    parser.add_argument("--wide", action="store_true", help="all columns, however wide the table gets")
