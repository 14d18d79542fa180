"""Push and pull between ranks that each own a part: a parameter server with one shard beside every worker.

Push: every rank sends every owner its values of the owner's part. The owner adds them up in rank order, itself included,
and answers all with one result, which everyone adopts. It moves the bytes of a reduce-scatter and an all-gather, in two
hops. The native core moves the messages (native/exchange/owners.hpp); what they hold is the business of `Ends`.

The unit that travels is a group: neighbouring pieces of one part, none of which crosses from one tensor into another,
so that whatever a codec derives from its values (a scale) belongs to one tensor.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from gradwire import _native
from gradwire.telemetry.recorder import BucketRecord
from gradwire.wire.communicator import Communicator
from gradwire.wire.facts import Facts

# How much of its results an owner may send a peer before that peer adopts the first of them.
_PULL_BYTES_AHEAD = 2 << 20


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
        max_group_elements: of the buffer, that one group extends over.
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
        self.max_group_elements = max((g.end - g.start for groups in self.groups for g in groups), default=0)


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


class Ends(ABC):
    """What a rank does with the messages: it encodes what it pushes, sums what it owns, and adopts what it pulls.

    Messages are (n,) uint8, in memory that is used again once the call is over.
    """

    max_push_bytes: int  # of one group
    max_pull_bytes: int

    @abstractmethod
    def encode_push(self, part: int, group: int, out: torch.Tensor) -> int:
        """Write this rank's values of a group that another rank owns; the bytes written."""

    @abstractmethod
    def add_pushed(self, source: int, group: int, message: torch.Tensor) -> None:
        """Add what `source` pushed to a group of this rank's part; called in rank order, with `add_own` in its place."""

    @abstractmethod
    def add_own(self, group: int) -> None:
        """Add this rank's own values, unencoded."""

    @abstractmethod
    def encode_pull(self, group: int, out: torch.Tensor) -> int:
        """Write the result of a group of this rank's part; the bytes written."""

    @abstractmethod
    def adopt(self, part: int, group: int, message: torch.Tensor) -> None:
        """Take over the owner's result of a group; the owner its own, by the same message."""

    def opening(self) -> bytes:
        """What to tell every rank before the first group; nothing if empty, on all ranks alike."""
        return b""

    def take_opening(self, source: int, told: bytes) -> None:
        """What another rank told; before the first group is added."""

    def closing(self) -> bytes:
        """What to tell every rank when all groups of the own part are summed."""
        return b""

    def take_closing(self, source: int, told: bytes) -> None:
        """What another rank told; after the last group is adopted."""


def push_pull(
    communicator: Communicator,
    n_groups: Sequence[int],
    ends: Ends,
    facts: Facts,
    record: BucketRecord,
    has_pull: bool = True,
) -> Callable[[], None]:
    """Push all groups to their owners and send the results back; runs on the lane. What is left to do is returned.

    The last results are still on their way then; the returned function adopts them. One other exchange may be begun
    before. Without `has_pull` results stay with their owners: `encode_pull` is told that a group's sum is complete,
    writes nothing, and nothing is left to do.

    Args:
        n_groups: of each part.
    Raises: PeerLost, RankMismatch, CorruptMessage, and whatever `ends` raises.
    Cost: sends (N-1)/N of the pushed and of the pulled messages.
    """
    if communicator.world_size == 1 or not any(n_groups):
        return lambda: None
    exchange = _native.OwnersExchange(
        communicator.mesh, communicator.next_stream(), facts, ends, n_groups, has_pull, _PULL_BYTES_AHEAD
    )
    record.add_account(*exchange.run())
    return lambda: record.add_account(*exchange.finish())
