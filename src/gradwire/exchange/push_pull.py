"""Push and pull between ranks that each own a part: a parameter server with one shard beside every worker.

Push: every rank sends every owner its values of the owner's part. The owner adds them up in rank order, itself included,
and answers all with one result, which everyone adopts. It moves the bytes of a reduce-scatter and an all-gather, in two
hops. This module moves messages and nothing else: what they hold is the business of `Ends`.

The unit that travels is a group: neighbouring pieces of one part, none of which crosses from one tensor into another,
so that whatever a codec derives from its values (a scale) belongs to one tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from gradwire.exchange.frames import FrameReceiver, FrameSender
from gradwire.telemetry.recorder import BucketRecord
from gradwire.wire.communicator import Communicator
from gradwire.wire.facts import Facts

# Groups that may be on their way while this rank works: group k+1 is encoded while k travels while k-1 is decoded.
_GROUPS_AHEAD = 2
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
        groups: by part, the groups in order. Parts differ by one travelling value at most; small buffers have empty ones.
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


class Ends(Protocol):
    """What a rank does with the messages: it encodes what it pushes, sums what it owns, and adopts what it pulls."""

    max_push_bytes: int  # of one group
    max_pull_bytes: int

    def encode_push(self, part: int, group: int, out: torch.Tensor) -> int:
        """Write this rank's values of a group that another rank owns; the bytes written."""
        ...

    def add_pushed(self, source: int, group: int, message: torch.Tensor | None) -> None:
        """Add what `source` pushed (None: this rank's own values) to a group of this rank's part; in rank order."""
        ...

    def encode_pull(self, group: int, out: torch.Tensor) -> int:
        """Write the result of a group of this rank's part; the bytes written."""
        ...

    def adopt(self, part: int, group: int, message: torch.Tensor) -> None:
        """Take over the owner's result of a group; the owner its own, by the same message."""
        ...


def push_pull(
    communicator: Communicator, cut: Cut, ends: Ends, facts: Facts, record: BucketRecord, has_pull: bool = True
) -> Callable[[], None]:
    """Push all groups to their owners and send the results back; runs on the lane. What is left to do is returned.

    The last results are still on their way then; the returned function adopts them. One other exchange may be begun
    before, with facts of another bucket. Without `has_pull` results stay with their owners: `encode_pull` is told that a
    group's sum is complete, writes nothing, and nothing is left to do.

    Raises: PeerLost, RankMismatch, CorruptMessage, and whatever `ends` raises.
    Cost: sends (N-1)/N of the pushed and of the pulled messages.
    """
    world, rank = communicator.world_size, communicator.rank
    n_groups = [len(groups) for groups in cut.groups]
    n_rounds = max(n_groups)
    if world == 1 or n_rounds == 0:
        return lambda: None
    n_own = n_groups[rank]
    ahead = min(_GROUPS_AHEAD, n_rounds - 1)
    n_pulled_ahead = min(n_rounds, max(ahead, _PULL_BYTES_AHEAD // max(1, ends.max_pull_bytes)))
    # Each rank begins with its right neighbour, so that not all of them send to the same rank at once.
    peers = [(rank + distance) % world for distance in range(1, world)]
    theirs, ours = {peer: n_groups[peer] for peer in peers}, dict.fromkeys(peers, n_own)
    pushes = _Streams(communicator, "push", theirs, ours, facts, ends.max_push_bytes, ahead, record)
    # The work space of results has two names in turn: those of one bucket travel while the next one is pushed.
    pull = f"pull {facts.bucket % 2}"
    pulls = (
        _Streams(communicator, pull, ours, theirs, facts, ends.max_pull_bytes, n_pulled_ahead, record)
        if has_pull
        else None
    )
    pushed = communicator.scratch("pushed message", ends.max_push_bytes)
    pull_bytes = ends.max_pull_bytes if has_pull else 0
    results = communicator.scratch(f"{pull}, own results", n_own * pull_bytes).view(n_own, pull_bytes)
    result_bytes = [0] * n_own

    def push(group: int) -> None:
        for peer in peers:
            if group < n_groups[peer]:
                n_bytes = ends.encode_push(peer, group, pushed)
                pushes.write(peer, pushed[:n_bytes])

    def answer(group: int) -> None:
        if group >= n_own:
            return
        for source in range(world):
            ends.add_pushed(source, group, None if source == rank else pushes.read(source))
        result_bytes[group] = ends.encode_pull(group, results[group])
        if pulls is not None:
            for peer in peers:
                pulls.write(peer, results[group, : result_bytes[group]])

    def adopt(group: int) -> None:
        if pulls is None:
            return
        for peer in reversed(peers):
            if group < n_groups[peer]:
                ends.adopt(peer, group, pulls.read(peer))
        if group < n_own:
            ends.adopt(rank, group, results[group, : result_bytes[group]])

    for group in range(n_rounds + ahead):
        if group < n_rounds:
            push(group)
        if group >= ahead:
            answer(group - ahead)
            if group - ahead >= n_pulled_ahead:
                adopt(group - ahead - n_pulled_ahead)
    pushes.finish()

    def finish() -> None:
        if pulls is not None:
            for group in range(n_rounds - n_pulled_ahead, n_rounds):
                adopt(group)
            pulls.finish()

    return finish


class _Streams:
    """One stream to and one from every peer."""

    def __init__(
        self,
        communicator: Communicator,
        name: str,
        n_written: Mapping[int, int],  # peer: messages to it
        n_read: Mapping[int, int],  # peer: messages from it
        facts: Facts,
        max_message_bytes: int,
        ahead: int,
        record: BucketRecord,
    ) -> None:
        tag = communicator.next_stream()
        self._senders = {
            peer: FrameSender(communicator, peer, tag, facts, max_message_bytes, ahead, record, name)
            for peer in n_written
        }
        self._receivers = {
            peer: FrameReceiver(communicator, peer, tag, facts, max_message_bytes, ahead, n, record, name)
            for peer, n in n_read.items()
        }

    def write(self, peer: int, message: torch.Tensor) -> None:
        self._senders[peer].write(message)

    def read(self, peer: int) -> torch.Tensor:
        return self._receivers[peer].read()

    def finish(self) -> None:
        for sender in self._senders.values():
            sender.finish()
