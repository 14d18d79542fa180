"""The numbers behind the figures from gradient files: sizes, exponents and their codes, mantissas; two decoders' times."""

import functools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from gradwire import _native
from gradwire.codecs.huffman import HuffmanTable
from gradwire.errors import CorruptMessage, InvalidArgument
from gradwire_lab import workloads
from gradwire_lab.bench.driver import Task, threads, time_interleaved
from gradwire_lab.bench.level_rule import allowed_scale, dropped_bits, entropy_bits, exponent_histogram
from gradwire_lab.bench.measures import Call, Measured, cell_by_cell
from gradwire_lab.results.records import Record
from gradwire_lab.workloads.gradients import GradientFile, load_gradients, write_snapshot

Lengths = npt.NDArray[np.int64]  # bits of each symbol's code, (256,)
MANTISSA_BITS = 24  # the sign travels with the mantissa
# The paper's n_theta and n_s: codes over 8 bits are replaced by an 8-bit escape and the raw 8-bit symbol (its Table 1).
THRESHOLD_BITS = RAW_BITS = 8


# ---- files


def gradient_file(name: str, folder: Path) -> Path:
    """The file that `name` stands for: WORKLOAD@STEP, trained alone to that step if it is not there; any other is a
    path. `gpt@400` is the gradient of GPT's step 400 with the optimizer's state. Raises: InvalidArgument, Unsupported,
    GradwireError."""
    name, at, last = name.partition("@")
    if not at:
        return Path(name)
    if not last.isdigit():
        raise InvalidArgument(f"gradients '{name}@{last}': expected WORKLOAD@STEP or a path")
    workload = workloads.by_name(name)
    path = folder / "gradients" / f"{workload.name}_{workload.optimizer}_step{last}.npz"
    if path.is_file():
        return path
    model = workload.build_model(0)
    optimizer = workload.build_optimizer(model)
    schedulers = workload.build_schedulers([optimizer])
    model.train()
    for step in range(1, int(last) + 1):
        torch.manual_seed(step)
        optimizer.zero_grad(set_to_none=True)
        workload.loss(model, workload.batch_at(step - 1, 0, 1, workload.batch_size, 0)).backward()
        if step == int(last):
            write_snapshot(path, optimizer, step)
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return path


def load(call: Call, name: str) -> GradientFile:
    """The file that `name` stands for, made if need be."""
    return load_gradients(gradient_file(name, call.folder))


# ---- Figs. 2 and 3 of GComp


@cell_by_cell
def measure_spread(call: Call, gradients: str) -> list[Record]:
    """Figs. 2 and 3 as curves: points (`at`, `share`) of values by size and by exponent, and of those below |g| / |theta|."""
    file = load(call, gradients)
    nonzero = file.gradient[np.isfinite(file.gradient) & (file.gradient != 0)].astype(np.float64)
    counts, edges = np.histogram(nonzero / (float(nonzero.std()) or 1.0), bins=49, range=(-6.125, 6.125))
    exponents = exponent_histogram(file.gradient) / file.gradient.size
    held = np.flatnonzero(exponents[1:]) + 1  # field 0: zeros
    curves = {
        "value": ((edges[:-1] + edges[1:]) / 2, counts / max(1, nonzero.size)),
        "exponent": (held, exponents[held]),
    }
    if file.parameter is not None:
        parameter = file.parameter.astype(np.float64)
        usable = (file.gradient != 0) & (parameter != 0) & np.isfinite(file.gradient) & np.isfinite(parameter)
        if usable.any():
            levels = np.round(np.linspace(0.02, 0.98, 25), 2)
            curves["ratio"] = np.quantile(np.abs(file.gradient[usable] / parameter[usable]), levels), levels
    return [
        {"of": name, "at": float(x), "share": float(y)}
        for name, (xs, ys) in curves.items()
        for x, y in zip(xs, ys, strict=True)
        if y > 0
    ]


# ---- Figs. 12 and 13b: codes of exponents, and their decoders


