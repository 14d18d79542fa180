"""Every figure on a page has a source: a stored record that says it, a paper, or what holds it.

A figure is a ratio, a share or a rate in prose or in a table that is written by hand: `6.9x`, `0.5 %`, `30 ms`, `1 GB/s`,
`0.52 of the bytes`. results/figures.jsonl has a line for each one, as often as it is on the page:

    {"page": ..., "figure": "6.9x", "record": "MACHINE/KEY.jsonl", "where": {...}, "field": ..., "over": {...}}
        the record's number, or the number of the record `over` divided by it; rounded, it is the figure
    {"page": ..., "figure": "0.5 %", "held_by": "tests/..."}    a promise, a setting or a bound, and the file that holds it
    {"page": ..., "figure": "12 %", "paper": "GComp, Fig. 9"}
    {"page": ..., "figure": "30 ms", "not_stored": "how it came about"}    only fewer, never more
"""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
from page_text import PAGES, RESULTS, ROOT, name_of, prose_of

_FIGURE = re.compile(
    r"(?<![\w.,/])(\d[\d.,]*x(?!\w)|\d[\d.,]* (?:%|ms|GB/s|nats)(?!\w)|\d[\d.]*(?: to \d[\d.]*)? of (?:the|DDP's) bytes)"
)
FIGURES: list[dict[str, Any]] = [json.loads(line) for line in (RESULTS / "figures.jsonl").read_text().splitlines()]
MOST_NOT_STORED = 13


def figures_in(text: str) -> Counter[str]:
    return Counter(_FIGURE.findall(prose_of(text)))


def number(value: Any) -> float:
    """The first number of a field: `282 (270 to 301)` is 282, `53,842` is 53842."""
    if isinstance(value, int | float):
        return float(value)
    found = re.search(r"-?\d[\d.]*(?:e-?\d+)?", str(value).replace(",", ""))
    assert found, value
    return float(found[0])


def only(name: str, where: dict[str, Any]) -> dict[str, Any]:
    lines = [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]
    found = [record for record in lines if all(record.get(key) == value for key, value in where.items())]
    assert len(found) == 1, f"{len(found)} records of {name} have {where}"
    return found[0]


def check(entry: dict[str, Any]) -> None:
    if "record" in entry:
        record = only(entry["record"], entry["where"])
        value = number(record[entry["field"]])
        if "over" in entry:
            other = only(entry["record"], {**entry["where"], **entry["over"]})
            value = number(other[entry.get("over_field", entry["field"])]) / value
        elif "over_field" in entry:
            value = number(record[entry["over_field"]]) / value
        printed = re.match(r"[\d.,]+", entry["figure"])
        assert printed is not None
        digits = printed[0].replace(",", "").rstrip(".")
        step = 10.0 ** -(len(digits.partition(".")[2]))
        assert abs(value * entry.get("times", 1) - float(digits)) <= step / 2 * 1.001, f"the record says {value}"
    elif "held_by" in entry:
        assert (ROOT / entry["held_by"]).is_file(), entry["held_by"]
    else:
        assert entry.get("paper") or entry.get("not_stored"), "no source"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_figures_on_the_page_have_a_source(page: Any) -> None:
    listed = Counter(entry["figure"] for entry in FIGURES if entry["page"] == name_of(page))
    found = figures_in(page.read_text())
    assert not found - listed, f"without a line in results/figures.jsonl: {sorted((found - listed).elements())}"
    assert not listed - found, f"no longer on the page: {sorted((listed - found).elements())}"


@pytest.mark.parametrize("entry", FIGURES, ids=lambda entry: f"{entry['page']}: {entry['figure']}")
def test_the_source_says_the_figure(entry: dict[str, Any]) -> None:
    check(entry)


def test_fewer_and_fewer_figures_have_no_record() -> None:
    assert sum("not_stored" in entry for entry in FIGURES) == MOST_NOT_STORED


def test_a_wrong_figure_is_found() -> None:
    entry = next(entry for entry in FIGURES if "over" in entry)
    with pytest.raises(AssertionError, match="the record says"):
        check({**entry, "figure": "99.9x"})
    assert figures_in("It is 3.1x faster, 12 % and `5 %`; 2 to 3 ms.") == Counter(["3.1x", "12 %", "3 ms"])
