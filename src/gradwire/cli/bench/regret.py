"""`gradwire bench regret`: its options."""

from __future__ import annotations

import argparse

from gradwire.bench.regret import run
from gradwire.cli.bench.ranks import add_training_arguments

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gradwire bench regret`."""
    autos = [f"auto:fidelity={level}" for level in ("exact", "close", "any")]
    schemes = (
        "ddp, auto by its classes, and what to compare with; every scheme that one of the autos may use trains too"
    )
    add_training_arguments(parser, ["ddp", *autos], schemes)
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="of each method (300)")
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="of DDP and of each auto, at most (60)"
    )
    parser.add_argument(
        "--check", action="store_true", help="status 1 where auto is below 0.98 of DDP, or in the second half below 0.95 of "
        "the best fixed scheme"
    )  # fmt: skip
