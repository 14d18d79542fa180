"""How tests start processes: one that begins warm is, to whoever starts it, what a fresh interpreter is."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import pytest

import ranks
from ranks import patience

SCRIPT = """
import os, sys
def imported():
    return [name for name in sys.modules if name.startswith(("torch.", "gradwire."))]
began_with = len(imported())
if "--modules" in sys.argv:
    sys.exit(f"began with {began_with}")
print(__name__, __file__, sys.argv, sys.path[0], os.getcwd(), os.environ["TOLD"], os.environ.get("MAKEFLAGS"))
print(sys.stdin.read(), os.getpgrp() == os.getpid(), os.getsid(0) == os.getpid(), flush=True)
os.write(2, b"said at once\\n")
print("held back, and written all the same")
if "--code" in sys.argv:
    sys.exit(41)
if "--raise" in sys.argv:
    raise ValueError("of my own")
if "--signal" in sys.argv:
    sys.stdout.flush()
    os.kill(os.getpid(), int(sys.argv[-1]))
"""

WAIT = """
import os, signal, sys, time
if "--catch" in sys.argv:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
print(os.getpid(), flush=True)
while True:  # a signal just before one long sleep would be heard after it
    time.sleep(0.1)
"""


@pytest.fixture
def variables(tmp_path: Path, warm_interpreters: None) -> dict[str, str]:
    if "GRADWIRE_TESTS_WARM" not in os.environ:
        pytest.skip("processes begin warm on Linux alone")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "wait.py").write_text(WAIT)
    return {**os.environ, "TOLD": "this"}


def run(folder: Path, variables: Mapping[str, str], *words: str, **options: bool) -> tuple[int, str, str]:
    ended = subprocess.run(
        [sys.executable, *words], cwd=folder, env=variables, input="to read", capture_output=True, text=True,
        timeout=60 * patience(), **options,
    )  # fmt: skip
    return ended.returncode, ended.stdout, ended.stderr


@pytest.mark.parametrize("ending", [[], ["--code"], ["--raise"], ["--signal", "15"], ["--signal", "9"]], ids=str)
@pytest.mark.parametrize(
    ("program", "leads"), [(["script.py"], False), (["-m", "script"], True), (["-u", "script.py"], True)], ids=str
)
def test_both_begin_and_end_alike(
    program: list[str], leads: bool, ending: list[str], tmp_path: Path, variables: dict[str, str]
) -> None:
    fresh = {name: value for name, value in variables.items() if name != "GRADWIRE_TESTS_WARM"}
    words = [*program, *ending]
    found, expected = (run(tmp_path, each, *words, start_new_session=leads) for each in (variables, fresh))
    assert found[:2] == expected[:2]
    # A traceback of a fork begins with the lines of the server.
    lines, expected_lines = found[2].splitlines(), expected[2].splitlines()
    assert (lines[:1], lines[-1:]) == (expected_lines[:1], expected_lines[-1:])


def test_only_a_warm_one_has_torch_before_its_first_line(tmp_path: Path, variables: dict[str, str]) -> None:
    code, _, err = run(tmp_path, variables, "script.py", "--modules")
    assert code == 1
    assert int(err.split()[-1]) > 100
    for words in (["-X", "utf8", "script.py", "--modules"], ["-I", "script.py", "--modules"]):
        assert run(tmp_path, variables, *words) == (1, "", "began with 0\n")


def begin(folder: Path, variables: Mapping[str, str], *words: str) -> tuple[subprocess.Popen[str], int]:
    """The process that was started, and the one that runs the script."""
    process = subprocess.Popen(
        [sys.executable, "wait.py", *words], cwd=folder, env=variables, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_signals_arrive_and_a_killed_process_takes_its_fork_along(tmp_path: Path, variables: dict[str, str]) -> None:
    for words, number, code in (
        (["--catch"], signal.SIGTERM, 7),
        ([], signal.SIGTERM, -signal.SIGTERM),
        ([], signal.SIGKILL, -signal.SIGKILL),
    ):
        process, pid = begin(tmp_path, variables, *words)
        assert pid != process.pid
        process.send_signal(number)
        assert process.wait(30 * patience()) == code
        give_up = time.monotonic() + 30 * patience()
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < give_up, "the fork still runs"
            time.sleep(0.01)


def name_itself(rank: int, world_size: int) -> int:
    return rank


def test_ranks_start_again_where_another_program_has_taken_their_port() -> None:
    with socket.socket() as taken:
        taken.bind(("", ranks.find_free_port()))
        taken.listen()
        ports = [taken.getsockname()[1], ranks.find_free_port()]
        with mock.patch.object(ranks, "find_free_port", side_effect=ports) as found:
            assert ranks.run_ranks(name_itself, 2) == [0, 1]
        assert found.call_count == 2
