"""The rules that keep the house: which room may use which, and where a kind of code may stand.

A rule has no exceptions, or a list of them that may only shrink: one that is no longer needed fails its test too.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
LIBRARY, LABORATORY = SOURCE / "gradwire", SOURCE / "gradwire_lab"
SOURCES = sorted(
    path
    for folder in ("src", "tests", "native", "examples")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".pyi", ".cpp", ".hpp", ".cu"}
)
MODULES = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}

# From the ground up. A room may use those before it, and no others; files loose in a package are rooms of their own.
FLOORS_OF_THE_LIBRARY = (
    "errors _native", "registry checks", "telemetry", "gpu", "wire codecs", "core", "exchange", "stepping", "schemes",
    "reducer", "doors", "planning integrations",
)  # fmt: skip
FLOORS_OF_THE_LABORATORY = ("ranks results switch", "workloads", "training report", "simulator", "bench", "cli")
FLOOR_OF = {
    room: floor
    for floor, rooms in enumerate(FLOORS_OF_THE_LIBRARY + FLOORS_OF_THE_LABORATORY)
    for room in rooms.split()
}

# Lines that each room may have; "loose" are a package's files that are in no room. In a group budgets and reserve make the
# total: later work that needs more in a room takes it from the reserve, here, and what it deletes it gives back.
BUDGETS = {
    "Python": {
        "gradwire/loose": 1_100, "gradwire/telemetry": 940, "gradwire/wire": 1_735, "gradwire/codecs": 2_600,
        "gradwire/gpu": 510, "gradwire/core": 1_200, "gradwire/exchange": 990, "gradwire/stepping": 790,
        "gradwire/schemes": 10_530, "gradwire/doors": 2_160, "gradwire/planning": 550, "gradwire/integrations": 170,
        "gradwire_lab/loose": 280, "gradwire_lab/ranks": 1_790, "gradwire_lab/results": 1_495,
        "gradwire_lab/workloads": 2_010, "gradwire_lab/training": 1_330, "gradwire_lab/report": 620,
        "gradwire_lab/simulator": 3_000, "gradwire_lab/bench": 5_130, "gradwire_lab/cli": 1_770,
        "gradwire_lab/schemes": 160,
    },
    "native": {"native": 15_290, "gradwire/gpu/source": 3_680},
    "tests": {"tests": 36_000},
}  # fmt: skip
RESERVES = {"Python": 60, "native": 20, "tests": 0}
TOTALS = {"Python": 40_920, "native": 18_990, "tests": 36_000}


MOST_PARAMETERS = 9
MOST_LINES = 820
FEWEST_LINES_OF_CODE = 12
CLOCKS = {
    "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time", "process_time_ns", "thread_time",
}  # fmt: skip
MAKERS = "arange as_tensor empty eye full linspace ones rand randint randn randperm scalar_tensor tensor zeros"
MAKES_TENSORS = {f"torch.{name}" for name in MAKERS.split()}
# Waiting, timing and timeouts are the work of these rooms; an algorithm asks its wire or record.
ROOMS_WITH_CLOCKS = {"wire", "telemetry", "bench", "ranks", "cli"}


def room_of(path: Path) -> str:
    """`gradwire/wire/preamble.py` -> wire; `gradwire/errors.py` -> errors."""
    return path.relative_to(SOURCE).parts[1].removesuffix(".py")


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def imported(tree: ast.Module) -> Iterator[str]:
    """The dotted modules of both packages that `tree` imports, wherever in it."""
    ours = ("gradwire", "gradwire_lab")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ours:
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in ours)


def module_file(dotted: str) -> Path | None:
    """The file that `gradwire.wire.preamble.Facts` is in."""
    parts = dotted.split(".")
    while len(parts) > 1:
        place = SOURCE.joinpath(*parts)
        if place.with_suffix(".py").is_file():
            return place.with_suffix(".py")
        if (place / "__init__.py").is_file():
            return place / "__init__.py"
        parts.pop()
    return None


def test_every_room_has_a_floor_and_says_what_it_is() -> None:
    rooms = {room_of(path) for path in MODULES} - {"__init__", "__main__"}
    assert rooms <= set(FLOOR_OF), f"no floor for {rooms - set(FLOOR_OF)}"
    for path, tree in MODULES.items():
        assert ast.get_docstring(tree), f"{name_of(path)} does not say what it is"
        assert (path.parent / "__init__.py").is_file(), f"{name_of(path)} is in no package"


def test_arrows_between_rooms_go_down() -> None:
    arrows = set()
    for path, tree in MODULES.items():
        for dotted in imported(tree):
            target = module_file(dotted)
            if target is None or room_of(path) in ("__init__", "__main__"):
                continue
            here, there = room_of(path), room_of(target)
            if here != there and FLOOR_OF[there] >= FLOOR_OF[here]:
                arrows.add(f"{here} -> {there}")
    assert not arrows, "rooms use what is above them"


def test_the_library_never_imports_the_laboratory() -> None:
    """Nor names a module of it, for an import at run time."""
    for path, tree in MODULES.items():
        if path.is_relative_to(LIBRARY):
            texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
            named = [text for text in texts if isinstance(text, str) and re.fullmatch(r"gradwire_lab[\w.:]*", text)]
            named += [dotted for dotted in imported(tree) if dotted.startswith("gradwire_lab")]
            assert not named, f"{name_of(path)} names {named}"


def circle_in(graph: dict[Path, set[Path]]) -> list[Path]:
    """The files of the first circle that a walk along the arrows closes, or none."""
    trail: list[Path] = []
    done: set[Path] = set()

    def visit(path: Path) -> list[Path]:
        trail.append(path)
        for target in graph[path] - done:
            if target in trail:
                return [*trail[trail.index(target) :], target]
            if circle := visit(target):
                return circle
        done.add(trail.pop())
        return []

    return next((circle for path in graph if path not in done and (circle := visit(path))), [])


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {
        path: {f for d in imported(tree) if (f := module_file(d)) not in (None, path)} for path, tree in MODULES.items()
    }
    for path in graph:  # a package's face names its parts, and its parts may name siblings through it
        graph[path] = {target for target in graph[path] if target.name != "__init__.py"}
    assert [name_of(path) for path in circle_in(graph)] == []


def test_a_circle_is_found() -> None:
    a, b, c, d = (Path(name) for name in "abcd")
    assert circle_in({a: {b}, b: {c, d}, c: {d}, d: {b}})[0] in (b, c, d)
    assert circle_in({a: {b, c}, b: {d}, c: {d}, d: set()}) == []


def test_no_class_name_twice() -> None:
    places = defaultdict(list)
    for path, tree in MODULES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(name_of(path))
    assert not {name: files for name, files in places.items() if len(files) > 1}, "one word, two things"


def test_no_long_constructor() -> None:
    found = set()
    for path, tree in MODULES.items():
        for node in ast.walk(tree):
            for method in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    arguments = method.args
                    n_parameters = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs) - 1
                    if n_parameters > MOST_PARAMETERS:
                        found.add(f"{name_of(path)}:{node.name}")
    assert not found, f"more than {MOST_PARAMETERS} parameters"


def files_that_ask_for(names: set[str]) -> set[Path]:
    """For an attribute of one of these names, of whatever object."""
    attributes = {path: {getattr(node, "attr", "") for node in ast.walk(tree)} for path, tree in MODULES.items()}
    return {path for path, asked in attributes.items() if asked & names}


def test_arguments_are_parsed_in_command_files_only() -> None:
    found = {name_of(path) for path in files_that_ask_for({"add_argument"}) if "cli" not in (room_of(path), path.stem)}
    assert not found, "add_argument outside a command file"


def test_clocks_are_read_where_time_is_measured() -> None:
    found = {name_of(path) for path in files_that_ask_for(CLOCKS) if room_of(path) not in ROOMS_WITH_CLOCKS}
    assert not found, "a clock is read"


def test_tensors_are_made_with_a_dtype_and_a_device() -> None:
    """Scripts set torch's defaults: `torch.set_default_dtype(torch.bfloat16)`, `torch.set_default_device("cuda")`."""
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path, tree in MODULES.items()
        if path.is_relative_to(LIBRARY)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in MAKES_TENSORS
        if not {"dtype", "device"} <= {keyword.arg for keyword in node.keywords}
    ]
    assert not found, f"tensors of whatever dtype or device is the default: {found}"


