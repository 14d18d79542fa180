"""How tensors of one flat buffer are cut for the mean through owners (native/exchange/means.hpp).

The unit that travels is a group: neighbouring pieces of one part, none of which crosses from one tensor into another,
so that whatever a codec derives from its values (a scale) belongs to one tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from gradwire import _native


class Group(NamedTuple):
    """Values [start, end) of the flat buffer, in pieces of `sizes` values that are each of one tensor.

    A negative size passes over so many values, which belong to nobody's message.
    """

    start: int
    end: int
    sizes: tuple[int, ...]


class Cut:
    """How the tensors of a flat buffer are cut: one part for every rank, parts into groups, groups into pieces.

    Args:
        spans: (start, end) of each tensor, in order. What lies between them does not travel.
        world_size: parts.
        group_elements: values that travel together, at most.

    Attributes:
        groups, n_groups: by part, the groups in order, and how many. Parts differ by one travelling value at most; small
            buffers have empty ones.
        native: the same for the core.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], world_size: int, group_elements: int) -> None:
        n_elements = sum(end - start for start, end in spans)
        self.groups: list[list[Group]] = []
        for part in range(world_size):
            start, end = n_elements * part // world_size, n_elements * (part + 1) // world_size
            n_groups = -(-(end - start) // group_elements)
            edges = [start + (end - start) * i // n_groups for i in range(n_groups + 1)] if n_groups else []
            self.groups.append([_group(spans, *ends) for ends in itertools.pairwise(edges)])
        self.n_groups = [len(groups) for groups in self.groups]
        self.native = _native.PieceGroups(self.groups)


def _group(spans: Sequence[tuple[int, int]], first: int, last: int) -> Group:
    """Values [first, last) of those that travel."""
    pieces: list[tuple[int, int]] = []
    n_before = 0
    for start, end in spans:
        begin, stop = max(first, n_before), min(last, n_before + end - start)
        if begin < stop:
            pieces.append((start + begin - n_before, start + stop - n_before))
        n_before += end - start
    sizes = [pieces[0][1] - pieces[0][0]]
    for (_, end), (start, stop) in itertools.pairwise(pieces):
        sizes += [end - start, stop - start] if end < start else [stop - start]
    return Group(pieces[0][0], pieces[-1][1], tuple(sizes))
