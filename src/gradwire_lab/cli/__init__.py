"""The `gradwire` command: one table of subcommands, each a module with `add_arguments` and `run`."""

from __future__ import annotations

import argparse
import importlib
import os
import select
import sys

from gradwire import __version__
from gradwire.errors import GradwireError

# name: (module, one-line help). Modules load only when called, so that `gradwire --help` does not import torch.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("gradwire_lab.cli.demo", "train a small GPT on a slow network with DDP, PyTorch's bf16 hook and gradwire"),
    "train": ("gradwire_lab.cli.train", "train a workload with a scheme, on this machine or under torchrun"),
    "recommend": (
        "gradwire_lab.cli.recommend",
        "say which scheme to use, if any: measured here, predicted for other networks",
    ),
    "bench": (
        "gradwire_lab.cli.bench",
        "run experiments; compare codecs, all-reduce and training with other libraries",
    ),
    "netlab": ("gradwire_lab.cli.netlab", "run a command in ranks, over links with a limited rate"),
    "switch": ("gradwire_lab.cli.switch", "run the emulation of a programmable switch that sums packets of integers"),
    "report": ("gradwire_lab.cli.report", "one self-contained HTML page from training runs and benchmark results"),
    "simulate": ("gradwire_lab.simulator.cli", "predict training on a network that you do not have"),
    "gpu": ("gradwire_lab.cli.gpu", "check gradwire on this machine's GPUs, and keep a record of it"),
    "inspect": (
        "gradwire_lab.cli.inspection",
        "show what a message, run, benchmark result, checkpoint or gradient file holds",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns the process's exit status (0 done, 1 a gradwire error, 2 wrong usage, 130 Ctrl-C,
    141 nobody reads what it prints)."""
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()  # here, not when the interpreter goes down
    except BrokenPipeError:
        printed = select.poll()
        printed.register(sys.stdout, 0)
        if not printed.poll(0):
            raise  # another pipe
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # as in `gradwire ... | head`: the rest goes nowhere
        return 141


def _run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="gradwire", description="Gradient compression for PyTorch data-parallel training."
    )
    parser.add_argument("--version", action="version", version=f"gradwire {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    for name, (module_path, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        if name == wanted:
            try:
                module = importlib.import_module(module_path)
            except GradwireError as error:  # a package of an extra that is not installed
                print(f"gradwire {name}: {type(error).__name__}: {error}", file=sys.stderr)
                return 1
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    args = parser.parse_args(arguments)
    try:
        return int(args.run(args))
    except GradwireError as error:
        print(f"gradwire {args.command}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"gradwire {args.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
