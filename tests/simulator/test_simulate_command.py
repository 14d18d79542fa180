"""`gradwire simulate`: records, traces and plots are written, and hold what they say."""

import importlib.util
import itertools
import json
import sys
from pathlib import Path

import pytest

from gradwire_lab.cli import main


def simulate(options: str) -> int:
    return main(["simulate", *options.split()])


def test_records_of_a_sweep_have_their_fields(tmp_path: Path) -> None:
    out, svg, png = tmp_path / "records.json", tmp_path / "a.svg", tmp_path / "a.png"
    options = f"--scheme aqgb plain --workers 4 8 --rate 1gbit 2.5gbit --rounds 4 --json {out} --plot {svg} {png}"
    assert simulate(options) == 0
    records = json.loads(out.read_text(encoding="utf-8"))
    for record in records:
        assert {"scheme", "workers", "rate_bps", "seconds", "rounds", "utilisation", "wait_s", "row"} <= record.keys()
        assert 0 < record["utilisation"] <= 1
        assert record["rounds"] >= 4
    assert sorted((record["scheme"], record["workers"], record["rate_bps"]) for record in records) == [
        (scheme, workers, rate) for scheme in ("aqgb", "plain") for workers in (4, 8) for rate in (1e9, 2.5e9)
    ]
    assert svg.read_text(encoding="utf-8").startswith("<?xml")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_details_hold_every_round_link_and_worker(tmp_path: Path) -> None:
    out = tmp_path / "details.json"
    assert simulate(f"--scheme plain --workers 4 --racks 2 --rounds 4 --jitter per-worker --details {out}") == 0
    details = json.loads(out.read_text(encoding="utf-8"))
    count = {kind: sum(one["of"] == kind for one in details) for kind in ("round", "link", "worker")}
    # Racks of two workers: up and down of each rack's workers and of each rack; the last round's gradients are not used.
    assert count == {"round": 3, "link": 8, "worker": 4}
    assert all(one["scheme"] == "plain" and one["workers"] == 4 for one in details)


def test_a_chrome_trace_nests_and_names_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    options = f"--scheme aqgb --workers 3 --rounds 4 --jitter per-worker --chrome-trace {path} --trace-rounds 2"
    assert simulate(options) == 0
    trace = json.loads(path.read_text(encoding="utf-8"))
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M" and "name" in event["args"]}
    assert names == {"worker 0", "worker 1", "worker 2", "compute", "network"}
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {span["pid"] for span in spans} == {0, 1, 2}
    for process in range(3):
        for row in range(2):
            # Within a row one thing after another: what Perfetto needs to draw them on one line.
            mine = [span for span in spans if (span["pid"], span["tid"]) == (process, row)]
            assert mine
            assert all(one["ts"] + one["dur"] <= after["ts"] + 1e-3 for one, after in itertools.pairwise(mine))


def test_without_simpy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    for name in list(sys.modules):
        if name.startswith(("gradwire_lab.simulator", "gradwire_lab.cli.simulate")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert simulate("") == 1
    expected = "gradwire simulate: Unsupported: the simulator needs simpy; in gradwire's clone: pip install '.[sim]'\n"
    assert capsys.readouterr().err == expected


def test_a_plot_of_a_simulation_that_ended_within_its_first_round_says_what_to_raise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "a.svg"
    assert simulate(f"--scheme aqgb --workers 4 --seconds 0.001 --plot {plot}") == 1
    assert "no round ended in the time that was simulated; raise --seconds" in capsys.readouterr().err
    assert not plot.exists()
