"""The quick start does what it says: its script is taken from the page, and its commands are run one after another."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from page_text import DOCS, ROOT

from ranks import patience

PAGE = (DOCS / "quickstart.md").read_text()


def test_the_script_and_the_commands_of_the_page_run(tmp_path: Path) -> None:
    script = re.search(r'```python title="train.py"\n(.*?)```', PAGE, re.DOTALL)
    commands = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL))
    assert script is not None
    (tmp_path / "train.py").write_text(script[1])
    commands = commands.replace("torchrun ", f"{sys.executable} -m torch.distributed.run --standalone ")
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        ["bash", "-e"], input=commands, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=300 * patience(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.findall(r"loss ([0-9.]+), ratio ([0-9.]+)", done.stdout)
    assert len(said) == 2, done.stdout
    assert 0.2 < float(said[0][1]) <= 1.0  # auto: plain, or already trying something
    assert 0.2 < float(said[1][1]) < 0.3  # eight bits a value
