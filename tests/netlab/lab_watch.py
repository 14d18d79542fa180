"""What the netlab tests share: the command line, ranks' commands, a look at the kernel's processes and namespaces."""

import contextlib
import functools
import os
import queue
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from gradwire.errors import Unsupported
from gradwire_lab.ranks.netlab import Netlab
from programs import GRADWIRE, descendants
from ranks import patience

CLI = [*GRADWIRE, "netlab"]


def rank_command(script: str, *arguments: object) -> list[str]:
    return [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]


@functools.cache
def why_no_lab(rate: str) -> str | None:
    """What this machine lacks for a lab with such links, if it lacks something."""
    try:
        with Netlab(1, rate, require_shaping=True):
            return None
    except Unsupported as error:
        return str(error)


def lines_of(lab: Netlab, command: list[str], timeout_s: float = 100) -> list[str]:
    """What all ranks print, who end well."""
    lines: list[str] = []
    timeout_s *= patience()
    lab.run(command, on_line=lambda rank, line: lines.append(line), timeout_s=timeout_s).raise_if_failed()
    return lines


@contextlib.contextmanager
def streaming(n_ranks: int, rate: Any) -> Iterator[Netlab]:
    """A lab whose ranks are connected, and send to rank 0 without end."""
    connected: queue.Queue[str] = queue.Queue()
    with Netlab(n_ranks, rate) as lab:
        lab.start(rank_command("stream.py", 0), on_line=lambda rank, line: connected.put(line))
        connected.get(timeout=20 * patience())
        yield lab


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    """Poll `condition`; fails the test when it has not come true in time."""
    timeout_s *= patience()
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, f"{what}: not within {timeout_s} s"
        time.sleep(0.02)


class Started:
    """A process and all that it has started, with the network namespaces that it made, as of now."""

    def __init__(self, pid: int) -> None:
        self.pids = descendants(pid)
        self.namespaces = _namespaces(self.pids) - _namespaces([os.getpid()])

    def wait_for_the_end(self) -> None:
        wait_until(lambda: not any(map(is_running, self.pids)), "ranks, their children and the network process end")
        wait_until(lambda: not self.namespaces & _namespaces(os.listdir("/proc")), "the namespaces are empty")


def _namespaces(pids: Iterable[object]) -> set[int]:
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found.add(os.stat(f"/proc/{pid}/ns/net").st_ino)
    return found


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
