"""What the netlab tests share: whether this machine can have a lab, the command line, and looking at the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gradwire.errors import Unsupported
from gradwire.netlab import Netlab

STREAM = Path(__file__).with_name("stream.py")
CLI = [sys.executable, "-m", "gradwire.cli", "netlab"]


@pytest.fixture(scope="session", autouse=True)
def no_leftovers() -> None:
    """Whatever a test does, the next session finds nothing of it: ranks carry the lab's variable and `clean` works."""
    subprocess.run([*CLI, "clean"], check=True, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="session")
def _lab_possible() -> str | None:
    try:
        with Netlab(1, "100mbit", require_shaping=True):
            return None
    except Unsupported as error:
        return str(error)


@pytest.fixture(autouse=True)
def _skip_without_lab(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("root") is not None:
        why = request.getfixturevalue("_lab_possible")
        if why is not None:
            pytest.skip(why)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Poll `condition`; fails the test when it has not come true in time."""
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
