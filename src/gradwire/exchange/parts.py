"""Cuts of a flat buffer: a part for every rank, and each part into chunks, or into groups of pieces of single tensors.

Chunks are encoded, sent and decoded one after the other. Their sizes are measured: `gradwire bench run allreduce-chunks`
(docs/results/schemes.md#allreduce-chunks).
"""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gradwire import _native

# 128 Ki values, 0.5 MiB of float32: they stay in the second-level cache with their message. Beside 2^18, 25 MB take 1 to
# 5 % less time in a ring at every rate, with 2 and 4 ranks, often within the noise, for the same processor time.
# Below, 4 ranks on 2 cores wake each other too often (2^16: 14 % more time in a ring, unshaped), above nothing hides
# the first and the last chunk.
CHUNK_ELEMENTS = 1 << 17
# Of quantisers, whose messages are an eighth to a thirty-second of the values: 2^18 to 2^20 cost the same at 25 MB, 2^16
# a fifth more of time and processor time, 2^22 a tenth.
QUANTISED_CHUNK_ELEMENTS = 1 << 20
# And at least so often, so that one is encoded while the other travels.
QUANTISED_MIN_CHUNKS = 2
# Messages that may be on their way while a rank works: chunk k+1 is encoded while k travels while k-1 is decoded.
MESSAGES_AHEAD = 2
# A part is cut at least so often, which keeps the work space, some chunks beside one part, within twice the bucket.
_MIN_CHUNKS = 5
# But into no smaller chunks: of 1 MB every size from 2^14 on takes the same time, the more messages the more of the
# processors (2 ranks, unshaped: 1.43 ms in chunks of 2^14, 1.21 in chunks of 2^16).
_MIN_CHUNK_ELEMENTS = 1 << 16


def count_chunks(part_elements: int, chunk_elements: int = CHUNK_ELEMENTS, min_chunks: int = _MIN_CHUNKS) -> int:
    """Into how many chunks a part of `part_elements` is cut."""
    return max(1, -(-part_elements // chunk_elements), min(min_chunks, part_elements // _MIN_CHUNK_ELEMENTS))


class Chunk(NamedTuple):
    """One message: about `values` of the buffer, in `room` of the row that holds its part's messages."""

    values: slice
    room: slice
    cuts: tuple[int, ...] = ()  # the values at which tensors begin in it, for codecs that want to know

    def within(self, start: int) -> slice:
        """Its values, counted from value `start` of the buffer."""
        return slice(self.values.start - start, self.values.stop - start)


def cut_into_chunks(
    n_elements: int,
    world_size: int,
    n_chunks: int,
    room_of: Callable[[int, tuple[int, ...]], int],
    starts: Sequence[int] = (),
    alignment: int = 1,
) -> list[list[Chunk]]:
    """By rank, the chunks of the part that it owns, as the native core cuts (native/exchange/). `room_of`: bytes of a
    message of so many values with such cuts, at most. `starts`: the first value of every tensor. `alignment`: bytes, of
    where a message begins in its row."""
    parts = []
    for part in range(world_size):
        begin, end = n_elements * part // world_size, n_elements * (part + 1) // world_size
        chunks, at = [], 0
        for index in range(n_chunks):
            first, last = (begin + (end - begin) * bound // n_chunks for bound in (index, index + 1))
            cuts = tuple(start - first for start in starts if first < start < last)
            stop = at + room_of(last - first, cuts)
            chunks.append(Chunk(slice(first, last), slice(at, stop), cuts))
            at = -(-stop // alignment) * alignment
        parts.append(chunks)
    return parts


class Group(NamedTuple):
    """Values [start, end) of the flat buffer that travel together, in pieces of `sizes` values that are each of one tensor.

    So whatever a codec derives from a piece's values (a scale) belongs to one tensor (native/exchange/means.hpp).
    A negative size passes over so many values, which belong to nobody's message.
    """

    start: int
    end: int
    sizes: tuple[int, ...]


class Cut:
    """The tensors of a flat buffer, cut: one part for every rank, parts into groups, groups into pieces.

    `spans`: (start, end) of each tensor, in order; what lies between them does not travel. Parts differ by one travelling
    value at most; small buffers have empty ones.
    """

    def __init__(self, spans: Sequence[tuple[int, int]], world_size: int, group_elements: int) -> None:
        n_elements = sum(end - start for start, end in spans)
        self.groups: list[list[Group]] = []  # by part
        for part in range(world_size):
            start, end = n_elements * part // world_size, n_elements * (part + 1) // world_size
            n_groups = -(-(end - start) // group_elements)
            edges = [start + (end - start) * i // n_groups for i in range(n_groups + 1)] if n_groups else []
            self.groups.append([_group(spans, *ends) for ends in itertools.pairwise(edges)])
        self.native = _native.PieceGroups(self.groups)  # the same for the core


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
