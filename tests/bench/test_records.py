"""Results that were written stay, whatever happens to the disk or the process afterwards."""

import csv
import json
from pathlib import Path

import pytest

from gradwire.errors import GradwireError
from gradwire_lab.results.records import RecordLog, write_csv, write_json


def test_log_keeps_whole_records_behind_a_torn_line(tmp_path: Path) -> None:
    log = RecordLog(tmp_path / "log.jsonl")
    log.append([{"a": 1}, {"a": 2}])
    with log.path.open("a") as file:
        file.write('{"a": 3, "b"')  # the process died here
    again = RecordLog(log.path)
    again.append([{"a": 4}])
    assert [record["a"] for record in again.read()] == [1, 2, 4]


def test_full_disk_is_a_clear_error_and_costs_nothing_written_before(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full to stand for a full disk")
    log = RecordLog(tmp_path / "log.jsonl")
    log.append([{"a": 1}])
    log.path = full
    with pytest.raises(GradwireError, match="No space left"):
        log.append([{"a": 2}])
    assert json.loads((tmp_path / "log.jsonl").read_text()) == {"a": 1}


def test_failed_write_leaves_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    write_json(path, [{"a": 1}])
    (tmp_path / "results.json.partial").mkdir()  # stands in the way of the new file
    with pytest.raises(GradwireError, match=r"results\.json"):
        write_json(path, [{"a": 2}])
    assert json.loads(path.read_text()) == [{"a": 1}]


def test_folder_that_cannot_be_made_is_found_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(GradwireError, match="could not write"):
        RecordLog(tmp_path / "file" / "log.jsonl")


def test_csv_has_a_column_for_every_field_of_any_record(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", [{"a": 1}, {"a": 2, "b": "x"}])
    with (tmp_path / "a.csv").open() as file:
        assert list(csv.DictReader(file)) == [{"a": "1", "b": ""}, {"a": "2", "b": "x"}]


def test_what_is_not_finite_becomes_null(tmp_path: Path) -> None:
    record = {"scheme": "plain", "loss": float("nan"), "steps": 3, "time_s": float("inf")}
    write_json(tmp_path / "records.json", [record])
    RecordLog(tmp_path / "log.jsonl").append([record])
    expected = {"scheme": "plain", "loss": None, "steps": 3, "time_s": None}
    assert json.loads((tmp_path / "records.json").read_text()) == [expected]
    assert list(RecordLog(tmp_path / "log.jsonl").read()) == [expected]
