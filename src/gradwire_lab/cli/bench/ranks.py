"""The options of commands that measure in ranks."""

from __future__ import annotations

import argparse
from pathlib import Path

from gradwire_lab.bench.launching import DEFAULT_RANKS


def add_training_arguments(parser: argparse.ArgumentParser, default_scheme: list[str], schemes: str) -> None:
    """What is trained, from which seed, and how the links change meanwhile; `schemes`: the help of `--scheme`."""
    parser.add_argument("--scheme", nargs="+", default=default_scheme, metavar="NAME", help=schemes)
    parser.add_argument("--workload", default="gpt", metavar="NAME", help="what to train (gpt); NAME:option=value,...")
    add_rank_arguments(parser)
    parser.add_argument(
        "--then", nargs="+", default=[], metavar="RATE",
        help="link rates to change to during the run, for --steps steps each",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of weights and batches (0)")


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
