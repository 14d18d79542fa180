"""What a record depends on: the sources of what measured it, as one digest that needs no git."""

import ast
import functools
import hashlib
import re
from pathlib import Path
from tokenize import COMMENT, DEDENT, INDENT, NEWLINE, NL, STRING, generate_tokens

from gradwire.schemes.auto.fidelity import NEVER

SOURCES = Path(__file__).resolve().parents[2]
PACKAGES = ("gradwire", "gradwire_lab")
# What cannot change a measured number: what is shown of it, what is asked, and in which order.
_NOT_MEASURING = tuple(
    f"gradwire_lab/{name}" for name in ("results/", "report/", "cli/", "bench/catalogue/", "bench/runner.py")
)
# Unless what runs there imports it.
_IN_NO_RANK = tuple(f"gradwire_lab/{name}" for name in ("simulator/", "bench/measures/", "training/simulated.py"))
_USES = ("gradwire/schemes/", "gradwire_lab/")
_SCHEMES = SOURCES / "gradwire" / "schemes" / "__init__.py"
_CORE = SOURCES / "gradwire" / "_native.pyi"
# Settings with one of these may use schemes that they do not name.
_ANY_SCHEME = re.compile("auto|two-level|shard|fsdp|hsdp")
_HOMES = re.compile(r'"([\w-]+)": "gradwire\.schemes\.(\w+)')
_DATA = {".json", ".npz", ".hpp", ".cu"}
_DOTTED = re.compile(r"gradwire(?:_lab)?(?:\.\w+)+")


@functools.cache
def source_hash(module: str, without: str = "", settings: str = "") -> str:
    """A digest of every file that `module` depends on as it is asked, `without` the one of this name, which it writes."""
    digest = hashlib.sha256()
    for path in files_of(module, unused_schemes(settings)):
        name = path.relative_to(SOURCES.parent).as_posix()
        if path.name != without:
            digest.update(name.encode() + b"\0" + _code(path))
    return digest.hexdigest()[:12]


@functools.cache
def _code(path: Path) -> bytes:
    """What a file says; of Python without comments, docstrings and empty lines, which change no number."""
    if path.suffix not in (".py", ".pyi"):
        return path.read_bytes()
    lines, begins = path.read_text(encoding="utf-8").splitlines(), True
    for kind, _, (row, column), (end, _), _ in generate_tokens(iter([f"{line}\n" for line in lines]).__next__):
        if kind == COMMENT:
            lines[row - 1] = lines[row - 1][:column].rstrip()
        elif kind == STRING and begins:
            lines[row - 1 : end] = [""] * (end - row + 1)
        begins = kind in (NEWLINE, INDENT, DEDENT) or (begins and kind in (COMMENT, NL))
    return "\n".join(filter(None, lines)).encode()


def unused_schemes(settings: str) -> tuple[str, ...]:
    """Where those schemes lie that `settings`, a text, do not name; what lets `auto` choose may use all that it ever tries."""
    said, homes = re.findall(r"[\w-]+", settings), _HOMES.findall(_SCHEMES.read_text(encoding="utf-8"))
    tried = {"auto", *({*dict(homes)} - {*NEVER})} if _ANY_SCHEME.search(settings) else set()
    used = {home for name, home in homes if name in said or name in tried}
    unused = {home for _, home in homes} - used if settings else ()
    return tuple(f"gradwire/schemes/{home}{end}" for home in sorted(unused) for end in (".py", "/"))


@functools.cache
def files_of(module: str, unused: tuple[str, ...] = ()) -> list[Path]:
    """The files that `module` depends on, those of rooms that only show results left out. These are the modules that it
    imports, directly or not, or names in a registry, the data files beside them, and the sources of the C++ core where
    one of them uses it. What starts a process of its own depends on everything that can run there, but for `unused` rooms."""
    found, waiting = set[Path](), [path for path in [_file(module)] if path]
    elsewhere = (*_IN_NO_RANK, *unused)
    while waiting:
        path = waiting.pop()
        if path not in found and not _lies_in(_NOT_MEASURING, path):
            found.add(path)
            used, starts_a_process = _used(path)
            if starts_a_process:
                waiting += [_CORE, *(one for one in SOURCES.rglob("*.py") if not _lies_in(elsewhere, one))]
            named = [one for name in used if (one := _file(name))]
            # What makes schemes by their names, and doors that know `auto`, import what is not made.
            waiting += [
                one for one in named if (_lies_in(_USES, path) and path != _SCHEMES) or not _lies_in(unused, one)
            ]
    if _CORE in found:
        # The core by its sources where they are there, since the same sources do not give the same binary everywhere.
        native = SOURCES.parent / "native"
        found |= {*native.rglob("*.cpp"), *native.rglob("*.hpp")} or set(SOURCES.glob("gradwire/_native*.so"))
    found |= {one for path in list(found) for one in path.parent.iterdir() if one.suffix in _DATA}
    return sorted(path for path in found if not _lies_in(_NOT_MEASURING, path))


def _lies_in(rooms: tuple[str, ...], path: Path) -> bool:
    return path.is_relative_to(SOURCES) and path.relative_to(SOURCES).as_posix().startswith(rooms)


@functools.cache
def _used(path: Path) -> tuple[list[str], bool]:
    """The dotted names that a module imports or holds as strings, and whether it starts `python -m` something."""
    names, starts_a_process = [], False
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            starts_a_process |= node.value == "-m"
            # `gradwire.schemes.thc` of `gradwire.schemes.thc:ThcScheme`, as registries name what they import when asked.
            names += [found.group()] if (found := _DOTTED.match(node.value)) else []
    return names, starts_a_process


def _file(name: str) -> Path | None:
    """The file of a dotted name: of the module, or of the one that has it; None outside both packages."""
    parts = name.split(".")
    if parts[0] not in PACKAGES:
        return None
    bases = [SOURCES.joinpath(*parts[:length]) for length in (len(parts), len(parts) - 1)]
    places = (path for base in bases for path in (*map(base.with_suffix, (".py", ".pyi")), base / "__init__.py"))
    return next(filter(Path.is_file, places), None)
