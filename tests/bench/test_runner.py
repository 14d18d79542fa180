"""The runner measures every run once, keeps what the store has, and goes on where it stopped."""

import dataclasses
import errno
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from gradwire.errors import GradwireError
from gradwire_lab.bench import runner
from gradwire_lab.bench.measures import Call
from gradwire_lab.bench.runner import Runner, watched_load
from gradwire_lab.results.experiment import Cell, Experiment
from gradwire_lab.results.records import Record, Store, state_of

AXES = {"rate": ["fast", "slow"], "scheme": ["a", "b"]}
ONE = Experiment("one", "schemes", "?", "codec", AXES, {"steps": 5}, seconds=10)
TWO = Experiment("two", "schemes", "?", "train", {"scheme": ["a"]}, seconds=20)

CODE = ["as it is"]


class _Measures:
    """Stands for the measures: one record a cell with the number of the call in it, and fails where told."""

    def __init__(self, failing: Sequence[str] = ()) -> None:
        self.failing, self.calls = set(failing), []

    def __call__(self, name: str) -> Callable[[Call], list[tuple[Cell, Record]]]:
        def measure(call: Call) -> list[tuple[Cell, Record]]:
            self.calls.append((call.key, *call.shared.values()))
            if call.key in self.failing:
                raise GradwireError(f"output of {call.key}")
            return [(cell, {"value": len(self.calls), "scheme": "own", "elapsed_s": 1.5}) for cell in call.cells]

        return measure


@pytest.fixture(autouse=True)
def _pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "by_name", runner.by_name)
    monkeypatch.setattr(runner, "code_of", lambda measure: CODE[-1])
    monkeypatch.setattr(runner, "check_network", lambda n_ranks, rate: 0.99)


def _runner(folder: Path, measures: Any) -> tuple[Runner, list[str]]:
    said: list[str] = []
    runner.by_name = measures  # until the test has ended
    return Runner(Store(folder / "results", "here"), said.append, folder / "runs"), said


def _run(folder: Path, measures: Any, experiments: Sequence[Experiment] = (ONE, TWO), **options: Any) -> int:
    made, _ = _runner(folder, measures)
    return made.run(made.plan(experiments, **options))


def _records(folder: Path, key: str) -> list[Record]:
    return Store(folder / "results", "here").read(key)


def _values(folder: Path, key: str) -> list[int]:
    return [record["value"] for record in _records(folder, key)]


def test_finished_runs_are_not_measured_again_and_records_say_where_they_were(tmp_path: Path) -> None:
    measures = _Measures()
    assert _run(tmp_path, measures) == _run(tmp_path, measures) == 0
    assert measures.calls == [("one", "fast"), ("one", "slow"), ("two",)]
    assert [(r["rate"], r["scheme"], r["value"]) for r in _records(tmp_path, "one")] == [
        ("fast", "a", 1), ("fast", "b", 1), ("slow", "a", 2), ("slow", "b", 2)
    ]  # fmt: skip
    fields = {"commit", "code", "date", "cpu", "n_cores", "torch", "load_before", "load_during", "run_s"}
    for record in _records(tmp_path, "one"):
        assert fields <= record.keys()
        assert (record["network_check"], record["elapsed_s"]) == (0.99, 1.5)
        assert all(not isinstance(value, dict | list) for value in record.values())


def test_run_whose_settings_changed_is_measured_again(tmp_path: Path) -> None:
    measures = _Measures()
    _run(tmp_path, measures)
    _run(tmp_path, measures, [dataclasses.replace(ONE, fixed={"steps": 6}), TWO])
    assert measures.calls[3:] == [("one", "fast"), ("one", "slow")]
    _run(tmp_path, measures, [dataclasses.replace(TWO, axes={"scheme": ["a", "b"]})])
    assert measures.calls[5:] == [("two",)], "a scheme more is another run: only within one do ratios hold"
    assert _values(tmp_path, "two") == [6, 6]


def test_run_of_other_code_is_measured_anew_unless_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measures = _Measures()
    _run(tmp_path, measures, [TWO])
    monkeypatch.setattr(sys.modules[__name__], "CODE", ["other"])
    assert _run(tmp_path, measures, [TWO], missing=True) == 0
    assert len(measures.calls) == 1
    _run(tmp_path, measures, [TWO])
    assert len(measures.calls) == 2


def test_a_run_is_current_stale_or_was_never_measured(tmp_path: Path) -> None:
    _run(tmp_path, _Measures(), [ONE])
    fast, slow = ONE.groups()
    records = _records(tmp_path, "one")
    assert state_of(ONE, fast, records, CODE[-1]) == "current"
    assert state_of(ONE, fast, records, "other") == "stale"
    assert state_of(ONE, fast, records[1:], CODE[-1]) == "never"
    assert state_of(dataclasses.replace(ONE, fixed={}), slow, records, CODE[-1]) == "stale"
    records[0]["run"] = "another"
    assert state_of(ONE, fast, records, CODE[-1]) == "stale", "only within one run do ratios hold"


