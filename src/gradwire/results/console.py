"""Where tables go: the terminal, or a file or pipe, which has no width of its own. No name and no number is ever cut."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

# Wide enough for every table here; rich would fold them to 80 columns when its output is piped.
_PIPED_COLUMNS = 170
# How wide the terminal is that this process's pipe ends in; set for ranks by their launcher, and by --wide.
_COLUMNS = "GRADWIRE_COLUMNS"


class ResultConsole(Console):
    """A console that prints a table which is wider than it is row by row, instead of cutting its cells."""

    def print(self, *objects: Any, **options: Any) -> None:
        """As Console.print."""
        super().print(*(self._fitting(one) if isinstance(one, Table) else one for one in objects), **options)

    def _fitting(self, table: Table) -> Table | Text:
        needed = Measurement.get(self, self.options.update(max_width=10_000), table).maximum
        return table if needed <= self.width else self._by_row(table)

    def _by_row(self, table: Table) -> Text:
        """The first cell of each row, and indented below it the others behind their columns' names, as many as fit."""
        lines = [Text.from_markup(str(table.title)), Text()] if table.title else []
        names = [_as_text(column.header) for column in table.columns]
        for cells in zip(*(column.cells for column in table.columns), strict=True):
            first, *others = (_as_text(cell) for cell in cells)
            lines.append(Text(first, style="bold"))
            line = " "
            for name, value in zip(names[1:], others, strict=True):
                part = f" {name} {value}".rstrip()
                if len(line) > 1 and len(line) + 1 + len(part) > self.width:
                    lines.append(Text(line))
                    line = " "
                line += part if line == " " else "," + part
            if line.strip():
                lines.append(Text(line))
        if table.caption:
            lines += [Text(), Text.from_markup(str(table.caption))]
        return Text("\n", no_wrap=True, overflow="ignore").join(lines)


def _as_text(cell: Any) -> str:
    text = Text.from_markup(cell) if isinstance(cell, str) else cell
    return " ".join(str(getattr(text, "plain", text)).split())


def make_console() -> Console:
    """A console for results (stdout)."""
    told = os.environ.get(_COLUMNS, "")
    if told.isdecimal():
        return ResultConsole(width=int(told))
    console = ResultConsole()
    return console if console.is_terminal else ResultConsole(width=_PIPED_COLUMNS)


def tell_ranks_the_width() -> None:
    """For a launcher, whose ranks write through a pipe: they are told how wide the terminal at its end is."""
    if sys.stdout.isatty():
        os.environ.setdefault(_COLUMNS, str(shutil.get_terminal_size().columns))


WIDE_HELP = "print tables as such where the terminal is too narrow for them; else they come row by row"


class Wide(argparse.Action):
    """The action of `--wide`."""

    def __call__(self, *_: Any) -> None:
        os.environ[_COLUMNS] = str(_PIPED_COLUMNS)