def _lengths_of(histogram: Lengths) -> dict[str, Lengths]:
    """By code: Huffman's own; over-long ones replaced by the escape and the raw symbol (paper, section 4.3); gcomp's."""
    # Every symbol counts once more than seen: an unseen one has no code, and other data could not be coded.
    native = np.array(_native.huffman_native_lengths(torch.from_numpy(histogram + 1)), np.int64)
    escaped = np.where(native > THRESHOLD_BITS, THRESHOLD_BITS + RAW_BITS, native)
    # In a message of codec gcomp: at most 11, or the escape's and the raw symbol.
    *lengths, escape = HuffmanTable.from_histogram(torch.from_numpy(histogram)).lengths
    gradwire = np.array([length or escape + RAW_BITS for length in lengths], np.int64)
    return {"native": native, "escaped": escaped, "gradwire": gradwire}


def _mean_bits(lengths: Lengths, histogram: Lengths) -> float:
    return float((lengths * histogram).sum() / histogram.sum())


def measure_cross_tables(call: Call) -> Measured:
    """Fig. 12: the exponent part (share of 8 bits) of every file under the table made from every file."""
    loaded = [load(call, cell["gradients"]) for cell in call.cells]
    files = [(file.name, exponent_histogram(file.gradient)) for file in loaded]
    found: Measured = []
    for source, made_from in files:
        codes = _lengths_of(made_from)
        for cell, (_, coded) in zip(call.cells, files, strict=True):
            ratios = {f"{code}_ratio": _mean_bits(lengths, coded) / 8 for code, lengths in codes.items()}
            found.append((cell, {"table_from": source, **ratios, "entropy_ratio": entropy_bits(coded) / 8}))
    return found


def measure_decoders(call: Call) -> Measured:
    """Fig. 13b: ns a symbol of both decoders, on the same segments, by the `spread` of a normal distribution, in binades."""
    numbers, n_rounds = np.random.default_rng(13), int(call.get("rounds", 7))
    with threads(1):
        return [(cell, _time_decoders(float(cell["spread"]), numbers, n_rounds)) for cell in call.cells]


def _time_decoders(spread: float, numbers: np.random.Generator, n_rounds: int) -> Record:
    n_symbols = _native.HUFFMAN_SEGMENT_VALUES
    symbols = torch.from_numpy(np.clip(np.rint(numbers.normal(118, spread, n_symbols)), 0, 255).astype(np.uint8))
    histogram = np.bincount(symbols.numpy(), minlength=256).astype(np.int64)
    table, out = HuffmanTable.from_histogram(torch.from_numpy(histogram)), torch.empty_like(symbols)
    segment = torch.empty(3 * n_symbols + 64, dtype=torch.uint8)
    segment = segment[: _native.huffman_encode_segment(table.native, symbols, segment)]

    def verify() -> None:
        if not torch.equal(out, symbols):
            raise CorruptMessage("a Huffman decoder of the comparison gave other symbols than were encoded")

    decoders = {"table_ns": _native.huffman_decode_table, "tree_ns": _native.huffman_decode_tree}
    calls = {name: functools.partial(decode, table.native, segment, out) for name, decode in decoders.items()}
    timings = time_interleaved({name: Task(call, out.zero_, verify) for name, call in calls.items()}, n_rounds)
    record: Record = {"code_bits": _mean_bits(_lengths_of(histogram)["gradwire"], histogram)}
    for name, timing in timings.items():
        record |= timing.fields(name, 1e9 / n_symbols)
    return {**record, "tree_over_table": record["tree_ns"] / record["table_ns"]}


# ---- Fig. 14


@cell_by_cell
def measure_mantissas(call: Call, gradients: str) -> Record:
    """Fig. 14: sign, mantissa and level as a share of 24 bits, under one or three cuts, zeros kept or pruned.
    "Single-Quant" knows levels of 0 and 18 bits, and pays one bit to say which; "Multi-Quant" four, and pays two."""
    file = load(call, gradients)
    is_pruned = (file.gradient.view(np.uint32) >> 23 & 0xFF) == 0  # subnormals go the way of the zeros
    record: Record = {"zero_prune": float(1 - is_pruned.mean())}
    if file.state is not None:
        scale, _ = allowed_scale(file.state)
        for name, level_bits, field_bits in (("single_quant", (18,), 1), ("multi_quant", (6, 12, 18), 2)):
            kept = MANTISSA_BITS - dropped_bits(file.gradient, scale, level_bits) + field_bits
            record[name] = float(kept.mean() / MANTISSA_BITS)
            record[f"{name}_zero_prune"] = float(np.where(is_pruned, 0, kept).mean() / MANTISSA_BITS)
    return record
