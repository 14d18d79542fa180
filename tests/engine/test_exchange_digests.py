"""Results and messages are those of the exchanges that the engine replaced, bit for bit and byte for byte.

`PYTHONPATH=tests python tests/engine/test_exchange_digests.py` writes the digests anew: only where they are meant to change.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import broadcast_cases
import exchange_cases
import pytest

from ranks import run_ranks

EXCHANGES = Path(__file__).with_name("digests.json")
BROADCASTS = Path(__file__).with_name("broadcast_digests.json")
RUNS: dict[Path, Callable[..., Any]] = {EXCHANGES: exchange_cases.reduce_case, BROADCASTS: broadcast_cases.train_case}


def cases_of(path: Path) -> Iterator[str]:
    """Arguments and number of ranks: "one-bit; bfloat16; 2", "8 bits, ring; 3"."""
    if path == BROADCASTS:
        for name, (_, _, _, world_sizes) in broadcast_cases.CASES.items():
            yield from (f"{name}; {world_size}" for world_size in world_sizes)
        return
    for name in exchange_cases.CASES:
        for dtype in exchange_cases.DTYPES if name.startswith(("gcomp ", "one-bit")) else ["float32"]:
            yield from (f"{name}; {dtype}; {world_size}" for world_size in (2, 3))


def digest_of(path: Path, case: str) -> list[Any]:
    """The digest of what all ranks hold in the end, and the bytes that each has sent."""
    *arguments, world_size = case.split("; ")
    results = run_ranks(RUNS[path], int(world_size), *arguments)
    ((digest,), n_bytes) = {found for found, _ in results}, [n for _, n in results]
    return [digest, n_bytes]


EXPECTED = {(path, case): found for path in RUNS for case, found in json.loads(path.read_text()).items()}


@pytest.mark.parametrize(("path", "case"), EXPECTED, ids=[case for _, case in EXPECTED])
def test_results_and_bytes_are_those_of_before(path: Path, case: str) -> None:
    assert digest_of(path, case) == EXPECTED[path, case]


if __name__ == "__main__":
    for path in RUNS:
        path.write_text(json.dumps({case: digest_of(path, case) for case in cases_of(path)}, indent=1) + "\n")
