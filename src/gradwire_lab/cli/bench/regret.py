"""`gradwire bench regret`: its options."""

from __future__ import annotations

import argparse

from gradwire_lab.bench.regret import run
from gradwire_lab.cli.bench.ranks import add_training_arguments

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gradwire bench regret`."""
    autos = [f"auto:fidelity={level}" for level in ("exact", "close", "any")]
    schemes = (
        "ddp, auto with its classes, schemes to compare with; every scheme that one of the autos may use is trained too"
    )
    add_training_arguments(parser, ["ddp", *autos], schemes)
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="steps of each method (300)")
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="maximum training time of DDP and of each auto (60)"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with status 1 if auto is below 0.98 of DDP's speed, or in the second half "
        "below 0.95 of the best fixed scheme's"
    )  # fmt: skip
