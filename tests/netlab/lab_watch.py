"""What the netlab tests share: the command line, and a look at the kernel's processes and namespaces."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ranks import patience

STREAM = Path(__file__).with_name("stream.py")
CLI = [sys.executable, "-m", "gradwire", "netlab"]


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Poll `condition`; fails the test when it has not come true in time."""
    timeout_s *= patience()
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, f"{what}: not within {timeout_s} s"
        time.sleep(0.02)


def network_namespaces() -> set[int]:
    """The network namespaces in which processes live."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found.add(os.stat(f"/proc/{pid}/ns/net").st_ino)
        except OSError:
            continue
    return found


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def child_pids(pid: int) -> list[int]:
    """The direct children of a process."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
