"""Numbers of the homomorphic paper's figures 2 and 3, and of the codec's speed."""

from __future__ import annotations

from typing import Any

import torch

from gradwire.codecs import bloom_filter, sketch_sizes
from gradwire.codecs.bloom_filter import BloomShape
from gradwire.codecs.count_sketch import MAX_CORE, CountSketch, Outcome, index_words, write_index
from gradwire.core.threads import thread_count
from gradwire.errors import CorruptMessage, InvalidArgument
from gradwire_lab.bench.measures import Call
from gradwire_lab.bench.sources import GradientSource
from gradwire_lab.bench.timing import Task, threads, time_interleaved
from gradwire_lab.results.experiment import Cell
from gradwire_lab.results.store import Record

_BUILT_BITS = 32


def measure_formulas(call: Call) -> list[tuple[Cell, Record]]:
    """Fig. 2 in theory: bits of bitmap + sketch, Bloom filter + sketch and the bound, as shares of the plain values.

    Axes `value_bits`, `density`.
    """
    return [(cell, formulas(cell["value_bits"], cell["density"])) for cell in call.cells]


def formulas(value_bits: int, density: float) -> Record:
    """One record of `measure_formulas`."""
    bound, bitmap, bloom = (
        size(1.0, density, value_bits) / value_bits
        for size in (sketch_sizes.bound_bits, sketch_sizes.bitmap_bits, sketch_sizes.bloom_bits)
    )
    return {
        "value_bits": value_bits,
        "density": density,
        "bound_share": bound,
        "bitmap_share": bitmap,
        "bloom_share": bloom,
        "best_over_bound": min(bitmap, bloom) / bound,
        "best": "bitmap" if bitmap <= bloom else "bloom",
    }


def measure_sizes(call: Call) -> list[tuple[Cell, Record]]:
    """Fig. 2 as built: axes `density`, `pattern`."""
    n = int(call.get("n_elements"))
    return [(cell, built_sizes(n, _density(cell["density"]), str(cell["pattern"]))) for cell in call.cells]


def measure_recovery(call: Call) -> list[tuple[Cell, Record]]:
    """Fig. 3: axis `sketch_size`, as a share of the gradient's."""
    n, density = int(call.get("n_elements")), _density(call.get("density"))
    gradient = torch.from_numpy(GradientSource(None, density, str(call.get("pattern", "element"))).gradient(0, n))
    found = []
    for cell in call.cells:
        size = cell["sketch_size"]
        found.append((cell, {**recovery(gradient, size), "size": size}))
    return found


def measure_speed(call: Call) -> list[tuple[Cell, Record]]:
    """GB/s of float32 values, medians: compression, what can be done while the sketch travels, and what comes after.

    Axes `n_elements`, `density`; `threads`, `rounds`.
    """
    found = []
    with threads(int(call.get("threads", 1))):
        for cell in call.cells:
            n, density = int(cell["n_elements"]), _density(cell["density"])
            record = _time_one(n, density, str(call.get("pattern", "element")), int(call.get("rounds", 7)))
            found.append((cell, {**record, "share_of_nonzeros": record["density"]}))
    return found


def _density(value: Any) -> float:
    if not 0 < float(value) < 1:
        raise InvalidArgument(f"density {value}: expected above 0 and below 1")
    return float(value)


def built_sizes(n_elements: int, density: float, pattern: str) -> Record:
    """What the codec sends for a random index of `n_elements` float32, beside formulas and bound; every sketch peels."""
    index, n_nonzeros = _random_index(n_elements, density, pattern)
    share = n_nonzeros / n_elements
    sketch = CountSketch()
    bitmap_cells, attempts = _peeled_cells(sketch, index, n_elements)
    shape = BloomShape.fit(n_nonzeros, n_elements, sketch.gamma)
    filter_words = torch.empty(shape.n_words, dtype=torch.int32)
    bloom_filter.insert(index, n_elements, shape, 0, filter_words)
    candidates = torch.empty_like(index)
    n_candidates = bloom_filter.query(filter_words, n_elements, shape, 0, candidates).n_candidates
    bloom_cells, _ = _peeled_cells(sketch, candidates, n_elements)
    bitmap = (32 * index.numel() + _BUILT_BITS * bitmap_cells) / (_BUILT_BITS * n_elements)
    bloom = (32 * shape.n_words + _BUILT_BITS * bloom_cells) / (_BUILT_BITS * n_elements)
    bound = sketch_sizes.bound_bits(1.0, share, _BUILT_BITS) / _BUILT_BITS
    formula = sketch_sizes.bitmap_bits(1.0, share, _BUILT_BITS, sketch.gamma) / _BUILT_BITS
    bloom_formula = sketch_sizes.bloom_bits(1.0, share, _BUILT_BITS, sketch.gamma) / _BUILT_BITS
    return {
        "n_elements": n_elements,
        "pattern": pattern,
        "density": share,
        "bound_share": bound,
        "bitmap_share": bitmap,
        "bitmap_over_formula": bitmap / formula,
        "bloom_share": bloom,
        "bloom_over_formula": bloom / bloom_formula,
        "false_positives": (n_candidates - n_nonzeros) / max(1, n_elements - n_nonzeros),
        "best_over_bound": min(bitmap, bloom) / bound,
        "attempts": attempts,
    }


