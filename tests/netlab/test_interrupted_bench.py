"""What is interrupted ends at once and leaves no process, namespace or folder behind; a benchmark goes on where it was."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from lab_watch import Started, rank_command, wait_until

from programs import GRADWIRE
from ranks import patience

_ROOT = Path(__file__).parents[2]


class _Bench:
    """The command, started anew by every `start`, with what it says and all that it started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "tmp").mkdir()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, rate: str) -> subprocess.Popen[bytes]:
        words = ["--root", str(self._folder), "--machine", "here", "--folder", str(self._folder / "runs")]
        return self.start_command(rank_command("interrupted_bench.py", rate, *words))

    def start_command(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "TMPDIR": str(self._folder / "tmp"), "PYTHONPATH": str(_ROOT / "tests")}
        with (self._folder / "said").open("wb") as said:
            options = {"env": environment, "cwd": self._folder, "start_new_session": True}
            self.process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, **options)
        return self.process

    @property
    def said(self) -> str:
        return (self._folder / "said").read_text()

    @property
    def seeds(self) -> list[int]:
        path = self._folder / "results/here/small.jsonl"
        return [json.loads(line)["seed"] for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def started(self) -> Started:
        return Started(self.process.pid)

    def ranks(self) -> list[int]:
        """Those that have come as far as training: gradwire's core is loaded."""
        pids = self.started.pids
        return [pid for pid in pids if _read(pid, "environ", b"\0RANK=") and _read(pid, "maps", b"_native")]

    @property
    def leftovers(self) -> list[str]:
        return sorted(path.name for path in (self._folder / "tmp").iterdir() if path.name.startswith("gradwire"))


def _read(pid: int, name: str, word: bytes) -> bool:
    """Whether the word is in the process's file of that name."""
    try:
        return word in b"\0" + Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:  # it has ended
        return False


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[_Bench]:
    bench = _Bench(tmp_path)
    yield bench
    for pid in bench.started.pids:  # where the test failed
        os.kill(pid, signal.SIGKILL)
    if bench.process is not None:
        bench.process.kill()
        bench.process.wait()


def _interrupt(bench: _Bench, number: int, status: int, within_s: float = 60, n_started: int = 0) -> None:
    """While two ranks train, or so many processes run, and see all end that was started."""
    wait_until(lambda: len(bench.started.pids) >= n_started > 0 or len(bench.ranks()) == 2, "the ranks train", 60)
    started = bench.started
    if number == signal.SIGINT:  # a terminal sends it to the whole group
        os.killpg(bench.process.pid, number)
    else:
        bench.process.send_signal(number)
    assert bench.process.wait(within_s * patience()) == status, bench.said
    started.wait_for_the_end()
    if number != signal.SIGKILL:
        assert bench.leftovers == []


@pytest.mark.root
def test_nothing_is_left_of_a_benchmark_in_a_lab_that_is_killed(bench: _Bench) -> None:
    bench.start("1gbit,1gbit")
    _interrupt(bench, signal.SIGKILL, -signal.SIGKILL)
    assert bench.seeds == []


def test_interrupted_benchmark_goes_on_with_the_same_command(bench: _Bench) -> None:
    bench.start("none")
    wait_until(lambda: "[2/2]" in bench.said, "the first run is measured", 60)
    _interrupt(bench, signal.SIGTERM, 143)
    assert bench.seeds == [1, 1]
    assert bench.start("none").wait(60 * patience()) == 0, bench.said
    assert "1 runs are finished" in bench.said
    assert "[1/1] small seed=2" in bench.said
    assert bench.seeds == [1, 1, 2, 2]


@pytest.mark.root
@pytest.mark.parametrize(
    "words",
    [
        "demo --quick",
        "train --ranks 2 --rate 100mbit",
        "bench train --scheme ddp --ranks 2 --rate 100mbit",
        f"netlab run --ranks 2 -- {sys.executable} {_ROOT / 'examples' / 'ddp_minimal.py'}",
    ],
    ids=lambda words: words.split()[0],
)
def test_ctrl_c_ends_a_command_and_its_ranks_within_two_seconds(bench: _Bench, words: str) -> None:
    bench.start_command([*GRADWIRE, *words.split()])
    _interrupt(bench, signal.SIGINT, 130, 2)


def test_ctrl_c_ends_a_campaign_within_two_seconds(bench: _Bench) -> None:
    bench.start_command([sys.executable, "-m", "campaign", "--minutes", "1"])
    _interrupt(bench, signal.SIGINT, 130, 2, n_started=4)  # ranks, beside the fork server and its helper
