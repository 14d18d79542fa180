"""Options that mean the same in every command, and how an option is added: in one line, its default behind its help."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


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
    """Add an option without a value."""
    parser.add_argument(name, action="store_true", help=help)


def add_workload(parser: argparse.ArgumentParser, default: str | None = "gpt") -> None:
    """`--workload`."""
    option(parser, "--workload", "NAME", "what to train, its options as NAME:option=value,...", default)


def add_ranks(parser: argparse.ArgumentParser, default: int | None = None, rate: str = "none") -> None:
    """`--ranks`, and `--rate` of the links between them."""
    if default is None:
        option(parser, "--ranks", "N", "processes to start here (default: 4; under torchrun its own)", type=int)
    else:
        option(parser, "--ranks", "N", "processes to start here", default)
    option(parser, "--rate", "RATE", "each rank's link, such as 100mbit or 2.5gbit; none: not limited", rate)


def add_json(parser: argparse.ArgumentParser, what: str = "write a list of flat records", *, csv: bool = False) -> None:
    """`--json`, and `--csv`."""
    option(parser, "--json", "FILE", what, type=Path)
    if csv:
        option(parser, "--csv", "FILE", "write the records as a table", type=Path)
