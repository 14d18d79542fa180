"""From records to pages: what is rendered is what is checked, other pages' tables stand between marks."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gradwire.errors import CorruptMessage, InvalidArgument
from gradwire_lab.results.experiment import Column, Coverage, Experiment, Goal, Plot, Ref, Table, ms
from gradwire_lab.results.pages import Book
from gradwire_lab.results.records import Store, find_root, machine_name

TABLE = Table([ms("time_s", "ms", spread=True), Column("time_s", "x ddp", kind="ratio")])
EXPERIMENT = Experiment(
    "speed", "system", "How fast?", "train", {"rate": ["1gbit"], "scheme": ["ddp", "gcomp"]}, {"ranks": 4},
    baseline={"scheme": "ddp"}, of=[Ref("GComp", "Fig. 15")], show=[TABLE, Plot("scheme", ms("time_s", "ms"), style="bars")],
    goals=[Goal("times faster", Column("time_s", kind="speed-up"), "", 0, {"scheme": "gcomp"}, paper="2 to 3"),
           Goal("half of it", TABLE.columns[1], "<=", 0.5, {"scheme": "gcomp"}, paper="0.5", of=Ref("GComp", "Fig. 15"))],
    differs="a small model",
)  # fmt: skip

CODE = "123456789abc"


def record(scheme: str, time_s: float, **more: object) -> dict[str, object]:
    return {
        "rate": "1gbit", "scheme": scheme, "time_s": time_s, "time_s_low": 0.99 * time_s, "time_s_high": 1.01 * time_s,
        "commit": "abc", "code": CODE, "settings": EXPERIMENT.settings(EXPERIMENT.cells()), "date": "2026-11-22T10:00:00",
        "load_before": 0.1, "torch": "2.13.0", **more,
    }  # fmt: skip


@pytest.fixture
def pages(tmp_path: Path) -> Book:
    (tmp_path / "docs").mkdir()
    snippets = {"short": ("speed", Table(TABLE.columns[:1]))}
    systems, left_out = {"system": "A system", "coverage": ""}, {("GComp", "Fig. 1"): Coverage("cannot be here", "no")}
    return Book(tmp_path, [EXPERIMENT], systems, snippets, left_out, lambda measure: CODE)


@pytest.fixture
def store(pages: Book) -> Store:
    store = Store(pages.root / "results", "here-2-cores")
    store.replace(EXPERIMENT, EXPERIMENT.cells(), [record("ddp", 0.1), record("gcomp", 0.04)])
    return store


def test_rendered_pages_are_not_stale_until_a_record_changes(pages: Book, store: Store) -> None:
    assert pages.render()
    assert pages.stale() == []
    assert pages.render() == []
    store.replace(EXPERIMENT, EXPERIMENT.cells()[1:], [record("gcomp", 0.05)])
    assert {path.name for path in pages.stale()} == {"results.md", "system.md", "speed-1.svg"}
    pages.render()
    assert pages.stale() == []


def test_page_edited_by_hand_or_left_over_is_stale(pages: Book, store: Store) -> None:
    pages.render()
    page = pages.root / "docs" / "results" / "system.md"
    page.write_text(page.read_text().replace("100", "99"))
    (page.parent / "gone.md").write_text("an experiment that is no more")
    assert {path.name for path in pages.stale()} == {"system.md", "gone.md"}


def test_page_says_question_values_the_papers_number_and_where_it_was_measured(pages: Book, store: Store) -> None:
    note = pages.root / "results" / "notes" / "speed.md"
    note.parent.mkdir()
    note.write_text("What is to be learnt.\n")
    text = pages.page("system")
    for words in ("**How fast?** (GComp, Fig. 15)", "`gradwire bench run speed` measures it again",
                  "prints all of it; ranks 4.",
                  "| gcomp | 40 (40 to 40) | 0.40 |", "here-2-cores; commit abc", "load before at most 0.1",
                  "What is to be learnt.",
                  "| [half of it](#speed) | GComp, Fig. 15 | 0.5 | 0.40 | <= 0.5 | reached | a small model |",
                  "| [times faster](#speed) | - | 2 to 3 | 2.50 | - | - | a small model |"):  # fmt: skip
        assert words in text, words
    assert "Not measured" not in text


def test_page_is_cut_to_its_length_and_says_what_it_leaves_out(pages: Book, store: Store) -> None:
    many = {"scheme": ["ddp", *(f"s{number}" for number in range(400))]}
    experiments = [replace(EXPERIMENT, key=f"speed-{number}", axes={"rate": ["1gbit"], **many}) for number in range(7)]
    for one in experiments:
        store.replace(one, one.cells(), [record(scheme, 0.1) for scheme in many["scheme"]])
    text = replace(pages, experiments=experiments).page("system")
    assert 130 < text.count("\n") <= 150
    assert "more rows." in text


def test_coverage_has_four_states(pages: Book, store: Store) -> None:
    other = replace(pages, experiments=[replace(EXPERIMENT, key="other")])
    assert "| Fig. 15 | not measured | `gradwire bench run other` |" in other.coverage()
    assert "| Fig. 1 | cannot be here | no |" in pages.coverage()
    assert "| Fig. 15 | differs | [speed](system.md#speed): a small model |" in pages.coverage()
    same = replace(pages, experiments=[replace(EXPERIMENT, differs="")])
    assert "| Fig. 15 | as in the paper | [speed](system.md#speed) |" in same.coverage()
    assert "(stale)" in replace(same, code=lambda measure: "another").coverage()


def test_overview_is_one_screen_and_leads_to_the_command_in_two_clicks(pages: Book, store: Store) -> None:
    overview = pages.overview()
    assert len(overview.splitlines()) < 45
    assert "| [A system](results/system.md) | 1 of 1 | 0 | 1 reached |" in overview
    assert "`gradwire bench run speed`" in pages.page("system")


def test_a_table_is_of_the_code_as_it_is_or_says_that_it_is_stale(pages: Book, store: Store) -> None:
    assert "Stale" not in pages.page("system")
    changed = replace(pages, code=lambda measure: "another")
    assert "Stale: code or settings have changed since; here-2-cores; commit abc" in changed.page("system")
    assert not changed.is_complete(EXPERIMENT)
    wide = replace(EXPERIMENT, axes={"rate": ["none", "1gbit"], "scheme": ["ddp", "gcomp"]})
    plain = record("ddp", 0.2, rate="none", settings=wide.settings(wide.cells()[:2]))
    Store(store.folder, "slow").replace(wide, [], [plain, record("gcomp", 4.0)])
    machine, records, _ = pages.shown(wide)
    assert (machine, [one["time_s"] for one in records]) == ("here-2-cores, and slow", [0.2, 0.1, 0.04])
    assert "Stale" in replace(pages, experiments=[replace(EXPERIMENT, fixed={"ranks": 8})]).page("system"), "settings"
    store.replace(EXPERIMENT, EXPERIMENT.cells()[1:], [record("gcomp", 0.04, code="old")])
    assert "gcomp" not in pages.page("system"), "what is current stands alone, without a part of another machine's run"


def test_tables_of_other_pages_stand_between_marks(pages: Book, store: Store) -> None:
    readme = pages.root / "README.md"
    readme.write_text("before\n<!-- generated: bench render short -->\nold\n<!-- end -->\nafter\n")
    assert readme in pages.stale()
    pages.render()
    text = readme.read_text()
    assert "old" not in text
    assert text.startswith("before\n<!-- generated: bench render short -->\n| scheme | ms |")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "here-2-cores; commit abc" in text
    assert pages.stale() == []
    two = replace(EXPERIMENT, show=[replace(EXPERIMENT.show[0], where={"scheme": name}) for name in ("ddp", "gcomp")])
    assert "| gcomp |" in replace(pages, experiments=[two]).snippet("speed"), "each table has records of its own"
    readme.write_text("<!-- generated: bench render nothing -->\n<!-- end -->\n")
    with pytest.raises(InvalidArgument, match="nothing"):
        pages.render()


def test_records_of_cells_that_are_no_more_are_not_shown(pages: Book, store: Store) -> None:
    store.path("speed").write_text(store.path("speed").read_text() + json.dumps(record("gone", 9.0)) + "\n")
    assert "gone" not in pages.page("system")


def test_new_records_replace_the_cells_that_they_are_of_and_no_others(tmp_path: Path) -> None:
    store = Store(tmp_path, "here")
    store.replace(EXPERIMENT, EXPERIMENT.cells(), [record("gcomp", 2.0), record("ddp", 1.0)])
    store.replace(EXPERIMENT, EXPERIMENT.cells()[1:], [record("gcomp", 3.0, phase=0), record("gcomp", 4.0, phase=1)])
    assert [(r["scheme"], r["time_s"]) for r in store.read("speed")] == [("ddp", 1.0), ("gcomp", 3.0), ("gcomp", 4.0)]
    with pytest.raises(InvalidArgument, match="flat"):
        store.replace(EXPERIMENT, EXPERIMENT.cells(), [record("ddp", 1.0, nested=[1])])
    store.path("speed").write_text("{}\n{torn")
    with pytest.raises(CorruptMessage, match=r"speed\.jsonl:2"):
        store.read("speed")


def test_machines_and_checkouts_are_found_by_name(tmp_path: Path) -> None:
    assert machine_name("AMD EPYC", 2) == "amd-epyc-2-cores"
    assert machine_name("Intel(R) Xeon(R) CPU @ 2.20GHz", 1) == "intel-xeon-1-core"
    for name in ("docs", "results", "deep/er"):
        (tmp_path / name).mkdir(parents=True)
    assert find_root(tmp_path / "deep" / "er") == tmp_path
    with pytest.raises(InvalidArgument, match="checkout"):
        find_root(Path("/"))
