"""The report in a real browser: figures are drawn, nothing is cut off, the console is silent, nothing is fetched."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Page, find_browser, open_browser
from sample_results import train_records, write_all

from gradwire_lab.report import write_report

BROWSER = find_browser()
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on PATH (Debian: chromium)")

# Text that sticks out of its figure by more than rounding, in the page's own fonts rather than those of the drawing.
CUT_OFF = """[...document.querySelectorAll('figure svg')].flatMap(svg => {
    const box = svg.getBoundingClientRect();
    return [...svg.querySelectorAll('text')].filter(text => {
        const inner = text.getBoundingClientRect();
        return inner.left < box.left - 1 || inner.right > box.right + 1
            || inner.top < box.top - 1 || inner.bottom > box.bottom + 1;
    }).map(text => svg.closest('figure').id + ': ' + text.textContent);
})"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    return write_report(write_all(folder / "in"), folder / "report.html")


@pytest.fixture(scope="module")
def page(report: Path) -> Iterator[Page]:
    with open_browser(BROWSER) as page:
        page.show_as(1280)
        page.open(report)
        yield page


def test_every_figure_is_drawn(page: Page) -> None:
    drawn = page.evaluate(
        """[...document.querySelectorAll('figure')].map(figure => {
            const svg = figure.querySelector('svg'), box = svg.getBoundingClientRect();
            const marks = [...svg.querySelectorAll('path, use')].filter(mark => mark.getBoundingClientRect().width > 0);
            return [figure.id, box.width, box.height, marks.length];
        })"""
    )
    numbers = {"run0": 3, "train0": 4, "allreduce0": 4, "codec": 4}
    expected = {f"{anchor}-{index}" for anchor, n in numbers.items() for index in range(n)}
    assert {name for name, *_ in drawn} == expected
    for name, width, height, n_marks in drawn:
        assert width > 300, name
        assert height > 150, name
        assert n_marks > 10, name


def test_console_is_silent_and_nothing_is_fetched(page: Page, report: Path) -> None:
    assert page.complaints() == []
    assert page.requests() == [report.as_uri()]


def test_ids_are_unique_and_references_resolve(page: Page) -> None:
    assert page.evaluate(
        """(() => {
            const ids = [...document.querySelectorAll('[id]')].map(element => element.id);
            const known = new Set(ids);
            const uses = [...document.querySelectorAll('use')].map(use => use.getAttribute('href').slice(1));
            const links = [...document.querySelectorAll('a')].map(a => a.getAttribute('href').slice(1));
            return [ids.length - known.size, [...uses, ...links].filter(id => !known.has(id)), uses.length > 0];
        })()"""
    ) == [0, [], True]


@pytest.mark.parametrize("width", [390, 768, 1280, 1920])
def test_nothing_is_cut_off_at_any_width(page: Page, width: int) -> None:
    page.show_as(width)
    assert page.evaluate(CUT_OFF) == []
    # Only figures and tables scroll sideways, never the page.
    assert page.evaluate("document.documentElement.scrollWidth") == width


def test_figures_follow_the_colour_scheme(page: Page) -> None:
    ink = "getComputedStyle(document.querySelector('figure svg text')).fill"
    surface = "getComputedStyle(document.body).backgroundColor"
    page.show_as(1280, "light")
    light = page.evaluate(f"[{ink}, {surface}]")
    page.show_as(1280, "dark")
    dark = page.evaluate(f"[{ink}, {surface}]")
    assert light[0] != dark[0]
    assert light[1] != dark[1]


def test_names_from_files_cannot_run_script(tmp_path: Path, page: Page) -> None:
    records = train_records()
    for record in records:
        if record["scheme"] == "gcomp":
            record["scheme"] = "<script>console.error('run')</script>$x^2$"
        record["workload"] = "<img src=x onerror=console.error('run')>"
        record["cpu"] = '"><script>console.error(1)</script>'
    (tmp_path / "train.json").write_text(json.dumps(records))
    page.open(write_report([tmp_path / "train.json"], tmp_path / "report.html"))
    assert page.complaints() == []
    assert page.evaluate("document.querySelectorAll('script, img').length") == 0
    assert "$x^2$" in page.evaluate("document.querySelector('figure svg').textContent")
