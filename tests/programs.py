"""Programs that a test runs to their end."""

import contextlib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ranks import patience

GRADWIRE = [sys.executable, "-m", "gradwire"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(command: Sequence[object], timeout_s: float = 150, **options: Any) -> subprocess.CompletedProcess[str]:
    """Whatever it ends with; one that takes longer, on a machine that is not busy, has hung."""
    words = list(map(str, command))
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout_s * patience(), **options)


def run_well(command: Sequence[object], timeout_s: float = 150, **options: Any) -> str:
    """What it prints; it has to end with status 0."""
    ended = run(command, timeout_s, **options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def child_pids(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def descendants(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):  # it has ended
        for child in child_pids(pid):
            found += [child, *descendants(child)]
    return found
