"""The report takes every kind of input, shows what is there, and names file and line of what is wrong."""

import html
import html.parser
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sample_results import SCHEMES, allreduce_records, codec_records, train_records, write_all, write_run

from gradwire.errors import CorruptMessage, InvalidArgument, Unsupported
from gradwire.telemetry.chrome_trace import ChromeTraceSink
from gradwire_lab.cli import main
from gradwire_lab.report import write_report
from gradwire_lab.results.captions import describe_network, describe_networks, format_rate
from gradwire_lab.results.plots import SLOTS, assign_slots

Input = Path | list[dict[str, Any]]  # a file, a folder, or records that are written to a file


def report(folder: Path, *inputs: Input, **options: Any) -> Path:
    paths = []
    for given in inputs:
        if not isinstance(given, Path):
            (folder / "bench.json").write_text(json.dumps(given, indent=1))
        paths.append(given if isinstance(given, Path) else folder / "bench.json")
    return write_report(paths, folder / "report.html", **options)


def sections(page: Path) -> list[str]:
    return re.findall(r'<section id="([^"]+)"', page.read_text())


def figures(page: Path) -> list[str]:
    return re.findall(r'<figure id="([^"]+)"', page.read_text())


def text_of(page: Path) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page.read_text())).split())


def test_page_is_one_file_without_script_or_address(tmp_path: Path) -> None:
    text = write_report(write_all(tmp_path / "in"), tmp_path / "new" / "report.html").read_text()
    assert "<script" not in text
    assert not re.findall(r"(?:https?:)?//[a-z]", text)
    assert not re.findall(r"@import|@font-face|url\((?!#)", text)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["report.html"]


def test_names_from_files_stay_text(tmp_path: Path) -> None:
    """Without a browser: no element or attribute comes of them; test_report_in_browser.py sees that nothing runs."""
    found: list[tuple[str, str]] = []

    class Reader(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.append((tag, ""))
            found.extend((tag, name) for name, _ in attrs)

    harm = "\"'><script>x()</script><img src=x onerror=x()></style></svg>{{ 7 * 6 }}"
    records = train_records()
    for record in records:
        record["scheme"] = harm + record["scheme"]
        record.update(workload=harm, cpu=harm)
    page = report(tmp_path, records, title=harm).read_text()
    Reader().feed(page)
    assert page.count("&lt;img src=x onerror=x()&gt;") >= 3
    assert "{{ 7 * 6 }}" in page
    assert {"script", "img", "iframe", "object"} & {tag for tag, _ in found} == set()
    assert not [(tag, name) for tag, name in found if name.startswith("on") or name == "src"]


def test_same_input_gives_the_same_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "plain", "plain", n_steps=20)
    first, second = (write_report([run], tmp_path / f"{n}.html").read_bytes() for n in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (codec_records(), ["codec"]),
        (allreduce_records(), ["allreduce0"]),
        (train_records(), ["train0"]),
        ([*train_records()[:2], *codec_records()[:2], *allreduce_records()[:2]], ["train0", "allreduce0", "codec"]),
    ],
)
def test_only_sections_with_data_appear(tmp_path: Path, records: list[dict[str, Any]], expected: list[str]) -> None:
    page = report(tmp_path, records)
    assert sections(page) == [*expected, "machine"]
    assert {figure.partition("-")[0] for figure in figures(page)} == set(expected)


def test_speed_up_is_the_ratio_to_the_baseline_at_the_same_rate(tmp_path: Path) -> None:
    common = {"workload": "gpt", "ranks": 2, "compute_s": 0.1, "codec_s": 0, "exposed_s": 0.1}
    common |= {"wire_bytes": 10, "loss": 1}
    records = [
        {"scheme": scheme, "rate_bps": rate_bps, "iteration_s": seconds, **common}
        for rate_bps, times in ((1e8, {"plain": 8.0, "gcomp": 2.0}), (None, {"plain": 0.3, "gcomp": 0.4}))
        for scheme, seconds in times.items()
    ]
    text = text_of(report(tmp_path, records))
    assert "gcomp 100 Mb/s 2,000.0 4.00" in text
    assert "gcomp unshaped 400.0 0.75" in text


def test_baseline_can_be_chosen_and_must_exist(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / scheme, scheme, n_steps=30) for scheme in SCHEMES]
    assert "deviation against zstd" in text_of(report(tmp_path, *runs, baseline="zstd"))
    with pytest.raises(InvalidArgument, match=r"'none'; there are: gcomp, plain, truncate, zstd"):
        report(tmp_path, *runs, baseline="none")


