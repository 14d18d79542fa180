"""Numbers of the ACP-SGD paper's figures about time, from records of `bench train`; every function returns flat records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradwire.bench.acp_figures_table import YARDSTICK_ROW
from gradwire.bench.figures.numbers import Records

_MS = ("iteration_s", "iteration_s_low", "iteration_s_high", "compute_s", "codec_s", "exposed_s", "wait_s")
# What names a row of a figure beside the scheme.
_SETTINGS = {
    "iteration": ("workload", "network"),
    "methods": ("workload", "network"),
    "optimisations": ("workload", "network"),
    "buffers": ("workload", "network", "rank", "buffer_mb"),
    "batch": ("workload", "network", "batch_size"),
    "ranks": ("workload", "network", "rank"),
    "world": ("workload", "network", "ranks"),
}


def options_of(record: dict[str, Any]) -> dict[str, str]:
    """A record's scheme options, which `bench train` writes as words."""
    pairs = (word.partition("=") for word in str(record["options"]).split(","))
    return {key: value for key, _, value in pairs if value}


def describe_plan(name: str, records: Sequence[dict[str, Any]]) -> Records:
    """One figure's records: setting, scheme, times in ms, how many times as fast as DDP and as Power-SGD in that row."""
    found: Records = []
    for record in records:
        if str(record["row"]).split("-")[0] != name:
            continue
        siblings = [other for other in records if _comparison(other) == _comparison(record)]
        options = options_of(record)
        network = "unshaped" if record["rate_bps"] is None else f"{record['rate_bps'] / 1e6:g} Mb/s"
        known = {**record, **options, "network": network}
        found.append(
            {
                **{key: known.get(key) for key in _SETTINGS[name]},
                "scheme": record["scheme"],
                "options": record["options"],
                **{f"{key.removesuffix('_s')}_ms" if key.endswith("_s") else key.replace("_s_", "_ms_"): _ms(record[key])
                   for key in _MS},
                "speed_up_over_ddp": _speed_up(record, siblings, "ddp"),
                "speed_up_over_power_sgd": _speed_up(record, siblings, "power-sgd"),
                "wire_mb": record["wire_bytes"] / 1e6,
                "samples_per_s": record["samples_per_s"],
                "compute": record["compute"],
                "n_steps": record["n_steps"],
                "ranks": record["ranks"],
                **{key: record.get(key) for key in ("cpu", "n_cores", "torch", "gradwire", "commit", "date")},
            }
        )  # fmt: skip
    return found


def _comparison(record: dict[str, Any]) -> str:
    """The row's key, without what sets its yardstick apart."""
    return str(record["row"]).removesuffix(YARDSTICK_ROW)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _speed_up(record: dict[str, Any], siblings: Sequence[dict[str, Any]], scheme: str) -> float | None:
    """How many times as fast as `scheme` as it comes, without options but its rank."""
    plain = [one for one in siblings if one["scheme"] == scheme and set(options_of(one)) <= {"rank"}]
    return plain[0]["iteration_s"] / record["iteration_s"] if plain else None


_SHOWN = ("iteration_ms", "iteration_ms_low", "iteration_ms_high", "speed_up_over_ddp", "speed_up_over_power_sgd",
          "compute_ms", "codec_ms", "exposed_ms", "wait_ms", "wire_mb")  # fmt: skip


def to_markdown(title: str, records: Records) -> str:
    """One figure as a Markdown table; of `bench train`'s records, the columns that people read."""
    columns = list(records[0])
    if "iteration_ms" in columns:
        settings = columns[: columns.index("scheme")]
        columns = [*settings, "scheme", "options", *_SHOWN]
        columns = [one for one in columns if any(record[one] not in (None, "") for record in records)]
    lines = [f"### {title}", "", "| " + " | ".join(column.replace("_", " ") for column in columns) + " |"]
    lines.append("|" + "---|" * len(columns))
    lines += ["| " + " | ".join(_cell(record[column]) for column in columns) + " |" for record in records]
    return "\n".join([*lines, ""])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
