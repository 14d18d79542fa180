"""`gradwire simulate`: records, traces and plots are written, and hold what they say."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from pathlib import Path

import pytest

from gradwire_lab.cli import main


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


def test_details_hold_every_round_link_and_worker(tmp_path: Path) -> None:
    out = tmp_path / "details.json"
    command = [
        "simulate",
        "--scheme",
        "plain",
        "--workers",
        "4",
        "--racks",
        "2",
        "--rounds",
        "4",
        "--jitter",
        "per-worker",
    ]
    assert main([*command, "--details", str(out)]) == 0
    details = json.loads(out.read_text(encoding="utf-8"))
    count = {kind: sum(one["of"] == kind for one in details) for kind in ("round", "link", "worker")}
    # Racks of two workers: up and down of each rack's workers and of each rack; the last round's gradients are not used.
    assert count == {"round": 3, "link": 8, "worker": 4}
    assert all(one["scheme"] == "plain" and one["workers"] == 4 for one in details)


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
        ["--plot", "a.txt"],
        ["--chrome-trace", "a.json", "--workers", "2", "4"],
    ],
)
def test_wrong_arguments_end_with_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("gradwire simulate: InvalidArgument: ")
    assert error.count("\n") == 1


def test_without_simpy_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("gradwire_lab.simulator")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["simulate"]) == 1
    assert (
        capsys.readouterr().err
        == "gradwire simulate: Unsupported: the simulator needs simpy; pip install 'gradwire[sim]'\n"
    )


def test_a_plot_of_a_simulation_that_ended_within_its_first_round_says_what_to_raise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "a.svg"
    assert main(["simulate", "--scheme", "aqgb", "--workers", "4", "--seconds", "0.001", "--plot", str(plot)]) == 1
    assert "no round ended in the time that was simulated; raise --seconds" in capsys.readouterr().err
    assert not plot.exists()
