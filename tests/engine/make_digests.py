"""Write digests.json anew: only where results or messages are meant to change."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import broadcast_cases
from exchange_cases import CASES, DTYPES, reduce_case

from ranks import run_ranks

DIGESTS = Path(__file__).with_name("digests.json")
BROADCAST_DIGESTS = Path(__file__).with_name("broadcast_digests.json")


def main() -> None:
    """Both files."""
    write_exchanges()
    write_broadcasts()


def write_broadcasts() -> None:
    """Every case, with its numbers of ranks."""
    found: dict[str, list] = {}
    for name, (_, _, _, world_sizes) in broadcast_cases.CASES.items():
        for world_size in world_sizes:
            print(name, world_size, flush=True)
            results = run_ranks(broadcast_cases.train_case, world_size, name)
            assert len({digest for digest, _ in results}) == 1
            found[f"{name}; {world_size}"] = [results[0][0], [n for _, n in results]]
    BROADCAST_DIGESTS.write_text(json.dumps(found, indent=1) + "\n")


def write_exchanges() -> None:
    """Every case, in every dtype that it takes, with 2 and 3 ranks."""
    found: dict[str, list] = {}
    for name in CASES:
        for dtype in DTYPES if name.startswith(("gcomp ", "one-bit")) else ["float32"]:
            for world_size in (2, 3):
                print(name, dtype, world_size, flush=True)
                results = run_ranks(reduce_case, world_size, name, dtype)
                assert len({digest for digest, _ in results}) == 1
                found[f"{name}, {dtype}, {world_size}"] = [results[0][0], [n for _, n in results]]
    DIGESTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
