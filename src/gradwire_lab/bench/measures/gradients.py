"""The numbers behind the figures, from gradient files alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from gradwire_lab.bench.level_rule import allowed_scale, dropped_bits, entropy_bits, exponent_histogram
from gradwire_lab.bench.measures import Call
from gradwire_lab.bench.measures.gradient_files import gradient_file
from gradwire_lab.bench.measures.huffman import escaped_lengths, gradwire_lengths, mean_bits, native_lengths
from gradwire_lab.results.experiment import Cell
from gradwire_lab.results.store import Record
from gradwire_lab.workloads.gradients import GradientFile, load_gradients

Records = list[dict[str, Any]]
MANTISSA_BITS = 24  # the sign travels with the mantissa


def load(call: Call) -> list[tuple[Cell, GradientFile]]:
    """The files of the cells' axis `gradients`, in order."""
    return [(cell, load_gradients(gradient_file(str(cell["gradients"]), call.folder))) for cell in call.cells]


def measure_cross_tables(call: Call) -> list[tuple[Cell, Record]]:
    """Fig. 12: the exponent part (share of 8 bits) of every file under the table made from every file."""
    files = [(cell, file.name, exponent_histogram(file.gradient)) for cell, file in load(call)]
    found = []
    for _, source, made_from in files:
        native, escaped, own = (make(made_from) for make in (native_lengths, escaped_lengths, gradwire_lengths))
        for cell, name, coded in files:
            record = {
                "table_from": source,
                "gradients": name,
                "native_ratio": mean_bits(native, coded) / 8,
                "escaped_ratio": mean_bits(escaped, coded) / 8,
                "gradwire_ratio": mean_bits(own, coded) / 8,
                "longest_native_bits": int(native.max()),
                "entropy_ratio": entropy_bits(coded) / 8,
            }
            found.append((cell, record))
    return found


def measure_mantissas(call: Call) -> list[tuple[Cell, Record]]:
    """Fig. 14 of each file."""
    return [(cell, mantissa_ablation(file)) for cell, file in load(call)]


def measure_spread(call: Call) -> list[tuple[Cell, Record]]:
    """Figs. 2 and 3 as curves: points (`at`, `share`) of each file for each `of`."""
    return [(cell, point) for cell, file in load(call) for point in spread(file)]


def spread(file: GradientFile) -> Records:
    """Shares of values by size (in standard deviations, without zeros) and by exponent, and those below |g| / |theta|."""
    nonzero = file.gradient[np.isfinite(file.gradient) & (file.gradient != 0)].astype(np.float64)
    counts, edges = np.histogram(nonzero / (float(nonzero.std()) or 1.0), bins=49, range=(-6.125, 6.125))
    exponents = exponent_histogram(file.gradient) / file.gradient.size
    held = np.flatnonzero(exponents[1:]) + 1  # field 0: zeros
    ratio = gradient_parameter_ratio(file)
    levels = np.round(np.linspace(0.02, 0.98, 25), 2)
    curves = {
        "value": ((edges[:-1] + edges[1:]) / 2, counts / max(1, nonzero.size)),
        "exponent": (held, exponents[held]),
        "ratio": (
            np.quantile(ratio, levels) if ratio.size else np.zeros(0),
            levels[: levels.size if ratio.size else 0],
        ),
    }
    return [
        {"of": name, "at": float(x), "share": float(y)}
        for name, (xs, ys) in curves.items()
        for x, y in zip(xs, ys, strict=True)
        if y > 0
    ]


def gradient_parameter_ratio(file: GradientFile) -> npt.NDArray[np.float64]:
    """|g| / |theta| where neither is 0 or infinite; empty if the file has no parameters."""
    if file.parameter is None:
        return np.zeros(0)
    usable = (file.gradient != 0) & (file.parameter != 0) & np.isfinite(file.gradient) & np.isfinite(file.parameter)
    return np.abs(file.gradient[usable].astype(np.float64) / file.parameter[usable].astype(np.float64))


def mantissa_ablation(file: GradientFile) -> Record:
    """Fig. 14: sign, mantissa and level as a share of 24 bits, under one or three cuts, zeros kept or pruned.

    "Single-Quant" knows two levels, 0 and 18 bits, and pays one bit to say which; "Multi-Quant" four, and pays two.
    A file without optimizer state has no levels: only the pruning of zeros is counted for it.
    """
    values = file.gradient
    nonzero = exponent_histogram(values)[1:].sum() / values.size  # subnormals go the way of the zeros
    record: Record = {"gradients": file.name, "zero_prune": float(nonzero)}
    if file.state is not None:
        scale, _ = allowed_scale(file.state)
        is_pruned = (values.view(np.uint32) >> 23 & 0xFF) == 0
        for name, level_bits, field_bits in (("single_quant", (18,), 1), ("multi_quant", (6, 12, 18), 2)):
            kept = MANTISSA_BITS - dropped_bits(values, scale, level_bits) + field_bits
            record[name] = float(kept.mean() / MANTISSA_BITS)
            record[f"{name}_zero_prune"] = float(np.where(is_pruned, 0, kept).mean() / MANTISSA_BITS)
    return record
