"""Step times measured on a quiet machine, for laws and models to be tried on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_TABLES: dict[str, list[dict[str, Any]]] = {
    name: rows
    for name, rows in json.loads(Path(__file__).with_name("measured_steps.json").read_text()).items()
    if name != "comment"
}
RATES = ("100mbit", "1gbit", "unshaped")


def rows(workload: str) -> list[dict[str, Any]]:
    """One a scheme."""
    return _TABLES[workload]


def step_us(workload: str, rate: str) -> dict[str, int]:
    """{scheme: microseconds}; DDP's own row is under "ddp"."""
    return {row["scheme"]: int(1000 * row[f"ms_{rate}"]) for row in rows(workload) if row[f"ms_{rate}"] is not None}


CELLS = [(workload, rate) for workload in _TABLES for rate in RATES if step_us(workload, rate)]
