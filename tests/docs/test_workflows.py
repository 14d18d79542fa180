"""What runs in CI runs only there: each job is bounded, asks for what exists, and pins what it uses.

The files' form is checked by `make lint` against GitHub's schema; this is what a schema cannot know.
"""

import re
from pathlib import Path
from typing import Any

import pytest
from page_text import MAKE_TARGETS, ROOT

yaml = pytest.importorskip("yaml")

_PINNED = re.compile(r"[\w-]+/[\w/-]+@(v\d[\w.]*|release/v\d+|[0-9a-f]{40})")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def faults_of(workflow: dict[str, Any]) -> list[str]:
    found = [] if "permissions" in workflow else ["no permissions: the token may write"]
    jobs = workflow["jobs"]
    for name, job in jobs.items():
        needs = job.get("needs", [])
        needs = [needs] if isinstance(needs, str) else needs
        found += [f"{name} needs {other}" for other in needs if other not in jobs]
        if "timeout-minutes" not in job:
            found.append(f"{name} has no timeout-minutes")
        for step in job["steps"]:
            if "uses" in step and not _PINNED.fullmatch(step["uses"]):
                found.append(f"{step['uses']} is not pinned")
            command = step.get("run", "")
            found += [
                f"make {target}" for target in re.findall(r"\bmake ([a-z-]+)", command) if target not in MAKE_TARGETS
            ]
            paths = re.findall(r"(?:^|\s)(\.?[a-z]+/[\w./-]+)", command)
            found += [f"no file {path}" for path in paths if not (ROOT / path).is_file()]
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_is_bounded_and_names_what_exists(path: Path) -> None:
    assert faults_of(yaml.safe_load(path.read_text())) == []


def test_faults_are_found() -> None:
    steps = [{"uses": "actions/checkout@main"}, {"run": "make everything && .ci/walk"}]
    assert faults_of({"jobs": {"test": {"needs": "build", "steps": steps}}}) == [
        "no permissions: the token may write", "test needs build", "test has no timeout-minutes",
        "actions/checkout@main is not pinned", "make everything", "no file .ci/walk",
    ]  # fmt: skip
