"""SlimGC's communication threshold table (Fig. 6 of its paper), from the summary of a run."""

from __future__ import annotations

from typing import Any

from gradwire.schemes.slimgc.threshold import NEVER
from gradwire_lab.report.drawing import PageTable
from gradwire_lab.report.inputs import LoggedRun

_COLUMNS = [("tensor, bytes", True), ("raw, ms", True), ("compressed, ms", True), ("codec, ms", True), ("both, ms", True),
            ("benefit", True), ("sent", False)]  # fmt: skip
_FIELDS = ("size_bytes", "raw_s", "compressed_s", "codec_s", "total_compressed_s", "benefit")


def make_threshold_table(run: LoggedRun) -> PageTable | None:
    """The table that decided what this run compressed, or None if there was none, or it does not read."""
    stats = run.summary.get("stats")
    rows = stats.get("threshold_table") if isinstance(stats, dict) else None
    if not isinstance(stats, dict) or not isinstance(rows, list) or not rows:
        return None
    threshold = stats.get("threshold_bytes")
    if not isinstance(threshold, int) or not all(_is_row(row) for row in rows):
        return None
    cells = [
        [
            f"{row['size_bytes']:,.0f}",
            *(f"{1e3 * row[name]:,.2f}" for name in _FIELDS[1:5]),
            f"{row['benefit']:.2f}",
            "compressed" if row["size_bytes"] >= threshold else "raw",
        ]
        for row in rows
    ]
    chosen = "never: everything travels raw" if threshold >= NEVER else f"{threshold:,} bytes"
    caption = (
        f"Communication threshold: {chosen}. One tensor of each size by itself, the slowest rank's mean over the warm-up; "
        f"benefit: raw / (compressed + codec). Measured {stats.get('threshold_measured', 1)} times."
    )
    return PageTable(f"Where compression pays: {run.label}", _COLUMNS, cells, caption)


def _is_row(row: Any) -> bool:
    return isinstance(row, dict) and all(
        isinstance(row.get(name), int | float) and not isinstance(row.get(name), bool) for name in _FIELDS
    )
