"""gradwire bench aqgb-accuracy: Table 2 of the AQGB paper, what few and adaptive bits cost in accuracy.

AQGB sends as many bits as its network has time for, so what it costs holds for the link that `--rate` gives.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from gradwire.bench import paired_trainings
from gradwire.bench.paired_trainings import FULL, Case
from gradwire.errors import Unsupported

# Buckets smaller than a quarter of these small models: one bucket for all would leave AQGB no block to send before others.
_SCHEMES = {
    FULL: "plain",
    "32-bit broadcast": "broadcast:bits=32,bucket_mb={bucket_mb}",
    "4-bit broadcast": "broadcast:bits=4,bucket_mb={bucket_mb}",
    # As in the paper, where only the network bounds the bits: ranks that share cores would be left with the fixed 4.
    "AQGB": "aqgb:max_contention=1,bucket_mb={bucket_mb}",
}
PART = "table 2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gradwire bench aqgb-accuracy`."""
    paired_trainings.add_arguments(
        parser, ("resnet:width=8", "gpt:n_layers=2,width=96"), Path("runs/aqgb-accuracy"), 100
    )
    parser.add_argument("--bucket-mb", type=float, default=0.05, metavar="MB", help="DDP's buckets (0.05)")
    parser.add_argument("--scheme", nargs="+", default=[], metavar="NAME",
                        help="more schemes beside Table 2's, options as NAME:option=value,...")  # fmt: skip
    parser.set_defaults(rate=["100mbit"])


def plan(args: argparse.Namespace) -> list[Case]:
    """Every training, schemes innermost."""
    schemes = {name: spec.format(bucket_mb=args.bucket_mb) for name, spec in _SCHEMES.items()}
    schemes |= {spec: spec for spec in args.scheme}
    return [
        Case(PART, "", name, scheme, workload, seed)
        for workload, seed in paired_trainings.folds_and_seeds(args)
        for name, scheme in schemes.items()
    ]


def run(args: argparse.Namespace) -> int:
    """Train as a rank, or start the ranks and report."""
    paired_trainings.check_arguments(args)
    cases = plan(args)
    try:
        from gradwire.bench.figures import paired_trainings as figures
    except ImportError as error:
        raise Unsupported(f"the figures need matplotlib ({error}); pip install 'gradwire[report]'") from error
    outcome = paired_trainings.run("aqgb-accuracy", args, cases)
    if outcome is None:
        return 0
    status, results = outcome
    records = figures.summarize(cases, results, PART, {"to_full": FULL})
    figures.plot(records, args.out / "aqgb-accuracy.svg")
    paired_trainings.write(
        "aqgb-accuracy",
        args,
        records,
        figures.to_markdown(records, {"to_full": "against full precision"}),
        len(results),
    )
    return status
