"""Threads and blocks of launches, and error words."""

from __future__ import annotations

import torch

from gradwire.errors import CorruptMessage, GradwireError, IncompatibleVersion, RankMismatch

THREADS = 256
WARP = 32
MOST_BLOCKS = 2112  # 16 for each of an H100's 132 multiprocessors: more threads than that run one after another
SHARED_OF_CHECKSUM = 4 * (4 * 256 + 8)


def parts(n: int, size: int) -> int:
    """n / size, rounded up."""
    return -(-n // size)


def grid(n_threads: int) -> int:
    """Blocks for so many threads, or fewer: each thread then works more than once."""
    return min(parts(n_threads, THREADS), MOST_BLOCKS)


# By error word, which keeps the worst of what was wrong (`Wrong` of source/device.hpp, from the last one on).
_WRONG: dict[int, tuple[type[GradwireError], str]] = {
    1: (CorruptMessage, "it holds codes that no encoder writes"),
    2: (
        CorruptMessage,
        "it was written with other options or another Huffman table, or has flags, scales or indices outside of what "
        "encoders write",
    ),
    3: (CorruptMessage, "a checksum does not match: bytes were changed on the way"),
    4: (CorruptMessage, "it has another length or number of values than expected"),
    5: (IncompatibleVersion, "it is of another format version: use the same gradwire release on every rank"),
    6: (CorruptMessage, "it is of another kind, or its first bytes were lost"),
    7: (
        RankMismatch,
        "the sender derives other importance bytes: load one checkpoint on all ranks, and change learning rates on all of "
        "them alike",
    ),
}


def raise_error(code: int, what: str, device: torch.device) -> None:
    """Raise what the error word of `what` ("gcomp message") says, if anything.

    Raises: CorruptMessage, IncompatibleVersion, RankMismatch.
    """
    if code:
        error, text = _WRONG[code]
        raise error(f"{what} on {device}: {text}")
