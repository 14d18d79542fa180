"""Options that mean the same in every command, and how an option is added: in one line, its default behind its help."""

import argparse
from pathlib import Path
from typing import Any


class ShortHelp(argparse.RawDescriptionHelpFormatter):
    """Help that fits a screen: the usage in one line, `VALUE ...` for several, `--no-x` for what is on, 80 columns."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=80)

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        places = [self._format_args(one, str(one.metavar or one.dest)) for one in actions if not one.option_strings]
        return f"usage: {usage % {'prog': self._prog} if usage else ' '.join([self._prog, '[options]', *places])}\n\n"

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs in ("+", "*"):
            return f"{action.metavar or default_metavar} ..."
        return super()._format_args(action, default_metavar)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return action.option_strings[-1]
        return super()._format_action_invocation(action)


def option(
    parser: argparse.ArgumentParser, name: str, metavar: str, help: str, default: Any = None, **more: Any
) -> None:
    """Add an option with a value, of its default's type; more keywords are argparse's."""
    if default is not None and default != []:
        help += f" (default: {' '.join(map(str, default)) if isinstance(default, list) else default})"
        if not isinstance(default, list):
            more.setdefault("type", type(default))
    parser.add_argument(name, metavar=metavar, default=default, help=help.replace("%", "%%"), **more)


def switch(parser: argparse.ArgumentParser, name: str, help: str) -> None:
    parser.add_argument(name, action="store_true", help=help)


def add_workload(parser: argparse.ArgumentParser, default: str | None = "gpt") -> None:
    option(parser, "--workload", "NAME", "as NAME:option=value,...", default)


def add_ranks(parser: argparse.ArgumentParser, default: int | None = None, rate: str = "none") -> None:
    if default is None:
        option(parser, "--ranks", "N", "ranks to start here (default: 4, or torchrun's)", type=int)
    else:
        option(parser, "--ranks", "N", "ranks to start here", default)
    option(parser, "--rate", "RATE", "each rank's link: 100mbit, none", rate)


def add_way(parser: argparse.ArgumentParser) -> None:
    """How far the ranks are from each other, beside `--rate`; `netlab.rate.with_way` reads it."""
    option(parser, "--delay", "TIME", "one way between ranks: 20ms")
    option(parser, "--jitter", "TIME", "packets come so much earlier or later: 1ms")
    option(parser, "--loss", "SHARE", "of the packets: 0.05%")
    option(parser, "--sites", "SxR", "sites of so many ranks: 2x2")
    option(parser, "--site-delay", "TIME", "added one way between sites: 40ms")


def add_json(parser: argparse.ArgumentParser, what: str = "write a list of flat records", *, csv: bool = False) -> None:
    option(parser, "--json", "FILE", what, type=Path)
    if csv:
        option(parser, "--csv", "FILE", "write the records as a table", type=Path)
