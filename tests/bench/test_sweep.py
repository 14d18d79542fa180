"""The sweep measures every row once, keeps what it has, and goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from gradwire.bench.cli import BENCHES
from gradwire.bench.sweep import Sweep
from gradwire.bench.sweep_table import ROWS, Row, choose_rows
from gradwire.cli import main
from gradwire.errors import GradwireError

_ROWS = [Row("one", "codec", ("--a", "1"), 10.0), Row("two", "train", ("--b", "2"), 20.0)]


class _Benches:
    """Stands for the processes: writes one record a call, and fails where told."""

    def __init__(self, failing: Sequence[str] = ()) -> None:
        self.failing, self.calls = set(failing), []

    def __call__(self, command: Sequence[str], log: Path) -> int:
        bench = command[command.index("bench") + 1]
        self.calls.append(bench)
        log.write_text(f"output of {bench}\n")
        Path(command[command.index("--json") + 1]).write_text(json.dumps([{"value": len(self.calls)}]))
        return int(bench in self.failing)


def _sweep(out: Path, benches: _Benches) -> tuple[Sweep, list[str]]:
    said: list[str] = []
    return Sweep(out, said.append, call=benches), said


def test_finished_rows_are_not_measured_again(tmp_path: Path) -> None:
    benches = _Benches()
    assert _sweep(tmp_path, benches)[0].run(_ROWS) == 0
    assert _sweep(tmp_path, benches)[0].run(_ROWS) == 0
    assert benches.calls == ["codec", "train"]
    records = json.loads((tmp_path / "results.json").read_text())
    assert [(record["row"], record["bench"], record["value"]) for record in records] == [
        ("one", "codec", 1),
        ("two", "train", 2),
    ]


def test_row_whose_arguments_changed_is_measured_again(tmp_path: Path) -> None:
    benches = _Benches()
    _sweep(tmp_path, benches)[0].run(_ROWS)
    _sweep(tmp_path, benches)[0].run([Row("one", "codec", ("--a", "3"), 10.0), _ROWS[1]])
    assert benches.calls == ["codec", "train", "codec"]


def test_failed_row_keeps_its_results_and_does_not_stop_the_others(tmp_path: Path) -> None:
    benches = _Benches(failing=["codec"])
    sweep, said = _sweep(tmp_path, benches)
    assert sweep.run(_ROWS) == 1
    assert [record["row"] for record in sweep.records()] == ["one", "two"]
    assert any("output of codec" in line for line in said)
    assert any("1 of 2 rows failed: one" in line for line in said)
    benches.failing.clear()
    sweep, _ = _sweep(tmp_path, benches)
    assert sweep.run(_ROWS) == 0
    assert benches.calls == ["codec", "train", "codec"]
    assert [record["value"] for record in sweep.records()] == [2, 3], "only the last attempt of a row counts"


def test_sweep_that_was_killed_goes_on_where_it_stopped(tmp_path: Path) -> None:
    class _Killed(_Benches):
        def __call__(self, command: Sequence[str], log: Path) -> int:
            if len(self.calls) == 1:
                raise KeyboardInterrupt
            return super().__call__(command, log)

    killed = _Killed()
    with pytest.raises(KeyboardInterrupt):
        _sweep(tmp_path, killed)[0].run(_ROWS)
    assert len(json.loads((tmp_path / "results.json").read_text())) == 1
    benches = _Benches()
    _sweep(tmp_path, benches)[0].run(_ROWS)
    assert benches.calls == ["train"]


def test_fresh_measures_everything_again(tmp_path: Path) -> None:
    benches = _Benches()
    _sweep(tmp_path, benches)[0].run(_ROWS)
    _sweep(tmp_path, benches)[0].run(_ROWS, fresh=True)
    assert benches.calls == ["codec", "train"] * 2


def test_progress_names_the_row_and_the_time_that_is_left(tmp_path: Path) -> None:
    sweep, said = _sweep(tmp_path, _Benches())
    sweep.run(_ROWS)
    assert said[0].startswith("2 rows, about 30 s on two cores")
    assert said[1] == "[1/2] one: about 10 s; 30 s left in all"
    assert said[3].startswith("[2/2] two")


def test_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(GradwireError, match="could not write"):
        _sweep(tmp_path / "file", _Benches())


def test_a_row_runs_the_benchmark_of_its_name(tmp_path: Path) -> None:
    """With a real process: a row that cannot work fails with the benchmark's own message in its log."""
    sweep = Sweep(tmp_path, lambda _: None)
    assert sweep.run([Row("bad", "codec", ("--gradients", "{out}/absent.npz"), 1.0)]) == 1
    assert f"{tmp_path}/absent.npz: no such file" in (tmp_path / "logs" / "bad.txt").read_text()


def test_table_has_unique_keys_and_known_benchmarks() -> None:
    assert len({row.key for row in ROWS}) == len(ROWS)
    assert {row.bench for row in ROWS} <= BENCHES.keys()
    assert all(row.in_quick or row.in_full for row in ROWS)


def test_quick_set_is_estimated_at_under_half_an_hour() -> None:
    assert sum(row.estimate_s for row in choose_rows(quick=True)) < 1800


def test_unknown_row_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sweep", "--only", "nope"]) == 1
    assert "no row's key begins with nope" in capsys.readouterr().err
