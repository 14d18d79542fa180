"""Numbers and plots of `bench slimgc-accuracy`: every configuration beside the bare quantiser and full precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradwire.bench.figures import paired_trainings as paired
from gradwire.bench.figures.paired_trainings import Records, plot
from gradwire.bench.paired_trainings import FULL, Case

__all__ = ["plot", "summarize", "to_markdown"]

_HEADINGS = {"gain": "against bare", "to_full": "against full"}


def summarize(cases: Sequence[Case], results: Mapping[str, Mapping[str, Any]]) -> Records:
    """`gain` is over the bare quantiser of figure 9 with the same bits, `to_full` over full precision; see `paired`."""
    return paired.summarize(cases, results, "strategies", {"gain": "bare", "to_full": FULL})


def to_markdown(records: Records) -> str:
    """The tables, one a figure and workload."""
    return paired.to_markdown(records, _HEADINGS)
