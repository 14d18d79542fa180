"""What can be measured: each measure takes one run of an experiment and returns a flat record a cell, or several.

To add one: a function of a `Call` in a module here, a line in `_MEASURES`, an experiment in the catalogue that names it.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.errors import InvalidArgument
from gradwire_lab.results.experiment import Cell, Experiment
from gradwire_lab.results.records import Record
from gradwire_lab.results.sources import source_hash

# name: "module:function" below this package; only the one that is called is imported.
_MEASURES: dict[str, str] = {
    "train": "commands:train",
    "overlap": "commands:overlap",
    "allreduce": "commands:allreduce",
    "codec": "commands:codec",
    "regret": "commands:regret",
    "training": "trainings:measure",
    "adaptation": "commands:adaptation",
    "gradient-spread": "gradients:measure_spread",
    "cross-tables": "gradients:measure_cross_tables",
    "mantissa": "gradients:measure_mantissas",
    "decoders": "gradients:measure_decoders",
    "float-errors": "float_methods:measure_errors",
    "float-training": "float_methods:measure_training",
    "ranks": "float_methods:measure_ranks",
    "sketch-formulas": "sketches:measure_formulas",
    "sketch-recovery": "sketches:measure_recovery",
    "shapes": "shapes:measure",
    "simulate": "simulated:measure",
    "simulate-rates": "simulated:measure_rates",
    "stragglers": "simulated:measure_stragglers",
    "reality": "reality:measure",
    "simulator-sizes": "reality:measure_sizes",
}

# What a measure writes into the sources themselves: others depend on it, so it comes first, and it does not itself.
WRITES = {"simulator-sizes": "measured.json"}


class Call(NamedTuple):
    """One run of an experiment, whose `key` it has."""

    key: str
    cells: list[Cell]  # measured together
    shared: Cell  # the axes that all cells have the same value of
    fixed: dict[str, Any]  # arguments of all cells of the experiment
    folder: Path  # of working files

    def get(self, name: str, default: Any = None) -> Any:
        """An argument that all cells share."""
        return {**self.fixed, **self.shared}.get(name, default)

    def values(self, axis: str) -> list[Any]:
        """The cells' values of an axis, each once, in order."""
        return list(dict.fromkeys(cell[axis] for cell in self.cells))

    def arguments(self, *axes: str) -> dict[str, Any]:
        """All arguments; those of `axes` as lists of the cells' values."""
        return {**self.fixed, **self.shared, **{axis: self.values(axis) for axis in axes}}


Measured = list[tuple[Cell, Record]]
Measure = Callable[[Call], Measured]


def cell_by_cell(measure: Callable[..., Record | list[Record]]) -> Measure:
    """The measure that asks `measure` for the record, or records, of one cell after the other: all arguments by name."""

    def measure_all(call: Call) -> Measured:
        found = [(cell, measure(call, **{**call.fixed, **cell})) for cell in call.cells]
        return [(cell, one) for cell, records in found for one in (records if isinstance(records, list) else [records])]

    return measure_all


def by_name(name: str) -> Measure:
    """Raises: InvalidArgument, Unsupported (packages that it needs are missing)."""
    if name not in _MEASURES:
        raise InvalidArgument(f"no measure is called {name!r}; there are: {', '.join(_MEASURES)}")
    module, _, function = _MEASURES[name].partition(":")
    return getattr(importlib.import_module(f"gradwire_lab.bench.measures.{module}"), function)


def code_of(asked: Experiment) -> str:
    """The digest of the sources that its records depend on."""
    module, without = _MEASURES[asked.measure].partition(":")[0], WRITES.get(asked.measure, "")
    return source_hash(f"gradwire_lab.bench.measures.{module}", without, f"{asked.fixed} {asked.axes}")