def test_runs_and_records_of_one_scheme_are_told_apart_by_options_or_folder(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / mode, "gcomp", n_steps=10) for mode in ("paper", "none")]
    text = text_of(report(tmp_path, *runs))
    assert "gcomp (paper)" in text
    assert "gcomp (none)" in text
    for run in runs:
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps({**config, "scheme_options": {"importance": run.name}}))
    records = [{**train_records()[0], "options": f"rank={rank}"} for rank in (1, 4)]
    text = text_of(report(tmp_path, *runs, records))
    for label in ("gcomp importance=paper", "gcomp importance=none", "ddp rank=1", "ddp rank=4"):
        assert label in text


def test_what_is_not_the_real_thing_is_marked(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / scheme, scheme, n_steps=10) for scheme in ("plain", "gcomp")]
    (runs[0] / "summary.json").write_text(json.dumps({"wire_bytes_origin": "computed for a ring"}))
    records = [{**record, "data": "shape-only", "compute": "emulate"} for record in train_records()]
    text = text_of(report(tmp_path, *runs, records))
    assert "Bytes of plain: computed for a ring, not counted" in text
    assert "inputs of the right shape only" in text
    assert "computation emulated" in text


def test_runs_of_two_workloads_get_a_section_each(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / workload, "plain", 30, workload) for workload in ("gpt", "resnet")]
    assert sections(report(tmp_path, *runs)) == ["run0", "run1", "machine"]


@pytest.mark.parametrize("n_steps", [1, 2, 3])
def test_shortest_runs_still_give_a_page(tmp_path: Path, n_steps: int) -> None:
    runs = [write_run(tmp_path / scheme, scheme, n_steps) for scheme in ("plain", "gcomp")]
    assert len(figures(report(tmp_path, *runs))) == 3


def test_run_that_diverged_was_killed_or_resumed_is_shown(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / scheme, scheme, 40) for scheme in ("plain", "gcomp")]
    lines = (runs[1] / "steps.jsonl").read_text().splitlines()
    lost = [json.dumps(json.loads(line) | {"loss": None}) for line in lines[20:]]
    # Steps 20 to 27 twice: once do they count.
    (runs[1] / "steps.jsonl").write_text("\n".join([*lines[:28], *lost]) + "\n")
    (runs[0] / "summary.json").unlink()
    text = text_of(report(tmp_path, *runs))
    assert "not finite" in text
    assert re.search(r"plain 40 .*gcomp 40 ", text)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"network": "netlab 1000000000"}, "shaped to 1 Gb/s (netlab)"),
        ({"network": "netlab 1000000000,100000000,1000000000"}, "shaped to 1 Gb/s / 100 Mb/s (netlab)"),
        ({"network": "netlab none"}, "unshaped test network (netlab)"),
        ({"network": "netlab", "rate_bps": 2e8}, "shaped to 200 Mb/s (netlab)"),
        ({"network": "loopback", "emulated": True}, "loopback, unshaped, computation emulated"),
        ({"network": "cluster"}, "cluster"),
        ({}, "network not recorded"),
    ],
)
def test_network_is_described_as_shaped_loopback_or_unknown(fields: dict[str, Any], expected: str) -> None:
    assert describe_network(fields) == expected


def test_networks_that_differ_in_rate_are_described_together() -> None:
    sources = [{"network": f"netlab {rate}"} for rate in (100_000_000, 1_000_000_000, 100_000_000, "none")]
    assert describe_networks(sources) == "shaped to 100 Mb/s, 1 Gb/s (netlab); unshaped test network (netlab)"
    assert format_rate(2.5e9) == "2.5 Gb/s"


def test_names_in_one_figure_differ_in_colour_or_marker() -> None:
    names = [f"scheme{index}" for index in range(3 * len(SLOTS))]
    slots = assign_slots(names)
    assert len(set(slots.values())) == len(names), "a colour, and how often it was given before: dash and marker"
    assert assign_slots(["gcomp"])["gcomp"] == assign_slots(["aqgb", "gcomp", "zzz"])["gcomp"]


# --- bad input --------------------------------------------------------------------------------------------------------


def test_missing_input_is_named(tmp_path: Path) -> None:
    for inputs, message in (([tmp_path / "nowhere"], "nowhere does not exist"), ([], "at least one"),
                            ([tmp_path], "holds nothing to report")):  # fmt: skip
        with pytest.raises(InvalidArgument, match=message):
            report(tmp_path, *inputs)
    run = write_run(tmp_path / "plain", "plain", 5)
    (run / "config.json").unlink()
    with pytest.raises(InvalidArgument, match=r"config\.json"):
        report(tmp_path, run)


