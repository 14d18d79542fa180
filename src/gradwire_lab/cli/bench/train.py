"""`gradwire bench train`: its options."""

from __future__ import annotations

import argparse

from gradwire_lab.bench import train_methods
from gradwire_lab.bench.train import run
from gradwire_lab.cli.bench.ranks import add_training_arguments

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gradwire bench train`."""
    baselines = ", ".join(train_methods.BASELINES)
    schemes = (
        f"schemes and baselines ({baselines}), with options as NAME:option=value,...; `all` is every one (default)"
    )
    add_training_arguments(parser, ["all"], schemes)
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="measured steps per scheme (30)")
    parser.add_argument("--warmup", type=int, default=5, metavar="N",
                        help="steps before the measured ones (5); more if a scheme measures first")  # fmt: skip
    parser.add_argument("--overlap", action="store_true",
                        help="record how much communication and codec work is hidden by computation")  # fmt: skip
    parser.add_argument(
        "--compute",
        choices=("real", "emulate"),
        default="real",
        help="run the model, or replay captured gradients of its shape behind calibrated waits",
    )
    parser.add_argument("--batch-size", type=int, metavar="N", help="samples per rank and step (the workload's own)")
    parser.add_argument("--optimizer", metavar="NAME", help="optimizer (the workload's own)")
    parser.add_argument("--wide", action="store_true", help="all columns, however wide the table gets")
