"""Codes to compare in Figs. 12 and 13: the native Huffman code, the paper's escaped one, gradwire's; and their decoders."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gradwire import _native
from gradwire.codecs.huffman import HuffmanTable
from gradwire.errors import CorruptMessage
from gradwire_lab.bench.measures import Call
from gradwire_lab.bench.timing import Task, threads, time_interleaved
from gradwire_lab.results.experiment import Cell
from gradwire_lab.results.store import Record

Histogram = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.int64]

# The paper's n_theta and n_s: codes over 8 bits are replaced by an 8-bit escape and the raw 8-bit symbol (its Table 1).
THRESHOLD_BITS = 8
RAW_BITS = 8


def native_lengths(histogram: Histogram) -> Lengths:
    """Bits of each symbol's Huffman code, (256,).

    Every symbol counts once more than seen: without that an unseen one has no code, and other data could not be coded.
    """
    return np.array(_native.huffman_native_lengths(torch.from_numpy(histogram + 1)), np.int64)


def escaped_lengths(histogram: Histogram, threshold_bits: int = THRESHOLD_BITS) -> Lengths:
    """As `native_lengths`, over-long codes replaced by the escape and the raw symbol (paper, section 4.3)."""
    lengths = native_lengths(histogram)
    return np.where(lengths > threshold_bits, threshold_bits + RAW_BITS, lengths)


def gradwire_lengths(histogram: Histogram) -> Lengths:
    """Bits of each symbol in a message of codec gcomp: at most 11, or the escape's and the raw symbol."""
    *lengths, escape = HuffmanTable.from_histogram(torch.from_numpy(histogram)).lengths
    return np.array([length or escape + RAW_BITS for length in lengths], np.int64)


def mean_bits(lengths: Lengths, histogram: Histogram) -> float:
    """Bits a symbol when data with `histogram` is coded with `lengths`."""
    return float((lengths * histogram).sum() / histogram.sum())


def measure(call: Call) -> list[tuple[Cell, Record]]:
    """Fig. 13b over the axis `spread`: of the normal distribution, in binades, whose exponents are decoded.

    ns a symbol of the look-up-table and the tree decoder, on the same segments, over the code length.
    Raises: CorruptMessage (a decoder gave other symbols than were encoded; its time would mean nothing).
    """
    numbers = np.random.default_rng(13)
    with threads(1):
        return [
            (cell, time_decoders(float(cell["spread"]), numbers, int(call.get("rounds", 7)))) for cell in call.cells
        ]


def time_decoders(spread: float, numbers: np.random.Generator, n_rounds: int) -> Record:
    """One record of `measure`."""
    n_symbols = _native.HUFFMAN_SEGMENT_VALUES
    drawn = np.clip(np.rint(numbers.normal(118, spread, n_symbols)), 0, 255)
    symbols = torch.from_numpy(drawn.astype(np.uint8))
    histogram = np.bincount(symbols.numpy(), minlength=256).astype(np.int64)
    table = HuffmanTable.from_histogram(torch.from_numpy(histogram))
    segment = torch.empty(3 * n_symbols + 64, dtype=torch.uint8)
    segment = segment[: _native.huffman_encode_segment(table.native, symbols, segment)]
    tasks = {
        "table": _decoding(_native.huffman_decode_table, table, segment, symbols),
        "tree": _decoding(_native.huffman_decode_tree, table, segment, symbols),
    }
    record: Record = {"code_bits": mean_bits(gradwire_lengths(histogram), histogram)}
    for name, timing in time_interleaved(tasks, n_rounds).items():
        record[f"{name}_ns"] = timing.median_s / n_symbols * 1e9
        record[f"{name}_ns_low"] = timing.low_s / n_symbols * 1e9
        record[f"{name}_ns_high"] = timing.high_s / n_symbols * 1e9
    return {**record, "tree_over_table": record["tree_ns"] / record["table_ns"]}


def _decoding(decode: Any, table: HuffmanTable, segment: torch.Tensor, symbols: torch.Tensor) -> Task:
    out = torch.empty_like(symbols)

    def poison() -> None:
        out.fill_(0)

    def verify() -> None:
        if not torch.equal(out, symbols):
            raise CorruptMessage("a Huffman decoder of the comparison gave other symbols than were encoded")

    return Task(lambda: decode(table.native, segment, out), poison, verify)
