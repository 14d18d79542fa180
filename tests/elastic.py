"""Ranks that come and go, each a process of its own (tests/distributed/elastic_rank.py), at a lighthouse of torchft's."""

import contextlib
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torchft.coordination import LighthouseServer

from ranks import patience

RANK = Path(__file__).parent / "distributed" / "elastic_rank.py"


class Site:
    """A lighthouse, and the ranks that were started at it."""

    def __init__(self) -> None:
        self.lighthouse = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=20_000, heartbeat_timeout_ms=2_000
        )
        self.ranks: dict[int, subprocess.Popen[str]] = {}

    def start(self, name: int, **plan: Any) -> None:
        told = json.dumps({"lighthouse": self.lighthouse.address(), "name": name, **plan})
        self.ranks[name] = subprocess.Popen([sys.executable, RANK, told], stdout=subprocess.PIPE, text=True)

    def wait_for(self, name: int, fact: str) -> dict[str, Any]:
        """The first line of this rank that tells such a fact; what it says before is dropped."""
        stdout = self.ranks[name].stdout
        assert stdout is not None
        for line in stdout:
            if fact in (told := json.loads(line)):
                return told
        raise AssertionError(f"rank {name} ended without saying {fact!r}")

    def end(self) -> tuple[list[dict[str, Any]], dict[int, int]]:
        """All that was said, and the exit statuses."""
        said = []
        for rank in self.ranks.values():
            assert rank.stdout is not None
            said += [json.loads(line) for line in rank.stdout]
            rank.wait(timeout=20 * patience())
        return said, {name: rank.returncode for name, rank in self.ranks.items()}


@contextlib.contextmanager
def site() -> Iterator[Site]:
    one = Site()
    try:
        yield one
    finally:
        for rank in one.ranks.values():
            rank.kill()
            rank.wait()
        one.lighthouse.shutdown()


def by_step(said: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    steps = defaultdict(list)
    for told in said:
        if "step" in told:
            steps[told["step"]].append(told)
    return steps
