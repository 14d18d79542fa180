"""What a record depends on: the sources that can change a measured number, as one digest that needs no git."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2]
# What cannot change a measured number: what is shown of it, and what is asked.
_NOT_MEASURING = tuple(f"gradwire_lab/{room}/" for room in ("results", "report", "cli", "bench/catalogue"))
_SUFFIXES = {".py", ".pyi", ".json", ".npz", ".hpp", ".cu"}


@functools.cache
def source_hash(without: str = "") -> str:
    """A digest of both packages and the C++ core's sources, `without` the file of this name.

    The core by its sources where they are there, since the same sources do not give the same binary everywhere.
    """
    found = [one for package in ("gradwire", "gradwire_lab") for one in (SOURCES / package).rglob("*")]
    found = [one for one in found if one.suffix in _SUFFIXES and one.name != without]
    found = [one for one in found if not one.relative_to(SOURCES).as_posix().startswith(_NOT_MEASURING)]
    native = SOURCES.parent / "native"
    found += [*native.rglob("*.cpp"), *native.rglob("*.hpp")] or SOURCES.glob("gradwire/_native*.so")
    digest = hashlib.sha256()
    for path in sorted(found):
        digest.update(path.relative_to(SOURCES.parent).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