def run_with(folder: Path, line: str | dict[str, Any]) -> Path:
    """Of five steps, the third with this line, or with other fields."""
    run = write_run(folder / "plain", "plain", 5)
    lines = (run / "steps.jsonl").read_text().splitlines()
    lines[2] = line if isinstance(line, str) else json.dumps(json.loads(lines[2]) | line)
    (run / "steps.jsonl").write_text("\n".join(lines) if line else "")
    return run


def bench_with(folder: Path, change: dict[str, Any]) -> list[dict[str, Any]]:
    records = codec_records()
    records[3].update(change)
    return records


def file_of(folder: Path, content: bytes) -> Path:
    (folder / "x.json").write_bytes(content)
    return folder / "x.json"


@pytest.mark.parametrize(
    ("make", "content", "message"),
    [
        (run_with, '{"step": 2, "los', "steps.jsonl: not JSON"),
        (run_with, "3", "steps.jsonl: expected objects"),
        (run_with, '{"step": 2}', "steps.jsonl: record 3: loss is missing, expected a number"),
        (run_with, {"bytes_sent": "many"}, "steps.jsonl: record 3: bytes_sent is 'many', expected a number"),
        (run_with, "", "steps.jsonl: holds no step"),
        (bench_with, {"ratio": "small"}, "bench.json: record 3: ratio is 'small', expected a positive number"),
        (bench_with, {"encode_gb_per_s": 0}, "bench.json: record 3: encode_gb_per_s is 0, expected a positive number"),
        (bench_with, {"threads": None}, "bench.json: record 3: threads is None"),
        (bench_with, {"exponent_bits": "x"}, "bench.json: record 3: exponent_bits is 'x', expected a number or null"),
        (file_of, b'[\n{"a": 1},\n{"a"', "x.json: not JSON"),
        (file_of, b'[\n{"a": 1}]', "x.json: record 0: its fields are of no kind"),
        (file_of, b'{"a": 1}', "x.json: record 0: its fields are of no kind"),
        (file_of, b"[3]", "x.json: expected objects"),
        (file_of, b"[\n\xff]", "x.json: not JSON"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_and_an_older_page_stays(
    tmp_path: Path, make: Callable[[Path, Any], Input], content: Any, message: str
) -> None:
    (tmp_path / "report.html").write_text("older")
    with pytest.raises(CorruptMessage, match=re.escape(message)):
        report(tmp_path, make(tmp_path, content))
    assert (tmp_path / "report.html").read_text() == "older"


def test_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "plain", "plain", 3)
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match=r"cannot write the report to .*report\.html"):
        write_report([run], tmp_path / "file" / "report.html")


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_missing_package_is_named_with_its_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(Unsupported, match=r"pip install '\.\[report\]'"):
        report(tmp_path, write_run(tmp_path / "plain", "plain", 3))


# --- the command ------------------------------------------------------------------------------------------------------


def test_command_writes_the_page_and_the_merged_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "plain", "plain", 3)
    for rank in range(2):
        ChromeTraceSink(run / f"trace-rank{rank}.json", rank, 2).close()
    page, trace = tmp_path / "page.html", tmp_path / "merged.json"
    assert main(["report", str(run), "--out", str(page), "--title", "My run", "--trace", str(trace)]) == 0
    assert capsys.readouterr().out.split() == [str(page), str(trace)]
    assert "<h1>My run</h1>" in page.read_text()
    assert json.loads(trace.read_text())["otherData"]["ranks"] == [0, 1]


def test_folder_of_a_demo_is_told_from_runs(tmp_path: Path) -> None:
    (tmp_path / "demo.json").write_text("{}")
    for given in (tmp_path, tmp_path / "demo.json"):
        with pytest.raises(InvalidArgument, match=r"`gradwire demo`.* takes run folders of `gradwire train --out`"):
            report(tmp_path, given)


@pytest.mark.parametrize("text", ["[" * 100_000, "[" + "9" * 5_000 + "]", '[{"time_s": 1' + "0" * 400 + "}]"])
def test_json_that_nobody_would_write_is_one_sentence(tmp_path: Path, text: str, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "bench.json").write_text(text)
    assert main(["recommend", "--profile", str(tmp_path / "bench.json")]) == 1
    assert "Traceback" not in capsys.readouterr().err
    with pytest.raises(CorruptMessage, match=r"bench\.json:"):
        report(tmp_path, tmp_path / "bench.json")


def test_page_of_a_machine_without_fields(tmp_path: Path) -> None:
    records = [{**record, "environment": {"os": "x"}} for record in codec_records()]
    assert report(tmp_path, records).exists()
