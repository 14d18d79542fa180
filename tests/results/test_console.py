"""Tables for people: whole where they fit, row by row where they do not, and never a name or number cut."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from rich.table import Table

from gradwire.bench import cli, launching
from gradwire.results.console import WIDE_HELP, ResultConsole, Wide, make_console

NAMES = ["acp-sgd:rank=4,buffer_mb=25", "one-bit", "ddp-powersgd-overlap"]
HEADINGS = ["iteration", "x ddp", "compute", "exposed", "MB sent", "samples/s", "loss [at 2 s]"]


def make_table() -> Table:
    table = Table(title="gpt, 4 ranks", caption="ms a step")
    table.add_column("scheme")
    for heading in HEADINGS:
        table.add_column(heading.replace("[", "\\["), justify="right")
    for row, name in enumerate(NAMES):
        table.add_row(name, *(f"{1000 * row + column}.125 (9-12)" for column in range(len(HEADINGS))))
    return table


def print_in(columns: int, capsys: pytest.CaptureFixture[str]) -> str:
    ResultConsole(width=columns).print(make_table())
    return capsys.readouterr().out


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 170])
def test_every_name_and_number_is_whole_at_every_width(columns: int, capsys: pytest.CaptureFixture[str]) -> None:
    said = print_in(columns, capsys)
    assert "…" not in said
    assert max(map(len, said.splitlines())) <= columns
    for row, name in enumerate(NAMES):
        assert name in said
        for column, heading in enumerate(HEADINGS):
            assert heading in said
            assert f"{1000 * row + column}.125 (9-12)" in said
    assert ("┃" in said) == (columns == 170), "a table where it fits"


def test_wide_prints_the_table_however_narrow_the_terminal_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRADWIRE_COLUMNS", "80")  # as a launcher tells its ranks
    make_console().print(make_table())
    assert "┃" not in capsys.readouterr().out
    parser = argparse.ArgumentParser()
    parser.add_argument("--wide", action=Wide, nargs=0, help=WIDE_HELP)
    parser.parse_args(["--wide"])
    make_console().print(make_table())
    assert "┃" in capsys.readouterr().out


def test_every_benchmark_takes_wide(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.run(argparse.Namespace(bench="codec", rest=["--help"]))
    assert "--wide" in capsys.readouterr().out


def test_run_without_a_record_leaves_earlier_results_alone(tmp_path: Path) -> None:
    args = argparse.Namespace(json=tmp_path / "train.json", csv=tmp_path / "train.csv")
    launching.write_results(args, [{"scheme": "plain", "iteration_s": 1.0}])
    before = args.json.read_bytes(), args.csv.read_bytes()
    launching.write_results(args, [])
    assert (args.json.read_bytes(), args.csv.read_bytes()) == before
