"""Numbers and plots of paired trainings: means, and paired differences with their 95 % intervals."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from gradwire.bench.paired_trainings import Case
from gradwire.registry import parse_spec

Records = list[dict[str, Any]]
# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond the last the normal one is within 2 %.
_T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23, 14: 2.14, 19: 2.09,
      29: 2.05, 49: 2.01, 99: 1.98}  # fmt: skip


def summarize(
    cases: Sequence[Case], results: Mapping[str, Mapping[str, Any]], part: str, against: Mapping[str, str]
) -> Records:
    """One flat record for every configuration of every figure and workload that has finished trainings.

    For every `label`: `name` of `against`, `label` is the mean difference from the configuration `name` of `part` and of
    the same group (up to its comma) over the folds and seeds that both have, `label_low` and `label_high` its paired 95 %
    interval. Trainings that diverged are counted, not averaged. In points of accuracy, or for workloads without one in
    nats of held-out loss, where less is better and the sign is turned.
    """
    values: dict[tuple[str, str, str, str], dict[tuple[str, int], float]] = defaultdict(dict)
    trainings: dict[tuple[str, str, str, str], list[Mapping[str, Any]]] = defaultdict(list)
    schemes: dict[tuple[str, str, str, str], str] = {}
    n_diverged: Counter[tuple[str, str, str, str]] = Counter()
    for case in cases:
        if case.key in results:
            name, options = parse_spec(case.workload)
            if "rate_scaling" in options:
                name += f", {options['rate_scaling']} scaling"
            place = (case.part, name, case.group, case.name)
            figure = _figure(results[case.key])
            schemes[place] = case.scheme
            trainings[place].append(results[case.key])
            if figure is None:
                n_diverged[place] += 1
            else:
                values[place][case.workload, case.seed] = figure
    records: Records = []
    for place, mine in values.items():
        if not mine:
            continue
        figure_name, workload, group, name = place
        record: dict[str, Any] = {
            "figure": figure_name,
            "workload": workload,
            "group": group,
            "configuration": name,
            "scheme": schemes[place],
            "n": len(mine),
            "n_diverged": n_diverged[place],
            "mean": sum(mine.values()) / len(mine),
            "spread": _deviation(list(mine.values())),
            **{key: _mean_of(trainings[place], key) for key in ("ratio", "iteration_s", "rate")},
        }
        for label, yardstick in against.items():
            other = values.get((part, workload, group.split(",")[0], yardstick), {})
            both = [mine[key] - other[key] for key in mine if key in other]
            mean = sum(both) / len(both) if both else None
            half = _half_interval(both)
            record[label] = mean
            record[f"{label}_low"] = None if mean is None or half is None else mean - half
            record[f"{label}_high"] = None if mean is None or half is None else mean + half
        records.append(record)
    return records


def _mean_of(trainings: Sequence[Mapping[str, Any]], key: str) -> Any:
    """The mean of numbers, or the first of words; None where trainings of an older version lack it."""
    found = [one[key] for one in trainings if one.get(key) is not None]
    if not found or isinstance(found[0], str):
        return found[0] if found else None
    return sum(found) / len(found)


def _figure(result: Mapping[str, Any]) -> float | None:
    """Larger is better: accuracy in per cent, or minus the held-out loss; None if training diverged."""
    if "accuracy" in result:
        return None if result["accuracy"] is None or result["loss"] is None else 100 * float(result["accuracy"])
    loss = result.get("held_out_loss", result["loss"])
    return None if loss is None else -float(loss)


def _deviation(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else 0.0


def _half_interval(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    n = len(values) - 1
    quantile = _T[max(k for k in _T if k <= n)]  # the next smaller number of degrees: never too narrow
    return quantile * _deviation(values) / math.sqrt(len(values))


def to_markdown(records: Records, headings: Mapping[str, str]) -> str:
    """The tables, one a figure and workload; `headings` of the labels that `summarize` was given."""
    lines: list[str] = []
    for figure, workload in dict.fromkeys((record["figure"], record["workload"]) for record in records):
        columns = [
            "group",
            "configuration",
            "n",
            "mean",
            "spread",
            *headings.values(),
            "bytes / float32 ring",
            "ms a step",
        ]
        lines += [f"### {figure}, {workload}", "", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        for record in records:
            if (record["figure"], record["workload"]) == (figure, workload):
                cells = [
                    record["group"],
                    record["configuration"],
                    str(record["n"]) + (f" ({record['n_diverged']} diverged)" if record["n_diverged"] else ""),
                    f"{record['mean']:.3f}",
                    f"{record['spread']:.3f}",
                ]
                cells += [_difference(record, label) for label in headings]
                cells.append("-" if record["ratio"] is None else f"{record['ratio']:.3f}")
                cells.append("-" if record["iteration_s"] is None else f"{1e3 * record['iteration_s']:.1f}")
                lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _difference(record: Mapping[str, Any], label: str) -> str:
    if record[label] is None:
        return "-"
    if record[f"{label}_low"] is None:
        return f"{record[label]:+.3f}"
    return f"{record[label]:+.3f} ({record[f'{label}_low']:+.3f} to {record[f'{label}_high']:+.3f})"


def plot(records: Records, path: Path) -> None:
    """One panel a figure and workload: means with the standard error of the mean."""
    panels = list(dict.fromkeys((record["figure"], record["workload"]) for record in records))
    if not panels:
        return
    figure, axes = plt.subplots(len(panels), 1, figsize=(8, 3.2 * len(panels)), squeeze=False)
    for axis, (name, workload) in zip(axes[:, 0], panels, strict=True):
        mine = [record for record in records if (record["figure"], record["workload"]) == (name, workload)]
        for group in dict.fromkeys(record["group"] for record in mine):
            line = [record for record in mine if record["group"] == group]
            errors = [record["spread"] / math.sqrt(record["n"]) for record in line]
            axis.errorbar(
                [r["configuration"] for r in line],
                [r["mean"] for r in line],
                errors,
                marker="o",
                capsize=3,
                label=group,
            )
        axis.set_title(f"{name}, {workload}: accuracy in per cent, or minus the held-out loss")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)
