"""Into how many chunks a part of a bucket, one rank's, is cut: they are encoded, sent and decoded one after the other.

Measured: `gradwire bench run allreduce-chunks` (docs/results/schemes.md#allreduce-chunks).
"""

from __future__ import annotations

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
