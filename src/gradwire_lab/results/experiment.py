"""An experiment as data: what is asked, what is measured, over which axes, and what of it is shown."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

# A point of the axes: {axis: value}.
Cell = dict[str, Any]
Kind = Literal["value", "ratio", "speed-up", "difference"]


class Ref(NamedTuple):
    """A figure or table of a paper, such as Ref("GComp", "Fig. 15")."""

    paper: str
    figure: str


class Coverage(NamedTuple):
    """Where a figure or table of a paper stands: "as in the paper", "differs", "not measured" or "cannot be here"; why."""

    state: str
    why: str


@dataclass(frozen=True)
class Column:
    """One field of the records, as it is shown."""

    field: str  # its name in the records
    title: str = ""  # the heading; the field's name without it
    scale: float = 1.0  # values are multiplied by it (1e3: seconds as ms)
    form: str = ".4g"  # of the scaled value, as in `format`
    # the value; a "ratio" to the baseline's (x ddp), how many times smaller ("speed-up"), or the "difference"
    kind: Kind = "value"
    against: str | None = None  # the baseline of this column where it is not the experiment's
    # beside the value its quartiles, or over seeds its standard deviation; of a difference its 95 % interval
    spread: bool = False

    @property
    def heading(self) -> str:
        return self.title or self.field.replace("_", " ")


def ms(field: str, title: str, *, spread: bool = False) -> Column:
    """Seconds shown as milliseconds."""
    return Column(field, title, 1e3, ",.0f", spread=spread)


def mb(field: str, title: str) -> Column:
    """Bytes shown as MB."""
    return Column(field, title, 1e-6, ",.2f")


@dataclass(frozen=True)
class Table:
    """Records as a table: a row for each value of the `rows` axes or fields, the columns repeated for each of `across`.

    `where`: {field: value or values} of the records that are shown.
    """

    columns: Sequence[Column]
    rows: Sequence[str] = ("scheme",)
    across: str | None = None
    where: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""


@dataclass(frozen=True)
class Plot:
    """Records as a plot: `y` over `x`, a line (or bars, or the part of stacked bars) for each value of `series`."""

    x: str
    y: Column
    series: str = "scheme"
    style: Literal["lines", "bars", "stacks"] = "lines"
    log: str = ""  # "x", "y", "xy"
    x_title: str = ""
    x_scale: float = 1.0
    where: Mapping[str, Any] = field(default_factory=dict)
    title: str = ""


@dataclass(frozen=True)
class Goal:
    """A bound that the `column` of the records of `where` is held to; without a `sign` only what a paper says of it."""

    says: str  # in words
    column: Column
    sign: Literal["<=", ">=", ""]
    bound: float
    where: Mapping[str, Any] = field(default_factory=dict)
    by: Sequence[str] = ()  # fields that a cell's records differ in, such as a phase: each is shown, not their mean
    paper: str = ""  # the paper's number, in the figure or table `of`; "" of a goal that no paper has
    of: Ref | None = None


@dataclass(frozen=True)
class Experiment:
    """What one file of results answers."""

    key: str  # name on the command line, and of the file of results
    system: str  # the page of the results that it is on
    question: str  # one sentence
    measure: str  # a name of `gradwire_lab.bench.measures`
    # {argument: its values, or {label: value}}; their product are the cells
    axes: Mapping[str, Sequence[Any] | Mapping[str, Any]]
    fixed: Mapping[str, Any] = field(default_factory=dict)  # its arguments that every cell shares
    # axes whose cells are measured in one run, in turns where the measure can: ratios between them hold
    together: Sequence[str] = ("scheme",)
    over: Sequence[str] = ()  # axes that are averaged over: seeds, folds
    # {axis: value} of the cell that ratios and differences are to, all other axes being equal
    baseline: Mapping[str, Any] = field(default_factory=dict)
    # values of the baseline's axis that do the very same as it; what lies between them is noise
    controls: Sequence[Any] = ()
    of: Sequence[Ref] = ()  # the papers' figures and tables that it gives, in kind
    show: Sequence[Table | Plot] = ()  # tables and plots, in order
    goals: Sequence[Goal] = ()  # what the papers say, and what was promised
    differs: str = ""  # from the papers' conditions; "" where nothing that matters does
    # about how long one run of the `together` cells takes on two cores; the store knows better once it has
    seconds: float = 60.0
    quick: bool = False  # part of `make bench`
    is_long: bool = False  # of the second list, which `gradwire bench run long` measures; `all` are the others

    def values(self, axis: str) -> list[Any]:
        """The values of an axis, without their labels."""
        given = self.axes[axis]
        return list(given.values() if isinstance(given, Mapping) else given)

    def label(self, axis: str, value: Any) -> str:
        """How a value of an axis is shown."""
        given = self.axes.get(axis)
        if isinstance(given, Mapping):
            return next((label for label, one in given.items() if one == value), str(value))
        return str(value)

    def cells(self) -> list[Cell]:
        """Every point of the axes, the last axis changing fastest."""
        return [dict(zip(self.axes, point, strict=True)) for point in itertools.product(*(map(self.values, self.axes)))]

    def groups(self) -> list[list[Cell]]:
        """The cells by run: those that differ in `together` axes alone. In the order of the axes."""
        return group(self.cells(), self.apart)

    def settings(self, cells: Sequence[Cell]) -> str:
        """A digest of all that is asked of a run: a record measured with others is not of it."""
        asked = [self.measure, sorted(self.fixed.items()), cells]
        return hashlib.sha256(json.dumps(asked, default=str).encode()).hexdigest()[:12]

    def apart(self, cell: Mapping[str, Any]) -> Cell:
        """What all cells of a run share."""
        return {axis: cell[axis] for axis in self.axes if axis not in self.together}


def group(things: Iterable[Any], key: Callable[[Any], Any]) -> list[list[Any]]:
    """Those of equal keys together, in order of the first of each."""
    groups: dict[str, list[Any]] = {}
    for thing in things:
        groups.setdefault(repr(key(thing)), []).append(thing)
    return list(groups.values())