def test_what_a_linter_is_told_to_pass_over_says_why() -> None:
    """`# type: ignore[...]  # why`, `# noqa: ... - why`; better is to have nothing to pass over."""
    silent = re.compile(r"# (type: ignore(\[[\w, -]+\])?|noqa(: \w+)?)\s*$", re.MULTILINE)
    found = {name_of(path) for path in MODULES if silent.search(path.read_text())}
    assert not found, "no reason is given"


def test_no_long_file() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in SOURCES}
    assert len(lengths) > 500
    found = {str(path.relative_to(ROOT)) for path, n_lines in lengths.items() if n_lines > MOST_LINES}
    assert not found, f"more than {MOST_LINES} lines: it has two subjects"


def test_no_file_for_a_few_lines() -> None:
    """Of code: without comments and docstrings."""
    found = set()
    for path, tree in MODULES.items():
        docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        counted = (node for node in ast.walk(tree) if isinstance(node, ast.expr | ast.stmt | ast.arg | ast.alias))
        lines = {node.lineno for node in counted if node not in docstrings and not isinstance(node, ast.Expr)}
        if len(lines) < FEWEST_LINES_OF_CODE and path.name not in ("__init__.py", "__main__.py"):
            found.add(name_of(path))
    assert not found, f"under {FEWEST_LINES_OF_CODE} lines of code: it belongs to another file"


