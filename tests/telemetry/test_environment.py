"""Results say where they were measured."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from gradwire.telemetry import environment
from gradwire.telemetry.environment import describe_environment


def test_environment_is_flat_json_with_machine_versions_commit_and_network() -> None:
    described = describe_environment()
    assert json.loads(json.dumps(described)) == described
    fields = "cpu n_cores memory_bytes os date python torch gradwire commit network"
    assert set(described) == set(fields.split())
    assert all(isinstance(value, str | int) and value for value in described.values())


@pytest.mark.parametrize(
    ("variables", "network"),
    [
        ({}, "loopback"),
        ({"MASTER_ADDR": "127.0.0.1"}, "loopback"),
        ({"MASTER_ADDR": "node17"}, "cluster"),
        ({"MASTER_ADDR": "10.0.0.1", "GRADWIRE_NETWORK": "netlab 1000000000"}, "netlab 1000000000"),
    ],
)
def test_network_is_the_labs_or_the_masters(monkeypatch: pytest.MonkeyPatch, variables: dict, network: str) -> None:
    monkeypatch.delenv("GRADWIRE_NETWORK", raising=False)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert describe_environment()["network"] == network


def test_commit_of_a_foreign_checkout_is_not_gradwires(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")
    site_packages = tmp_path / "venv"
    site_packages.mkdir()
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (site_packages / "recorder.py").write_text("")
    monkeypatch.setattr(environment, "__file__", str(site_packages / "environment.py"))
    assert describe_environment()["commit"] == "unknown"


def test_a_commit_is_altered_where_its_sources_are_and_not_by_what_is_measured(tmp_path: Path) -> None:
    sources, results = tmp_path / "src" / "package", tmp_path / "results"
    for folder in (sources, results):
        folder.mkdir(parents=True)
        (folder / "recorder.py").write_text("first\n")

    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in ("init", "add .", "commit -m first"):
        subprocess.run([*git, *words.split()], check=True, capture_output=True)
    clean = environment._commit(sources)
    (results / "recorder.py").write_text("another record\n")
    assert environment._commit(sources) == clean
    (sources / "recorder.py").write_text("second\n")
    assert environment._commit(sources) == f"{clean}-dirty"