def test_a_list_leaves_out_what_is_current_on_another_machine(tmp_path: Path) -> None:
    _run(tmp_path, _Measures())
    made = dataclasses.replace(_runner(tmp_path, _Measures())[0], store=Store(tmp_path / "results", "elsewhere"))
    assert len(made.plan([ONE, TWO])) == len(made.plan([ONE, TWO], anywhere=True, fresh=True)) == 3
    assert not made.plan([ONE, TWO], anywhere=True)
    path = Store(tmp_path / "results", "here").path("one")
    path.write_text(path.read_text().split("\n", 1)[1])  # without a cell of the first run of `one`
    assert [run.cells for run in made.plan([ONE, TWO], anywhere=True)] == ONE.groups()[:1]


def test_cheap_runs_come_first_and_before_them_what_others_depend_on(tmp_path: Path) -> None:
    sizes = dataclasses.replace(TWO, key="sizes", measure="simulator-sizes", seconds=500)
    planned = _runner(tmp_path, _Measures())[0].plan([TWO, sizes, ONE])
    assert [run.experiment.key for run in planned] == ["sizes", "one", "one", "two"]


def test_failed_run_keeps_the_old_results_and_does_not_stop_the_others(tmp_path: Path) -> None:
    _run(tmp_path, _Measures())
    measures = _Measures(failing=["one"])
    made, said = _runner(tmp_path, measures)
    assert made.run(made.plan([ONE, TWO], fresh=True)) == 1
    assert _values(tmp_path, "one") == [1, 1, 2, 2]
    assert _values(tmp_path, "two") == [3]
    assert any("output of one" in line for line in said)
    assert any("failed: one rate=fast" in line for line in said)


def test_run_that_was_stopped_goes_on_where_it_stopped_and_costs_nothing(tmp_path: Path) -> None:
    _run(tmp_path, _Measures(), [TWO])

    class _Stopped(_Measures):
        def __call__(self, name: str) -> Any:
            if len(self.calls) == 1:
                raise KeyboardInterrupt
            return super().__call__(name)

    with pytest.raises(KeyboardInterrupt):
        _run(tmp_path, _Stopped(), fresh=True)
    assert _values(tmp_path, "one") == [1, 1]
    assert _values(tmp_path, "two") == [1], "what was measured before the stopped run is kept"
    measures = _Measures()
    _run(tmp_path, measures)
    assert measures.calls == [("one", "slow")]


def test_full_disk_is_a_clear_error_and_keeps_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(tmp_path, _Measures(), [TWO])
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    with pytest.raises(GradwireError, match="No space left"):
        _run(tmp_path, _Measures(), [TWO], fresh=True)
    monkeypatch.undo()
    assert _values(tmp_path, "two") == [1]
    assert [path.name for path in (tmp_path / "results" / "here").iterdir()] == ["two.jsonl"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "results").write_text("")
    with pytest.raises(GradwireError, match="could not write"):
        _run(tmp_path / "other", _Measures())


def test_cell_that_a_measure_leaves_out_is_told_and_not_tried_for_ever(tmp_path: Path) -> None:
    def measures(name: str) -> Any:
        return lambda call: [(call.cells[0], {"value": 1})]

    experiment = dataclasses.replace(TWO, axes={"scheme": ["a", "missing"]})
    _run(tmp_path, measures, [experiment])
    assert "absent" in _records(tmp_path, "two")[1]
    assert not _runner(tmp_path, measures)[0].plan([experiment])


def test_progress_names_the_run_and_the_time_that_is_left(tmp_path: Path) -> None:
    made, said = _runner(tmp_path, _Measures())
    made.run(made.plan([ONE, TWO]))
    assert said[0].startswith("3 runs, about 40 s with nothing else running")
    assert said[1] == "[1/3] one rate=fast: about 10 s; 40 s left in all"
    assert said[5].startswith("[3/3] two")


def test_what_a_run_took_is_the_next_estimate(tmp_path: Path) -> None:
    _run(tmp_path, _Measures(), [TWO])
    path = Store(tmp_path / "results", "here").path("two")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"run_s": 77.0}) + "\n")
    made, _ = _runner(tmp_path, _Measures())
    assert made.estimate_s(made.plan([ONE, TWO], fresh=True)) == 10 + 10 + 77


def test_load_beside_a_run_is_that_of_others() -> None:
    with watched_load() as load:
        sum(range(3_000_000))
    before, during = load.values()
    assert before is not None
    assert before >= 0
    assert during is None or 0 <= during <= (os.cpu_count() or 1)
