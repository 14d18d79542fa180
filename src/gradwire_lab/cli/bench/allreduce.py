"""`gradwire bench allreduce`: its options."""

from __future__ import annotations

import argparse

from gradwire_lab.bench.allreduce import run
from gradwire_lab.bench.sources import PATTERNS
from gradwire_lab.cli.bench.ranks import add_rank_arguments

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gradwire bench allreduce`."""
    parser.add_argument(
        "--scheme",
        nargs="+",
        default=["all"],
        metavar="NAME",
        help="schemes and baselines (ddp, ddp-bf16), with options as NAME:option=value,...; `all` is every one (default) "
        "but dense-switch, the emulated switch without compression",
    )
    add_rank_arguments(parser)
    parser.add_argument("--n-bytes", nargs="+", type=int, metavar="N", help="sizes of the float32 gradient")
    parser.add_argument("--quick", action="store_true", help="four sizes to 25 MB, few samples: under two minutes")
    parser.add_argument("--gradients", metavar="FILE.npz", help="take the values from a gradient file")
    parser.add_argument("--density", type=float, default=1.0, metavar="D", help="share of non-zeros (random gradient)")
    parser.add_argument(
        "--pattern", choices=list(PATTERNS), default="element", help="how non-zeros cluster: singly, in 32s, in 1,024s"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="samples per scheme and size (9; quick 5)")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="calls dropped before the first sample (2)")
    parser.add_argument(
        "--budget",
        type=float,
        metavar="S",
        help="seconds per scheme and size; three samples are always taken (20; quick 2)",
    )
    parser.add_argument("--wide", action="store_true", help="all columns, however wide the table gets")
