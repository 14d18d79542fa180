"""Forks processes that have imported torch and gradwire already: python server.py ADDRESS MODULE...

A request (`sitecustomize.py`) brings a command, its standard streams, folder and environment. What is forked begins and
ends as a fresh interpreter would, and is killed when the process that asked goes. This one has a single thread, so that
a fork of it is whole. It ends with its standard input.
"""

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import types
from pathlib import Path
from typing import Any


class Child:
    """A forked process, and the connection of the one that it works for."""

    def __init__(self, pid: int, leads: bool, connection: socket.socket) -> None:
        self.pid = pid
        self.connection = connection
        self.end = os.pidfd_open(pid)
        self._leads = leads

    def kill(self) -> None:
        """With its group, if it leads one."""
        with contextlib.suppress(ProcessLookupError):
            if self._leads:
                os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # it may not have come to lead it yet
            os.kill(self.pid, signal.SIGKILL)


def serve(address: str) -> dict[str, Any]:
    """Serve until standard input ends, which ends this process. Returns in every forked process: what was asked for."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(sys.stdin.fileno(), selectors.EVENT_READ)
    children: set[Child] = set()
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            child = key.data
            if key.fileobj is listener:
                connection, _ = listener.accept()
                request = begin(connection)
                if request is None:
                    continue
                pid = os.fork()
                if pid == 0:
                    return request
                for descriptor in request["streams"]:
                    os.close(descriptor)
                child = Child(pid, request["leads"], connection)
                children.add(child)
                selector.register(child.end, selectors.EVENT_READ, child)
                selector.register(connection, selectors.EVENT_READ, child)
                answer(connection, pid)
            elif child is None:
                for child in children:
                    child.kill()
                os._exit(0)  # torch's own ends may wait
            elif child in children:  # else both of its events came at once
                if key.fileobj is child.connection:
                    child.kill()
                answer(child.connection, os.waitpid(child.pid, 0)[1])
                for thing in (child.end, child.connection):
                    selector.unregister(thing)
                os.close(child.end)
                child.connection.close()
                children.remove(child)


def begin(connection: socket.socket) -> dict[str, Any] | None:
    """The request; None if who asked has gone."""
    try:
        length, streams, _, _ = socket.recv_fds(connection, 8, 3)
        request = json.loads(connection.makefile("rb").read(int.from_bytes(length, "little")))
    except (OSError, ValueError):
        connection.close()
        return None
    return {**request, "streams": streams}


def answer(connection: socket.socket, number: int) -> None:
    """It may not be there any more."""
    with contextlib.suppress(OSError):
        connection.sendall(f"{number}\n".encode())


def become(request: dict[str, Any]) -> None:
    """Take over everything that an interpreter has from the process that started it."""
    if request["network"] != os.readlink("/proc/self/ns/net"):
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/proc/{request['pid']}/ns/net") as namespace:
            if libc.setns(namespace.fileno(), 0):
                sys.exit(f"cannot enter the rank's network: {os.strerror(ctypes.get_errno())}")
    for number, descriptor in enumerate(request["streams"]):
        os.dup2(descriptor, number)
    os.closerange(3, 4096)
    if request["leads"]:
        os.setsid()
    os.chdir(request["folder"])
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ.clear()
    os.environ.update(request["environment"])
    is_unbuffered = "-u" in request["orig_argv"][1:2] or bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout = sys.__stdout__ = output(1, is_unbuffered)
    sys.stderr = sys.__stderr__ = output(2, is_unbuffered, errors="backslashreplace", line_buffering=True)
    sys.orig_argv, sys.path[:] = request["orig_argv"], request["path"]
    importlib.invalidate_caches()
    gc.freeze()  # what the server has imported: collecting garbage would walk through it, and copy its pages

    import numpy as np
    import torch

    np.random.seed()
    if os.environ.get("OMP_NUM_THREADS", threads) != threads:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def output(descriptor: int, is_unbuffered: bool, **options: Any) -> io.TextIOWrapper:
    """Standard output or error, as the interpreter opens them."""
    raw = io.FileIO(descriptor, "w", closefd=False)
    return io.TextIOWrapper(raw if is_unbuffered else io.BufferedWriter(raw), write_through=is_unbuffered, **options)


def run(words: list[str]) -> None:
    """As the interpreter does: `-m MODULE ...` or `SCRIPT ...`."""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = sys.modules["builtins"]
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(words[1])
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        main.__file__ = os.path.abspath(words[0])
        exec(compile(Path(words[0]).read_bytes(), main.__file__, "exec"), main.__dict__)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    asked = serve(sys.argv[1])
    become(asked)
    run(asked["words"])  # and then ends as an interpreter does
