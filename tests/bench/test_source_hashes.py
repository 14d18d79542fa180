"""A record's digest changes with the files that it depends on, and with no others."""

from pathlib import Path

import pytest

from gradwire_lab.bench import measures
from gradwire_lab.results import sources
from gradwire_lab.results.experiment import Experiment

MEASURES = "gradwire_lab.bench.measures"


def names_of(module: str) -> set[str]:
    return {path.relative_to(sources.SOURCES.parent).as_posix() for path in sources.files_of(module)}


def test_what_is_reckoned_depends_on_what_it_imports_and_not_on_what_shows_it() -> None:
    formulas = names_of(f"{MEASURES}.sketches")
    assert "src/gradwire/codecs/count_sketch.py" in formulas
    assert any(name.startswith("native/sketch/") for name in formulas), "its codec is native"
    others = ("/gradwire/schemes/", "/simulator/", "/results/", "/catalogue/")
    assert not {name for name in formulas if any(other in name for other in others)}


def test_what_starts_ranks_depends_on_everything_that_can_run_there() -> None:
    trained = names_of(f"{MEASURES}.trainings")
    for name in ("src/gradwire/schemes/thc.py", "src/gradwire_lab/bench/train_methods.py", "native/exchange/means.cpp"):
        assert name in trained
    itself = {"src/gradwire_lab/bench/measures/commands.py", "src/gradwire_lab/bench/measures/trainings.py"}
    assert names_of(f"{MEASURES}.commands") - itself == trained - itself
    assert not {name for name in trained if "gradwire_lab/simulator/" in name or name.endswith("bench/runner.py")}
    assert "src/gradwire_lab/simulator/schemes/measured.json" in names_of(f"{MEASURES}.reality"), "it predicts"


def test_registries_lead_to_what_they_name_and_data_counts() -> None:
    simulated = names_of(f"{MEASURES}.simulated")
    assert "src/gradwire/schemes/aqgb/law.py" in simulated
    assert "src/gradwire_lab/simulator/schemes/measured.json" in simulated


def code_of(measure: str, scheme: str = "") -> str:
    return measures.code_of(Experiment("", "", "", measure, {"scheme": [scheme]}))


def test_a_measure_does_not_depend_on_what_it_writes_itself() -> None:
    said = "{} {'scheme': ['']}"
    assert code_of("simulator-sizes") == sources.source_hash(f"{MEASURES}.reality", "measured.json", said)
    assert code_of("simulator-sizes") != code_of("reality") == sources.source_hash(f"{MEASURES}.reality", "", said)


def test_a_scheme_counts_where_it_is_named_or_auto_may_try_it() -> None:
    assert code_of("training", "plain") != code_of("training", "auto") == code_of("training", "two-level:scheme=gcomp")
    asked = [sources.unused_schemes(said) for said in ("auto", "one-bit", "dgc", "slimgc", "")]
    schemes = {"plain", "sign_sgd", "quantisers", "fidelity", "dgc", "measuring", "one_bit_adam"}
    found = [schemes & {one.stem for one in sources.files_of(f"{MEASURES}.trainings", unused)} for unused in asked]
    assert found[:2] == [{"plain", "sign_sgd", "quantisers", "fidelity"}, {"quantisers"}]
    assert found[2:] == [{"dgc"}, {"measuring", "plain"}, schemes], "what slimgc imports comes with it"


def test_digest_follows_a_changed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "src" / "gradwire_lab"
    package.mkdir(parents=True)
    (package / "one.py").write_text("from gradwire_lab import two\nNAMED = 'gradwire_lab.three:Made'\n")
    for name in ("two", "three", "apart"):
        (package / f"{name}.py").write_text("")
    monkeypatch.setattr(sources, "SOURCES", tmp_path / "src")

    def digest() -> str:
        for cached in (sources.source_hash, sources.files_of, sources._code):
            cached.cache_clear()
        return sources.source_hash("gradwire_lab.one")

    digests = [digest()]
    for name in ("two", "three", "one"):
        (package / f"{name}.py").write_text(f"{name} = 1\n" + (package / f"{name}.py").read_text())
        digests.append(digest())
    assert len(set(digests)) == 4
    (package / "two.py").write_text('"""Said anew."""\n\ntwo = 1  # as before\n')
    assert digest() == digests[-1]
    (package / "apart.py").write_text("apart = 1\n")
    assert digest() == digests[-1]
