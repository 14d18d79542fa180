"""Where tables go: the terminal, or a file or pipe, which has no width of its own."""

from __future__ import annotations

from rich.console import Console

# Wide enough for every table here; rich would fold them to 80 columns when its output is piped.
_PIPED_COLUMNS = 170


def make_console() -> Console:
    """A console for results (stdout)."""
    console = Console()
    return console if console.is_terminal else Console(width=_PIPED_COLUMNS)
