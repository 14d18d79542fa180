"""Measure: experiments of the catalogue, or codecs, all-reduce and training beside their competitors by hand."""

from __future__ import annotations

import argparse
import importlib

# name: (module with `add_arguments` and `run`, one-line help); only the one that is called is imported.
BENCHES: dict[str, tuple[str, str]] = {
    "list": ("gradwire_lab.cli.bench.listing", "list the experiments and which are measured"),
    "run": ("gradwire_lab.cli.bench.running", "run experiments into results/, continuing where the last run stopped"),
    "render": ("gradwire_lab.cli.bench.rendering", "make docs/results from results/; --check: only say what is stale"),
    "codec": ("gradwire_lab.cli.bench.codec", "ratio and speed of gradwire's and other codecs on real gradients"),
    "allreduce": (
        "gradwire_lab.cli.bench.allreduce",
        "time and bytes of every scheme's all-reduce beside the backend's own",
    ),
    "train": (
        "gradwire_lab.cli.bench.train",
        "iteration time, bytes and loss of a workload under schemes and PyTorch's hooks",
    ),
    "regret": ("gradwire_lab.cli.bench.regret", "compare auto with DDP and with every scheme that it may use"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's name, and everything after it, which its own parser reads in `run`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "commands:\n" + "\n".join(f"  {name:10} {summary}" for name, (_, summary) in BENCHES.items())
    parser.add_argument("bench", choices=list(BENCHES), metavar="COMMAND", help="one of the commands below")
    parser.add_argument(
        "rest", nargs=argparse.REMAINDER, metavar="...", help="its options; `COMMAND --help` lists them"
    )


def run(args: argparse.Namespace) -> int:
    """Run the chosen command; returns its exit status."""
    module_path, summary = BENCHES[args.bench]
    module = importlib.import_module(module_path)
    parser = argparse.ArgumentParser(prog=f"gradwire bench {args.bench}", description=summary)
    module.add_arguments(parser)
    parsed = parser.parse_args(args.rest)
    parsed.arguments = args.rest  # what a benchmark that starts ranks hands on to them
    return int(module.run(parsed))
