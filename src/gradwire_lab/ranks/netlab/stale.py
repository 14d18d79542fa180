"""What a crashed lab leaves behind, and its end.

A lab's namespaces have no names: the kernel keeps them for as long as a process lives in them. Its network process
kills the ranks when the owner dies; only if both were killed at once can ranks stay on, and with them namespaces and
links. Such processes are known by a variable in their environment that names the owner.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

LAB_VARIABLE = "GRADWIRE_LAB"


def lab_identity(pid: int | None = None) -> str:
    """The owner's pid, its start time in clock ticks since boot (pids are used again), and its pid namespace."""
    pid = os.getpid() if pid is None else pid
    return f"{pid}.{_start_time(pid)}.{os.stat('/proc/self/ns/pid').st_ino}"


def _start_time(pid: int) -> int | None:
    """Clock ticks from boot to the process's start; None if there is no such process, or only a zombie."""
    try:
        # The second field is the command's name, in brackets, and may hold spaces and brackets itself.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def find_stale_labs() -> dict[str, set[int]]:
    """{identity of its dead owner: processes} of each such lab, among those whose environment this user may read."""
    labs: dict[str, set[int]] = {}
    marker = f"{LAB_VARIABLE}=".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for variable in variables:
            if variable.startswith(marker):
                labs.setdefault(variable[len(marker) :].decode(errors="replace"), set()).add(int(folder.name))
    return {identity: pids for identity, pids in sorted(labs.items()) if _is_stale(identity)}


def _is_stale(identity: str) -> bool:
    try:
        pid, start_time, pid_namespace = map(int, identity.split("."))
    except ValueError:  # not written by `lab_identity`: not ours to judge
        return False
    # Pids of another container mean nothing here.
    return pid_namespace == os.stat("/proc/self/ns/pid").st_ino and _start_time(pid) != start_time


def end_stale_labs() -> dict[str, set[int]]:
    """Kill the processes of dead owners' labs; the kernel then takes namespaces and links down. Returns what was killed."""
    ended: dict[str, set[int]] = {}
    give_up = time.monotonic() + 5
    # Again until none is left: a process may start another between the look and the kill.
    while (labs := find_stale_labs()) and time.monotonic() < give_up:
        for identity, pids in labs.items():
            ended.setdefault(identity, set()).update(pids)
            for pid in pids:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return ended
