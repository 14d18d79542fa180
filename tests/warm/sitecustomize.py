"""Python imports this at its start where it is on PYTHONPATH: hands the command over to the warm server (`server.py`).

What stays of this process passes signals on to the one that works for it, and ends as that ends. A command for which a
fork cannot stand runs here, as ever: options of the interpreter, a program on the command line, descriptors handed down.
"""

import os
import sys


def _command() -> "list[str] | None":
    """From -m or the script on; None if a fork cannot stand for it."""
    words = sys.orig_argv[1:]
    if words[:1] == ["-u"]:
        words = words[1:]
    is_plain = words[:1] == ["-m"] or (words and words[0].endswith(".py") and not words[0].startswith("-"))
    return words if is_plain and not _descriptors_handed_down() else None


def _descriptors_handed_down() -> bool:
    for number in os.listdir("/proc/self/fd"):
        try:
            # A lab's ranks are handed their network namespace, and have entered it by now.
            if (
                int(number) > 2
                and os.get_inheritable(int(number))
                and "net:" not in os.readlink(f"/proc/self/fd/{number}")
            ):
                return True
        except OSError:  # that of the folder itself, closed by now
            pass
    return False


def _namespaces() -> "list[str]":
    return [os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "pid", "user")]


def _number(line: str) -> int:
    if not line:
        os.write(2, b"the warm server of the tests has ended\n")
        os._exit(70)  # an exception would let the command begin again here
    return int(line)


def _relay(address: str, words: "list[str]") -> None:
    import json
    import signal
    import socket

    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    forwarded = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)  # until there is somebody to pass them on to
    request = {
        "words": words,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "network": os.readlink("/proc/self/ns/net"),
        "pid": os.getpid(),
        "leads": os.getpgrp() == os.getpid(),
    }
    packed = json.dumps(request).encode()
    socket.send_fds(connection, [len(packed).to_bytes(8, "little")], [0, 1, 2])
    connection.sendall(packed)
    answers = connection.makefile("r")
    child = _number(answers.readline())
    for number in forwarded:
        signal.signal(number, lambda number, _: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, forwarded)
    code = os.waitstatus_to_exitcode(_number(answers.readline()))
    if code >= 0:
        os._exit(code)
    if code != -signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(128 - code)  # not reached, unless the signal kills nobody


_address, _, _theirs = os.environ.get("GRADWIRE_TESTS_WARM", "").partition("|")
if _address and _theirs == " ".join(_namespaces()):
    _words = _command()
    if _words:
        _relay(_address, _words)
