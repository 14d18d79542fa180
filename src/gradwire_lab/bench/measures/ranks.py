"""Losses by the number of ranks, which this process plays: real codecs at every hop, no network."""

from __future__ import annotations

from gradwire.registry import parse_spec
from gradwire_lab import workloads
from gradwire_lab.bench.measures import Call
from gradwire_lab.results.experiment import Cell
from gradwire_lab.results.store import Record
from gradwire_lab.training import simulated

CONTROL = "control"  # plain, with gradients as far off as one rounding of float32
_ROUNDING = 2.0**-24


def measure(call: Call) -> list[tuple[Cell, Record]]:
    """One training a cell: axes `scheme`, `seed`, `ranks`; the batch of a step is the same at any number of ranks."""
    name, options = parse_spec(str(call.get("workload")))
    found = []
    for cell in call.cells:
        n_ranks, spec = int(cell["ranks"]), str(cell["scheme"])
        workload = workloads.by_name(name, **options, batch_size=int(call.get("global_batch")) // n_ranks)
        scheme, disturb = ("plain", _ROUNDING) if spec == CONTROL else (spec, 0.0)
        record = simulated.train(workload, scheme, n_ranks, int(call.get("steps")), int(cell["seed"]), disturb)
        found.append((cell, {**record, "losses": None, "loss": record["losses"][-1]}))
    return found
