"""The one style of every table: as Markdown, and as text of at most 80 columns that never cuts a name."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 80
# A longer name takes a line of its own, and its values the next one.
_LONGEST_NAME = 26
_GAP = "  "


@dataclass(frozen=True)
class Grid:
    """A table as words. The first column names a row; the others come in the order of what they are worth."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    n_names: int = 1  # how many of the first columns name a row


def to_markdown(grid: Grid) -> str:
    """The table with all its columns; numbers on the right."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in (grid.headings, *grid.rows)]
    rule = ["---"] * grid.n_names + ["---:"] * (len(grid.headings) - grid.n_names)
    lines = ["| " + " | ".join(row) + " |" for row in (escaped[0], rule, *escaped[1:])]
    if grid.title:
        lines = [f"**{grid.title}**", "", *lines]
    return "\n".join([*lines, *(["", grid.caption] if grid.caption else [])]) + "\n"


def to_text(grid: Grid, width: int | None = WIDTH) -> str:
    """The table for a terminal: as many columns as fit into `width`, all of them without one."""
    names = [" ".join(filter(None, row[: grid.n_names])) for row in grid.rows]
    columns = [list(column) for column in zip(*(row[grid.n_names :] for row in grid.rows), strict=True)]
    headings = list(grid.headings[grid.n_names :])
    wide = max((len(name) for name in names), default=0)
    name_width = wide if width is None else min(wide, _LONGEST_NAME)
    name_width = max(name_width, len(" ".join(grid.headings[: grid.n_names])))
    shown, used = [], name_width
    for heading, column in zip(headings, columns, strict=True):
        needed = len(_GAP) + max(len(heading), *(len(cell) for cell in column))
        if width is not None and used + needed > width:
            break
        shown.append((heading, column, needed - len(_GAP)))
        used += needed
    lines = [grid.title] if grid.title else []
    head = _GAP.join(heading.rjust(size) for heading, _, size in shown)
    first = " ".join(grid.headings[: grid.n_names]).ljust(name_width)
    lines += [f"{first}{_GAP}{head}".rstrip(), "-" * used] if any(grid.headings) else []
    for index, name in enumerate(names):
        values = _GAP.join(column[index].rjust(size) for _, column, size in shown)
        if len(name) > name_width:
            lines.append(name)
            name = ""
        lines.append(f"{name.ljust(name_width)}{_GAP}{values}".rstrip())
    left_out = headings[len(shown) :]
    if left_out:
        lines.append(f"--wide also shows: {', '.join(left_out)}")
    if grid.caption:
        lines += textwrap.wrap(grid.caption, width or used)
    return "\n".join(lines) + "\n"


def print_grid(grid: Grid, wide: bool = False) -> None:
    """Onto standard output: in the terminal's width, at least 80 columns, or 80 into a file or pipe; `wide`: all columns."""
    width = max(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns) if sys.stdout.isatty() else WIDTH
    print(to_text(grid, None if wide else width), flush=True)
