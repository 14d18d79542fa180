"""The commands of docs/doors.md run as they are written, made short; two need a network with nodes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ranks import patience

ROOT = Path(__file__).parents[2]
COMMANDS = re.findall(r"^    gradwire (.+)$", (ROOT / "docs" / "doors.md").read_text(), re.MULTILINE)
# What they need to end soon; the rest is the page's.
SHORTENED = {"bench": ["--steps", "1", "--warmup", "1"], "train": ["--steps", "9", "--ranks", "2"], "netlab": []}


@pytest.mark.root
@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_of_the_page_run(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)
    words += SHORTENED[words[0]]
    words = [sys.executable if word == "python" else word for word in words]
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in words]
    done = subprocess.run(
        [sys.executable, "-m", "gradwire", *words], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, timeout=200 * patience(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_has_commands() -> None:
    assert {command.split()[0] for command in COMMANDS} == SHORTENED.keys()
