"""How a bucket is cut: one part for every rank, and chunks that are encoded, sent and decoded one after the other."""

from __future__ import annotations

import torch

# 256 Ki elements, 1 MiB of float32: fits the second-level cache with its message, takes about 0.5 ms to encode and 8 ms
# to send at 1 Gb/s, so the pipeline starts soon and calls stay rare. Half of it was no faster.
CHUNK_ELEMENTS = 1 << 18
# Of quantisers, whose messages are an eighth to a thirty-second of the values: to wake a rank for 32 KB costs more than
# what fits no cache. ResNet-50, 4 ranks on 2 cores, 1 Gb/s: one-bit 462 ms a step with 2^18, 380 to 436 from 2^20 on.
QUANTISED_CHUNK_ELEMENTS = 1 << 20
# A part is cut at least so often, which keeps the work space, some chunks beside one part, within twice the bucket.
_MIN_CHUNKS = 5
# But into no smaller chunks: every message wakes two ranks, which costs more than sending this many values. On 2 cores at
# 1 Gb/s, 4 ranks took 68 ms for 1 MB with chunks of at most 2^12 elements, 31 with 2^14, 18 with 2^16.
_MIN_CHUNK_ELEMENTS = 1 << 16


def count_chunks(part_elements: int, chunk_elements: int = CHUNK_ELEMENTS, min_chunks: int = _MIN_CHUNKS) -> int:
    """Into how many chunks a part of `part_elements` is cut."""
    return max(1, -(-part_elements // chunk_elements), min(min_chunks, part_elements // _MIN_CHUNK_ELEMENTS))


class Parts:
    """The cut of `buffer` (n,): `world_size` parts, each of `n_chunks` chunks; sizes differ by one element at most.

    Parts are cut evenly, so with n < world_size some are empty. All ranks cut alike.
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        world_size: int,
        chunk_elements: int = CHUNK_ELEMENTS,
        min_chunks: int = _MIN_CHUNKS,
    ) -> None:
        self._buffer = buffer
        self._world_size = world_size
        largest_part = -(-buffer.numel() // world_size)
        self.n_chunks = count_chunks(largest_part, chunk_elements, min_chunks)

    def bounds(self, part: int, chunk: int) -> tuple[int, int]:
        """First element of the chunk and the one after its last."""
        part_start, part_end = self._cut(0, self._buffer.numel(), self._world_size, part)
        return self._cut(part_start, part_end, self.n_chunks, chunk)

    @staticmethod
    def _cut(start: int, end: int, n_pieces: int, piece: int) -> tuple[int, int]:
        n = end - start
        return start + n * piece // n_pieces, start + n * (piece + 1) // n_pieces
