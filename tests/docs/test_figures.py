"""Every figure on a page has a source: a stored record that says it, a line of the code or of a test, arithmetic, or a paper.

A figure is a measured or promised number in prose or in a table that is written by hand: `6.9x`, `0.5 %`, `30 ms`, `1 GB/s`,
`0.5 to 0.8`, `0.52 of`, `1e-5`, `1.75 times`, `0.372 against 0.361`. Tables that are generated are compared with the records by
`gradwire bench render --check`. results/figures.jsonl has a line for each figure, as often as it is on the page. A source is

    "record": "MACHINE/KEY.jsonl" (or "ONE, and OTHER/KEY.jsonl"), "where": {...}, "field": ...    a number of one stored record
    "record": ..., "of_all": "mean"                                     or "max", "min": over all records of `where`
    "held_by": "src/...", "says": "budget: int = 10"                    the last number of a text in that file
    "reckoned": "100 * 66 / 8948"                                       arithmetic
    "paper": "GComp, Fig. 9"

and with a record: "over": {...} or "over_field": ... divides the number of that other record, or field, by this one's; "less":
{...} subtracts that other record's; "times" and "plus" fit the unit. Rounded, the result is the figure. Where a figure has two
numbers, "second" is the source of the other one.
"""

import json
import re
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from page_text import PAGES, RESULTS, ROOT, name_of, prose_of

from gradwire_lab.bench.catalogue import EXPERIMENTS, book

_NUMBER = r"\d+(?:[.,]\d+)*"
_FIGURE = re.compile(
    rf"(?<![\w.,/-])({_NUMBER}x(?!\w)|{_NUMBER} (?:%|ms|GB/s|MB|nats|times)(?!\w)"
    rf"|\d+\.\d+ (?:to|against) \d+\.\d+|\d+\.\d+ of(?!\w)|\d[\d.]*e-\d+)"
)
FIGURES: list[dict[str, Any]] = [json.loads(line) for line in (RESULTS / "figures.jsonl").read_text().splitlines()]
SOURCES = ("record", "held_by", "reckoned", "paper")


def figures_in(text: str) -> Counter[str]:
    return Counter(_FIGURE.findall(" ".join(prose_of(text).split())))


def number(value: Any) -> float:
    """The first number of a field: `282 (270 to 301)` is 282, `53,842` is 53842."""
    if isinstance(value, int | float):
        return float(value)
    found = re.search(r"-?\d[\d.]*(?:e-?\d+)?", str(value).replace(",", ""))
    assert found, value
    return float(found[0])


def value_in(source: dict[str, Any], where: dict[str, Any], field: str) -> float:
    machines, _, name = source["record"].partition("/")
    texts = [(RESULTS / one / name).read_text() for one in machines.split(", and ")]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    found = [record for record in lines if all(record.get(key) == value for key, value in where.items())]
    assert found, f"no record of {source['record']} has {where}"
    how = source.get("of_all", "mean" if len(found) == 1 else "")
    assert how, f"{len(found)} records of {source['record']} have {where}"
    return {"mean": statistics.fmean, "max": max, "min": min}[how]([number(record[field]) for record in found])


def value_of(source: dict[str, Any]) -> float:
    """What the source says, in the unit of the page."""
    assert sum(kind in source for kind in SOURCES) == 1, f"one of {SOURCES} is needed"
    if "record" in source:
        where, field = source["where"], source["field"]
        value = value_in(source, where, field)
        if "over" in source or "over_field" in source:
            value = value_in(source, {**where, **source.get("over", {})}, source.get("over_field", field)) / value
        if "less" in source:
            value -= value_in(source, {**where, **source["less"]}, field)
    elif "held_by" in source:
        text = " ".join((ROOT / source["held_by"]).read_text().split())
        assert source["says"] in text, f"{source['held_by']} does not say {source['says']!r}"
        value = float(re.findall(r"\d[\d_.]*(?:e-?\d+)?", source["says"])[-1].rstrip("."))
    else:
        assert re.fullmatch(r"[\d.+*/() -]+", source["reckoned"]), source["reckoned"]
        value = eval(source["reckoned"])
    return float(value * source.get("times", 1) + source.get("plus", 0))


def check(entry: dict[str, Any]) -> None:
    printed = re.findall(rf"{_NUMBER}(?:e-\d+)?", entry["figure"])
    sources = [entry, *([entry["second"]] if "second" in entry else [])]
    assert len(printed) == len(sources), "a source for each number"
    for digits, source in zip(printed, sources, strict=True):
        if "paper" in source:
            continue
        mantissa, _, exponent = digits.replace(",", "").partition("e")
        step = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
        value = value_of(source)
        assert abs(value - float(digits.replace(",", ""))) <= step / 2 * 1.001, f"the source of {digits} says {value}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_figures_on_the_page_have_a_source(page: Path) -> None:
    listed = Counter(entry["figure"] for entry in FIGURES if entry["page"] == name_of(page))
    found = figures_in(page.read_text())
    assert not found - listed, f"without a line in results/figures.jsonl: {sorted((found - listed).elements())}"
    assert not listed - found, f"no longer on the page: {sorted((listed - found).elements())}"


def test_every_line_is_of_a_page_and_of_the_records_that_pages_show() -> None:
    pages, by_key = book(ROOT), {one.key: one for one in EXPERIMENTS}
    for entry in [*FIGURES, *(entry["second"] for entry in FIGURES if "second" in entry)]:
        machine, _, key = entry.get("record", "").removesuffix(".jsonl").partition("/")
        found = pages.shown(by_key[key], entry["where"]) if key in by_key else None
        assert not (found and found.is_current) or found.machine == machine, f"{entry}: by now of {found.machine}"
    assert {entry["page"] for entry in FIGURES} <= {name_of(page) for page in PAGES}


@pytest.mark.parametrize("entry", FIGURES, ids=lambda entry: f"{entry['page']}: {entry['figure']}")
def test_the_source_says_the_figure(entry: dict[str, Any]) -> None:
    check(entry)


@pytest.mark.parametrize("kind", ["record", "held_by", "reckoned"])
def test_a_wrong_figure_is_found(kind: str) -> None:
    entry = next(entry for entry in FIGURES if kind in entry and "second" not in entry)
    with pytest.raises(AssertionError, match="the source of"):
        check({**entry, "figure": "99.9x"})


def test_a_figure_without_a_source_is_found() -> None:
    with pytest.raises(AssertionError, match="is needed"):
        check({"page": "README.md", "figure": "3 %"})
    found = figures_in("It is 3.1x faster, 12 % and `5 %`; 3 ms, within 1e-5, 0.5 to\n0.8, 0.3 against 0.4, 1.5 times.")
    assert found == Counter(["3.1x", "12 %", "3 ms", "1e-5", "0.5 to 0.8", "0.3 against 0.4", "1.5 times"])


def test_rates_of_the_gpu_are_the_records() -> None:
    found = json.loads((RESULTS / "nvidia-h200" / "gpu.json").read_text())["sections"]["kernel rates"]
    rows = re.findall(r"^\| ([^|]+) \| ([\d.]+) \| (.*\)) \|$", (ROOT / "docs" / "gpu.md").read_text(), re.MULTILINE)
    assert {label for label, *_ in rows} == found["message_bytes"].keys()
    for label, bits, cells in rows:
        assert bits == f"{8 * found['message_bytes'][label] / found['n_elements']:.2f}"
        ways = [f"{label} {way}" for way in ("encode", "decode", "decode and add")]
        assert cells.split(" | ") == [f"{found['gb_s'][way]:,.0f} ({found['of_copy'][way]:.2f})" for way in ways]
