"""The one palette of every figure: what colour a scheme has, here, in a report and in a simulation.

A colour is a slot with a light and a dark shade. Slots are apart in hue and in lightness, and readable as text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

INK, MUTED, GRID, SURFACE = "#1b2430", "#5d6876", "#e2e6eb", "#fdfdfd"

SLOTS: dict[str, tuple[str, str]] = {
    "c0": ("#6f7a88", "#9aa5b4"),
    "c1": ("#1d5fd1", "#74a9ff"),
    "c2": ("#d2560c", "#ff9a57"),
    "c3": ("#0e8563", "#45cf9c"),
    "c4": ("#7a3fd0", "#bd9bff"),
    "c5": ("#c2297a", "#ff86c0"),
    "c6": ("#0a7d94", "#3fcbe2"),
    "c7": ("#94690a", "#e3b84d"),
    "c8": ("#b3261e", "#ff8a80"),
    "c9": ("#557a12", "#a9d94f"),
    "c10": ("#7d5138", "#d3a581"),
    "c11": ("#30373f", "#e8edf3"),
}
# Where the seconds of a step go.
PARTS = {
    "computation": ("#b8c4d2", "#4b5a6b"),
    "exposed communication": ("#c0392b", "#ef6a5b"),
    "waiting for slower ranks": ("#e6a6a0", "#8f4a44"),
}
# Schemes that appear on most pages keep their slot from page to page; all others take what is free, in order of name.
FIXED_SLOTS = {
    "plain": "c0",
    "ddp": "c11",
    "gcomp": "c1",
    "truncate": "c2",
    "power-sgd": "c3",
    "acp-sgd": "c4",
    "periodic": "c5",
    "zstd": "c6",
    "zlib": "c7",
    "top-k": "c8",
    "aqgb": "c9",
    "slimgc": "c10",
}
MARKERS = "osD^vPX<>"

# How every figure looks; matplotlib's settings.
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: the reader's own font, selectable, and a third of the size
    "text.parse_math": False,  # a `$` in a name is a dollar
    "font.family": "DejaVu Sans",  # ships with matplotlib; wider than the system fonts that take its place
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "xtick.minor.size": 2,
    "text.color": INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "lines.linewidth": 2,
    "lines.solid_capstyle": "round",
}


# CSS variable: (light, dark).
_VARIABLES: dict[str, tuple[str, str]] = {
    "ink": (INK, "#e6ebf1"),
    "muted": (MUTED, "#9ba7b5"),
    "grid": (GRID, "#2d3641"),
    "surface": (SURFACE, "#161b22"),
    **{part.partition(" ")[0]: colours for part, colours in PARTS.items()},
    **SLOTS,
}
_NAMES = {light: name for name, (light, _) in _VARIABLES.items()}


def css_variables(dark: bool) -> str:
    """The palette as CSS declarations."""
    return "".join(f"--{name}:{colours[dark]};" for name, colours in _VARIABLES.items())


def as_variable(colour: str) -> str:
    """A colour of the light palette as its CSS variable, any other as it is."""
    return f"var(--{_NAMES[colour]})" if colour in _NAMES else colour


def assign_slots(names: Iterable[str]) -> dict[str, tuple[str, int]]:
    """A slot for each of `names` that share a figure, and how often that slot was given before (0: never).

    A name with a fixed slot has it, with options (`gcomp:bits=10`) only where the bare name is not there. Free ones go
    round in order of name; after these, slots repeat, to be told apart by markers and dashes.
    """
    ordered = sorted(set(names))
    slots: dict[str, tuple[str, int]] = {}
    for name in ordered:
        bare = name.removesuffix(" paper").partition(":")[0]
        fixed = FIXED_SLOTS.get(bare)
        if fixed and (
            bare in (name, name.removesuffix(" paper")) or (bare not in ordered and _is_first(name, ordered))
        ):
            slots[name] = (fixed, 0)
    taken = {slot for slot, _ in slots.values()}
    free = [slot for slot in SLOTS if slot not in taken and slot not in ("c0", "c11")]
    usable = free or [slot for slot in SLOTS if slot not in ("c0", "c11")]
    for index, name in enumerate(name for name in ordered if name not in slots):
        slots[name] = (usable[index % len(usable)], index // len(usable) + (not free))
    return slots


def _is_first(name: str, names: list[str]) -> bool:
    """Whether it is the first of several with options: only one of them can have the fixed slot."""
    bare = name.partition(":")[0]
    return name == next(one for one in names if one.partition(":")[0] == bare)
