"""The folder of a run: config.json, steps.jsonl (a line a step), summary.json. Written by rank 0 only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gradwire.telemetry.jsonl import JsonLines
from gradwire_lab.results.records import write_json, write_text


class RunFiles:
    """Writes a run's folder; with `folder` None, nothing.

    Args:
        start_step: steps from here on are this run's; earlier lines of an interrupted run are kept.
    """

    def __init__(self, folder: Path | None, config: dict[str, Any], start_step: int = 0) -> None:
        self._folder = folder
        self._lines: JsonLines | None = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", config)
        (folder / "summary.json").unlink(missing_ok=True)  # of an earlier run: this one is not done yet
        steps = folder / "steps.jsonl"
        if start_step and steps.exists():
            kept = [line for line in steps.read_text().splitlines() if _step_of(line) < start_step]
            write_text(steps, "".join(line + "\n" for line in kept))
            self._lines = JsonLines(steps, append=True)
        else:
            self._lines = JsonLines(steps)

    def add_step(self, record: dict[str, Any]) -> None:
        """Append one step's record."""
        if self._lines is not None:
            self._lines.append(record)

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary; only a run that came to its end has one."""
        if self._folder is not None and self._lines is not None:
            self._lines.close()
            write_json(self._folder / "summary.json", summary)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line cut short by a crash is dropped
