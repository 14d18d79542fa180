"""The `gradwire` command: one table of subcommands, each a module with `add_arguments` and `run`."""

import argparse
import importlib
import os
import select
import sys

from gradwire import __version__
from gradwire.errors import GradwireError
from gradwire_lab.cli.options import ShortHelp

# name: (module, one-line help). Modules load only when called, so that `gradwire --help` does not import torch.
# First what a user of the library wants, then what measures it.
USERS: dict[str, tuple[str, str]] = {
    "demo": ("gradwire_lab.cli.demo", "see it: DDP, PyTorch's bf16 hook and gradwire on a slow network"),
    "recommend": ("gradwire_lab.cli.recommend", "which scheme for your model and network, if any: measured, predicted"),
    "train": ("gradwire_lab.cli.train", "train a built-in workload with a scheme, here or under torchrun"),
    "report": ("gradwire_lab.cli.report", "one HTML page from training runs and benchmark results"),
    "inspect": ("gradwire_lab.cli.inspection", "what a message, run, checkpoint or gradient file holds"),
    "gpu": ("gradwire_lab.cli.gpu", "check gradwire on this machine's GPUs"),
}
LABORATORY: dict[str, tuple[str, str]] = {
    "bench": ("gradwire_lab.cli.bench", "experiments; codecs, all-reduce and training beside others"),
    "netlab": ("gradwire_lab.cli.netlab", "run any command in ranks, over links with a limited rate"),
    "simulate": ("gradwire_lab.cli.simulate", "predict training on a network that you do not have"),
    "switch": ("gradwire_lab.cli.switch", "an emulated switch that sums packets of integers"),
}
COMMANDS = {**USERS, **LABORATORY}


def overview() -> str:
    """What `gradwire` says when it is asked nothing else."""
    lines = ["usage: gradwire COMMAND [options]", "", "Gradient compression for PyTorch data-parallel training.", ""]
    lines += [f"  {name:10} {summary}" for name, (_, summary) in USERS.items()]
    lines += ["", "The laboratory, which measures the library:", ""]
    lines += [f"  {name:10} {summary}" for name, (_, summary) in LABORATORY.items()]
    return "\n".join([*lines, "", "`gradwire COMMAND --help` lists a command's options; `--version` the version."])


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns the process's exit status (0 done, 1 a gradwire error, 2 wrong usage, 130 Ctrl-C,
    141 nobody reads what it prints)."""
    arguments = sys.argv[1:] if argv is None else argv
    wanted = next((word for word in arguments if not word.startswith("-")), "")
    try:
        try:
            return _run(arguments, wanted)
        finally:
            sys.stdout.flush()  # here, not when the interpreter goes down
    except BrokenPipeError:
        printed = select.poll()
        printed.register(sys.stdout, 0)
        if not printed.poll(0):
            raise  # another pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # as in `gradwire ... | head`: it goes nowhere
        return 141
    except GradwireError as error:
        print(f"gradwire {wanted}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"gradwire {wanted}: interrupted", file=sys.stderr, flush=True)
        if argv is None:  # torch takes seconds to be taken down on a busy machine, and everything has been closed
            os._exit(130)
        return 130


def _run(arguments: list[str], wanted: str) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview())
        return 0
    parser = argparse.ArgumentParser(prog="gradwire", usage="gradwire COMMAND [options]")
    parser.add_argument("--version", action="version", version=f"gradwire {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, prog="gradwire")
    for name, (module_path, summary) in COMMANDS.items():
        words = f"{summary[0].upper()}{summary[1:]}."
        subparser = subparsers.add_parser(name, description=words, formatter_class=ShortHelp)
        if name == wanted:
            module = importlib.import_module(module_path)  # Raises: GradwireError (an extra is not installed).
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    args = parser.parse_args(arguments)
    return int(args.run(args))


if __name__ == "__main__":
    sys.exit(main())