def recovery(gradient: torch.Tensor, size: float) -> Record:
    """Fig. 3: share recovered, average relative error and rounds, by a sketch of `size` of the gradient's."""
    n_elements = gradient.numel()
    own = torch.empty(index_words(n_elements), dtype=torch.int32)
    n_nonzeros = write_index(gradient, own).n_nonzeros
    sketch = CountSketch()
    # A sketch that may be as large as it likes is given gamma of the size asked for.
    gamma = size * n_elements / n_nonzeros
    if gamma >= sketch.gamma:
        sketch = CountSketch(gamma=min(gamma, 10.0))
        sketch.prepare(own, n_elements)
    else:
        sketch.prepare(own, n_elements, max_cells=max(1, int(size * n_elements)))
    cells, out = torch.empty(sketch.n_cells), torch.empty(n_elements)
    sketch.add(gradient, own, cells)
    n_core = sketch.peel(own)
    sketch.recover(cells, 1.0, out, estimate=True)
    wanted, found = (values[gradient != 0].double() for values in (gradient, out))
    return {
        "density": n_nonzeros / n_elements,
        "sketch_share": sketch.n_cells / n_elements,
        "cells_a_nonzero": sketch.n_cells / n_nonzeros,
        "recovery_rate": 1 - n_core / n_nonzeros,
        "relative_error": float(((found - wanted).abs() / wanted.abs()).mean()),
        "rounds": sketch.n_rounds,
    }


def _time_one(n_elements: int, density: float, pattern: str, n_rounds: int) -> Record:
    gradient = torch.from_numpy(GradientSource(None, density, pattern).gradient(0, n_elements))
    own = torch.empty(index_words(n_elements), dtype=torch.int32)
    sketch = CountSketch()
    facts = write_index(gradient, own)
    sketch.prepare(own, n_elements)
    cells = torch.empty(sketch.n_cells)
    sketch.add(gradient, own, cells)
    summed, out = cells.clone(), torch.empty(n_elements)
    n_core = sketch.peel(own)

    def structure() -> None:
        sketch.prepare(own, n_elements)
        sketch.peel(own)

    def verify() -> None:
        found = out.clone()
        found[sketch.core()] = gradient[sketch.core()]
        error = float((found - gradient).norm() / gradient.norm()) if facts.n_nonzeros else float(found.abs().max())
        if not error < 1e-5:
            raise CorruptMessage(f"recovered values stray by {error:g}: the timing would mean nothing")

    def replay() -> None:
        if sketch.recover(cells, 1.0, out) is Outcome.FOREIGN:
            raise CorruptMessage("a sketch did not fit its own index: the timing would mean nothing")

    def refill() -> None:
        cells.copy_(summed)

    def compress() -> None:
        write_index(gradient, own)
        sketch.add(gradient, own, cells)

    tasks = {
        "index": Task(lambda: write_index(gradient, own)),
        "compress": Task(compress),
        "structure": Task(structure),
    }
    times = time_interleaved(tasks, n_rounds)
    # Recovery uses the cells up, so a sample is one call.
    times |= time_interleaved({"replay": Task(replay, before=refill, after=verify)}, n_rounds, min_sample_s=0.0)
    n_bytes = 4 * n_elements

    def gb_per_s(*names: str) -> float:
        return n_bytes / sum(times[name].median_s for name in names) / 1e9

    return {
        "n_elements": n_elements,
        "density": facts.n_nonzeros / n_elements,
        "pattern": pattern,
        "threads": thread_count(),
        "compress_gb_per_s": gb_per_s("compress"),
        "index_gb_per_s": gb_per_s("index"),
        "structure_gb_per_s": gb_per_s("structure"),
        "replay_gb_per_s": gb_per_s("replay"),
        "recover_gb_per_s": gb_per_s("structure", "replay"),
        "core": n_core,
        "rounds": sketch.n_rounds,
        "n_samples": n_rounds,
    }


def _random_index(n_elements: int, density: float, pattern: str) -> tuple[torch.Tensor, int]:
    gradient = torch.zeros(n_elements)
    gradient[torch.from_numpy(GradientSource(None, density, pattern).positions(n_elements))] = 1.0
    index = torch.empty(index_words(n_elements), dtype=torch.int32)
    return index, write_index(gradient, index).n_nonzeros


def _peeled_cells(sketch: CountSketch, index: torch.Tensor, n_elements: int) -> tuple[int, int]:
    """Cells of the first attempt that peels, and how many that took, as the scheme does it."""
    for attempt in range(64):
        n_cells = sketch.prepare(index, n_elements, attempt)
        if sketch.peel(index) <= MAX_CORE:
            return n_cells, attempt + 1
    raise CorruptMessage(f"no sketch of {sketch.n_nonzeros} values peels")
