"""`fuzz/run`, beside harnesses that only count: how far each one goes, and what is said of it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_FUZZ = Path(__file__).parents[2] / "fuzz"

# Each stands for a compiled program and notes with what it was called.
_DRIVER = 'echo "$0 $@" >> calls; [ -z "${3:-}" ] || echo seed > "$3/0"'
_LIBFUZZER = """echo "$0 $@" >> calls
echo '#2048 pulse  cov: 80 ft: 190 corp: 33/2kb lim: 4096 exec/s: 682'
echo '#5000 DONE   cov: 82 ft: 204 corp: 41/3kb lim: 4096 exec/s: 700'
echo 'stat::number_of_executed_units: 5000'"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "fuzz").mkdir()
    for name in ("run", "corpus.py"):
        shutil.copy(_FUZZ / name, tmp_path / "fuzz" / name)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    _program(tmp_path / "bin/cmake", "exit 0")
    _program(tmp_path / "bin/clang++", "exit 0")
    for folder in ("build/fuzz", "build/fuzz-threads"):
        (tmp_path / folder).mkdir(parents=True)
        _program(tmp_path / folder / "exercise_mesh", _DRIVER)
    return tmp_path


def _program(path: Path, body: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def _run(place: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    outside = {key: value for key, value in os.environ.items() if not key.startswith("FUZZ_")}
    return subprocess.run(
        ["fuzz/run", *arguments],
        cwd=place,
        env={**outside, "PYTHON": str(place / "bin/python"), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def _table(run: subprocess.CompletedProcess[str]) -> dict[str, list[str]]:
    """Harness: runs, corpus, found; seconds differ from run to run."""
    lines = [line.split() for line in run.stdout.splitlines()]
    begins = lines.index(["harness", "runs", "seconds", "corpus", "found"])
    return {name: [runs, corpus, found] for name, runs, _, corpus, found in lines[begins + 1 :]}


def _calls(place: Path, name: str) -> list[list[str]]:
    calls = [line.split() for line in (place / "calls").read_text().splitlines()]
    return [call[1:] for call in calls if call[0] == name]


def test_driver_and_mesh_end_after_so_many_runs(place: Path) -> None:
    _program(place / "build/fuzz/drive_sums", _DRIVER)
    run = _run(place, FUZZ_RUNS="5000")
    assert run.returncode == 0, run.stderr
    assert _table(run) == {"sums": ["5000", "-", "nothing"], "mesh": ["5000", "-", "nothing"]}
    portions = [(int(n), int(seed)) for n, seed in _calls(place, "build/fuzz/drive_sums")]
    assert [n for n, _ in portions] == [2000, 2000, 1000]
    assert len({seed for _, seed in portions}) == 3  # no portion is the one before once more
    for folder in ("fuzz", "fuzz-threads"):  # a run of the mesh is one under each sanitizer
        assert sum(int(n) for n, _ in _calls(place, f"build/{folder}/exercise_mesh")) == 5000


def test_seconds_end_it_where_runs_do_not(place: Path) -> None:
    _program(place / "build/fuzz/drive_sums", f"{_DRIVER}; sleep 0.3")
    run = _run(place, "1", "sums", FUZZ_RUNS="1000000000")
    assert run.returncode == 0, run.stderr
    n_runs = int(_table(run)["sums"][0])
    assert n_runs == 2000 * len(_calls(place, "build/fuzz/drive_sums"))
    assert 2000 <= n_runs <= 5 * 2000


def test_libfuzzer_gets_both_bounds_and_its_counts_are_told(place: Path) -> None:
    _program(place / "build/fuzz/drive_sums", _DRIVER)
    _program(place / "build/fuzz/fuzz_sums", _LIBFUZZER)
    for arguments, runs, expected in (
        (("9", "sums"), "5000", ("-max_total_time=9", "-runs=5000")),
        (("", "sums"), "5000", ("-max_total_time=3600", "-runs=5000")),
        (("", "sums"), "", ("-max_total_time=60", "-runs=-1")),
    ):
        run = _run(place, *arguments, FUZZ_RUNS=runs)
        assert run.returncode == 0, run.stderr
        assert _table(run) == {"sums": ["5000", "41", "nothing"]}
        assert set(expected) <= set(_calls(place, "build/fuzz/fuzz_sums")[-1])


def test_what_is_found_fails_the_run_and_the_others_still_run(place: Path) -> None:
    _program(place / "build/fuzz/drive_a", _DRIVER)
    _program(place / "build/fuzz/fuzz_a", f"{_LIBFUZZER}; echo 'ERROR: heap-buffer-overflow'; exit 77")
    _program(place / "build/fuzz/drive_b", f"{_DRIVER}; exit 1")
    _program(place / "build/fuzz/drive_c", "exit 1")
    _program(place / "build/fuzz/fuzz_c", _LIBFUZZER)
    _program(place / "build/fuzz/drive_d", _DRIVER)
    _program(place / "build/fuzz-threads/exercise_mesh", "exit 66")
    run = _run(place, FUZZ_RUNS="100")
    assert run.returncode == 1
    assert _table(run) == {
        "a": ["5000", "41", "something"],
        "b": ["0", "-", "something"],
        "c": ["0", "-", "something"],
        "d": ["100", "-", "nothing"],
        "mesh": ["0", "-", "something"],
    }
    assert "heap-buffer-overflow" in run.stdout
    assert "again: build/fuzz/drive_b 100 " in run.stdout
    assert "drive_c made no seeds" in run.stdout
    assert "again: build/fuzz-threads/exercise_mesh 3 " in run.stdout


@pytest.mark.parametrize("bound", ["0", "1e6", "-5", "many"])
def test_bound_that_is_no_number_is_refused(place: Path, bound: str) -> None:
    for arguments, runs in ((("",), bound), ((bound,), "")):
        run = _run(place, *arguments, FUZZ_RUNS=runs)
        assert run.returncode == 2
        assert f"not '{bound}'" in run.stderr
