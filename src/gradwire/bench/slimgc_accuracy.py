"""gradwire bench slimgc-accuracy: SlimGC's Figs. 9 to 11, what its strategies give back of the accuracy that bits cost."""

from __future__ import annotations

import argparse
from pathlib import Path

from gradwire.bench import paired_trainings
from gradwire.bench.paired_trainings import FULL, Case
from gradwire.errors import Unsupported

_CODECS = {"1-bit": "one-bit", "2-bit": "two-bit"}
# Fig. 10: what a 2-bit value stands for, in mean magnitudes; 1 bit takes its scale from the values and has none.
_COMPRESSION_THRESHOLDS = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8)
_COMMUNICATION_THRESHOLDS = (0, 1_500, 15_000, 150_000)  # Fig. 11, bytes
PARTS = ("strategies", "compression", "communication")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gradwire bench slimgc-accuracy`."""
    paired_trainings.add_arguments(parser, ("resnet:width=16", "gpt"), Path("runs/slimgc-accuracy"))
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=PARTS, help="figures 9, 10, 11 (all)")
    parser.add_argument("--sweep-seeds", type=int, default=2, metavar="N", help="seeds a fold in figures 10 and 11 (2)")
    parser.add_argument("--threshold-bytes", type=int, default=15_000, metavar="N",
                        help="communication threshold of figures 9 and 10 (15000, the paper's best)")  # fmt: skip


def plan(args: argparse.Namespace) -> list[Case]:
    """Every case, the ones that all figures need first."""
    cases: dict[str, Case] = {}
    for spec, seed in paired_trainings.folds_and_seeds(args):
        for part in args.part:
            if part != "strategies" and seed >= args.sweep_seeds:
                continue
            for group, name, scheme in configurations(part, args.threshold_bytes):
                case = Case(part, group, name, scheme, spec, seed)
                cases.setdefault(f"{part}|{group}|{name}|{case.key}", case)
    return list(cases.values())


def configurations(part: str, threshold_bytes: int) -> list[tuple[str, str, str]]:
    """(group, name, scheme spec) of one figure."""
    found: list[tuple[str, str, str]] = []
    for bits, codec in _CODECS.items():
        bare = f"slimgc:codec={codec}"
        if part == "strategies":
            found += [
                (bits, FULL, "plain"),
                (bits, "bare", f"{bare},threshold_bytes=0"),
                (bits, "threshold", f"{bare},threshold_bytes={threshold_bytes}"),
                (bits, "everything", f"{bare},threshold_bytes={threshold_bytes},backup=true"),
            ]
        elif part == "compression" and bits == "2-bit":
            for value in _COMPRESSION_THRESHOLDS:
                for name, options in (
                    ("bare", "threshold_bytes=0"),
                    ("everything", f"threshold_bytes={threshold_bytes},backup=true"),
                ):
                    found.append((f"{bits}, {name}", f"{value:g}", f"{bare},threshold={value},{options}"))
        elif part == "communication":
            for value in _COMMUNICATION_THRESHOLDS:
                for name, options in (("threshold", ""), ("everything", ",backup=true")):
                    found.append((f"{bits}, {name}", f"{value}", f"{bare},threshold_bytes={value}{options}"))
    return found


def run(args: argparse.Namespace) -> int:
    """Train as a rank, or start the ranks and report."""
    paired_trainings.check_arguments(args, "sweep_seeds")
    cases = plan(args)
    try:
        from gradwire.bench.figures import slimgc_accuracy as figures
    except ImportError as error:
        raise Unsupported(f"the figures need matplotlib ({error}); pip install 'gradwire[report]'") from error
    outcome = paired_trainings.run("slimgc-accuracy", args, cases)
    if outcome is None:
        return 0
    status, results = outcome
    records = figures.summarize(cases, results)
    figures.plot(records, args.out / "slimgc-accuracy.svg")
    paired_trainings.write("slimgc-accuracy", args, records, figures.to_markdown(records), len(results))
    return status