def lines_by_room() -> dict[str, int]:
    """`gradwire/wire`, `native`, `tests` and so on: lines of sources, and in the packages of their data too."""
    lines: dict[str, int] = defaultdict(int)
    data = [path for path in SOURCE.rglob("*") if path.suffix in {".json", ".j2", ".css"}]
    for path in [*SOURCES, *data]:
        room = path.relative_to(ROOT).parts[0]
        if room == "src":
            package, *rest = path.relative_to(SOURCE).parts
            is_device = path.is_relative_to(LIBRARY / "gpu" / "source")
            room = "gradwire/gpu/source" if is_device else f"{package}/{rest[0] if len(rest) > 1 else 'loose'}"
        lines[room] += len(path.read_text().splitlines())
    del lines["examples"]  # pages of the documentation
    return lines


def test_rooms_keep_to_their_budgets() -> None:
    lines = lines_by_room()
    budgets = {room: budget for rooms in BUDGETS.values() for room, budget in rooms.items()}
    for group, rooms in BUDGETS.items():
        for room, budget in rooms.items():
            print(f"{room:24}{lines[room]:8,} of {budget:,}")
        print(f"{group + ' in all':24}{sum(lines[room] for room in rooms):8,}, reserve {RESERVES[group]:,}\n")
        assert sum(rooms.values()) + RESERVES[group] == TOTALS[group], (
            f"{group}: take it from the reserve, or give it back"
        )
    assert set(lines) == set(budgets), "a room without a budget, or a budget without a room"
    over = {room: n - budgets[room] for room, n in lines.items() if n > budgets[room]}
    assert not over, f"over their budgets by so many lines: {over}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_private_member_of_another_class(path: Path) -> None:
    """`self._x` and `cls._x` only, and module-level names of the file itself."""
    for node in ast.walk(MODULES[path]):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("gradwire"):
            private = {alias.name for alias in node.names if alias.name.startswith("_")} - {"_native", "__version__"}
            assert not private, f"line {node.lineno} takes {private} from {node.module}"
