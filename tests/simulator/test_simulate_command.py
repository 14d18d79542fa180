"""`gradwire simulate`: records, traces and plots are written, and hold what they say."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from gradwire.cli import main


def test_records_of_a_sweep_have_their_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "records.json"
    command = ["simulate", "--scheme", "aqgb", "plain", "--workers", "4", "8", "--rate", "1gbit", "2.5gbit"]
    assert (
        main(
            [*command, "--rounds", "4", "--json", str(out), "--plot", str(tmp_path / "a.svg"), str(tmp_path / "a.png")]
        )
        == 0
    )
    records = json.loads(out.read_text(encoding="utf-8"))
    assert len(records) == 8
    for record in records:
        assert {"scheme", "workers", "rate_bps", "seconds", "rounds", "utilisation", "wait_s", "row"} <= record.keys()
        assert 0 < record["utilisation"] <= 1
        assert record["rounds"] >= 4
    assert {(record["scheme"], record["workers"], record["rate_bps"]) for record in records} == {
        (scheme, workers, rate) for scheme in ("aqgb", "plain") for workers in (4, 8) for rate in (1e9, 2.5e9)
    }
    assert (tmp_path / "a.svg").read_text(encoding="utf-8").startswith("<?xml")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "aqgb" in capsys.readouterr().out


def test_a_chrome_trace_nests_and_names_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    command = ["simulate", "--scheme", "aqgb", "--workers", "3", "--rounds", "4", "--jitter", "per-worker"]
    assert main([*command, "--chrome-trace", str(path), "--trace-rounds", "2"]) == 0
    trace = json.loads(path.read_text(encoding="utf-8"))
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M" and "name" in event["args"]}
    assert names == {"worker 0", "worker 1", "worker 2", "compute", "network"}
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {span["pid"] for span in spans} == {0, 1, 2}
    for process in range(3):
        for row in range(2):
            # Within a row one thing after another: what Perfetto needs to draw them on one line.
            times = [
                (span["ts"], span["ts"] + span["dur"]) for span in spans if (span["pid"], span["tid"]) == (process, row)
            ]
            assert times
            assert all(end <= start + 1e-3 for (_, end), (start, _) in itertools.pairwise(times))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--scheme", "nothing"],
        ["--rate", "0gbit"],
        ["--rate", "none"],
        ["--workers", "0"],
        ["--trace=-1=1gbit"],
        ["--workload", "alexnet"],
        ["--figure", "fig99"],
        ["--plot", "a.txt"],
        ["--chrome-trace", "a.json", "--workers", "2", "4"],
    ],
)
def test_wrong_arguments_end_with_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("gradwire simulate: InvalidArgument: ")
    assert error.count("\n") == 1
