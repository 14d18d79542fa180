"""A record's digest changes with whatever can change a measured number, and with nothing that only shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradwire_lab.bench import measures
from gradwire_lab.results import sources


def test_a_measure_does_not_depend_on_what_it_writes_itself() -> None:
    assert measures.code_of("simulator-sizes") == sources.source_hash("measured.json")
    assert measures.code_of("simulator-sizes") != measures.code_of("reality") == sources.source_hash()


def test_digest_follows_a_changed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["src/gradwire/_native.pyi", "src/gradwire/one.py", "src/gradwire_lab/simulator/measured.json",
             "native/exchange/means.cpp", "src/gradwire_lab/results/tables.py",
             "src/gradwire_lab/bench/catalogue/papers.py"]  # fmt: skip
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    monkeypatch.setattr(sources, "SOURCES", tmp_path / "src")
    digests = [sources.source_hash.__wrapped__()]
    for name in names:
        (tmp_path / name).write_text("other")
        digests.append(sources.source_hash.__wrapped__())
    assert len(set(digests[:5])) == 5
    assert digests[4] == digests[5] == digests[6], "tables and catalogue only show and ask"
