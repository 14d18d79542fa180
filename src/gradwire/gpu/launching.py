"""How many threads and blocks launches start."""

from __future__ import annotations

THREADS = 256
MOST_BLOCKS = 2112  # 16 for each of an H100's 132 multiprocessors: more threads than that run one after another


def parts(n: int, size: int) -> int:
    """n / size, rounded up."""
    return -(-n // size)


def grid(n_threads: int) -> int:
    """Blocks for so many threads, or fewer: each thread then works more than once."""
    return min(parts(n_threads, THREADS), MOST_BLOCKS)
