"""Python processes that begin warm: forked from a server that has imported torch once, as the ranks of `ranks.py` are.

A fresh interpreter is 2 to 4 s of a core before its first own line, and commands start one for each rank. With the
fixture `warm_interpreters`, every `python -m ...` and `python SCRIPT ...` that a test starts, and that those start, is
forked (see `warm/`). Tests whose subject is a process itself do without: signals, groups, what is imported when.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

_FOLDER = Path(__file__).parent / "warm"
# What takes long, of a rank's imports. torch._dynamo comes with its first optimizer: 0.8 s, where its test takes 0.1 s.
MODULES = (
    "torch", "torch.distributed.fsdp", "torch.distributed.optim", "torch.nn.parallel", "torch.distributed.run", "torch._dynamo",
    "gradwire.doors.attachment", "gradwire_lab.training.launching",
)  # fmt: skip


@contextlib.contextmanager
def warm_server(*modules: str) -> Iterator[dict[str, str]]:
    """A server that has imported `modules` too. Yields: the variables with which processes are forked from it.

    There are no such variables where this is not Linux: processes begin fresh.
    """
    if not hasattr(os, "pidfd_open"):
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="gradwire-warm-") as folder:
        address = str(Path(folder) / "server")
        command = [sys.executable, str(_FOLDER / "server.py"), address, *MODULES, *modules]
        server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == "ready\n"
            namespaces = (os.readlink(f"/proc/self/ns/{kind}") for kind in ("mnt", "pid", "user"))
            path = os.pathsep.join([str(_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])])
            yield {"GRADWIRE_TESTS_WARM": f"{address}|{' '.join(namespaces)}", "PYTHONPATH": path}
        finally:
            server.stdin.close()  # ends it, and whatever was left running
            server.stdout.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(30)
            server.kill()
            server.wait()
