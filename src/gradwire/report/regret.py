"""The README's picture: step time over network rate, from the records of `gradwire regret`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gradwire.errors import InvalidArgument

_UNSHAPED_BPS = 10e9  # where loopback without a limit is drawn


def draw_step_times(records: Iterable[dict[str, Any]], path: Path) -> Path:
    """DDP, PyTorch's way of sending bfloat16, and auto in each class: milliseconds a step of the second half, by link rate.

    Raises: InvalidArgument (no records, or of several workloads), ModuleNotFoundError (matplotlib, of the extra "report").
    """
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    cells = list(records)
    kinds = sorted({(cell["workload"], cell["ranks"]) for cell in cells})
    if len(kinds) != 1:
        raise InvalidArgument(f"one picture is of one workload and one number of ranks; these records are of {kinds}")
    curves: dict[str, dict[float, float]] = {}
    for cell in cells:
        rate = float(cell["rate_bps"] or _UNSHAPED_BPS)
        times = cell["median_ms"]
        curves.setdefault("DDP", {})[rate] = times["ddp"]
        if "bf16" in times:
            curves.setdefault("bf16", {})[rate] = times["bf16"]
        # The whole run's medians hold trials too; what auto arrives at is the second half's.
        curves.setdefault(f'gradwire, "{cell["fidelity"]}"', {})[rate] = times["ddp"] / cell["x_ddp_last_half"]
    figure, axes = pyplot.subplots(figsize=(7, 3.4))
    for name, points in curves.items():
        rates = sorted(points)
        axes.plot([rate / 1e6 for rate in rates], [points[rate] for rate in rates], marker="o", label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("link, Mb/s (10,000: without a limit)")
    axes.set_ylabel("ms a step")
    workload, n_ranks = kinds[0]
    axes.set_title(f"{workload}, {n_ranks} ranks", fontsize=10)
    axes.legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return path
