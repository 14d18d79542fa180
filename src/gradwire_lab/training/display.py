"""What a person sees of a training run: a line now and then while it goes, a table when it is done."""

from __future__ import annotations

from typing import Any

from gradwire_lab.results.captions import describe_network, duration
from gradwire_lab.results.tables import Grid, print_grid
from gradwire_lab.training.config import TrainConfig


def print_step(config: TrainConfig, record: dict[str, Any]) -> None:
    """A line for every tenth of the run's steps."""
    done = record["step"] + 1
    if done % max(1, config.steps // 10) == 0 or done == config.steps:
        figures = f"loss {record['loss']:.4f}  {1e3 * record['iteration_s']:.0f} ms  ratio {record['ratio']:.3f}"
        left_s = (config.steps - done) * record["iteration_s"]
        ending = f"  {duration(left_s)} left" if left_s >= 1 else ""
        print(f"{config.workload}, {config.scheme}: step {done}/{config.steps}  {figures}{ending}", flush=True)


def print_summary(summary: dict[str, Any]) -> None:
    """The table at the end of a run."""
    title = f"{summary['workload']} with {summary['scheme']}, {summary['ranks']} ranks"
    print_grid(Grid(title, ["", ""], [list(row) for row in summary_rows(summary)]))


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, value) of what matters in a summary, ready to print."""
    computed = " (computed)" if summary["wire_bytes_origin"] != "counted" else ""
    equal = "equal on all ranks" if summary["replicas_equal"] else "NOT equal on all ranks"
    times = (("iteration", "iteration, median"), ("exposed", "exposed communication"), ("codec", "codec, busy"))
    evaluated = [key for key in ("held_out_loss", "accuracy", "exact") if key in summary]
    return [
        ("steps", str(summary["n_steps"])),
        ("parameters", f"{summary['n_parameters']:,}"),
        ("data, compute", f"{summary['data']}, {summary['compute']}"),
        ("network", describe_network(summary)),
        (f"MB sent a step{computed}", f"{summary['wire_bytes'] / 1e6:.3f}"),
        ("ratio to a float32 ring", f"{summary['ratio']:.4f}"),
        *((f"{title}, ms", f"{1e3 * summary[f'{name}_s']:.1f}") for name, title in times),
        ("loss, last step", f"{summary['loss']:.6f}"),
        ("loss, mean of last 10", f"{summary['loss_last_10']:.6f}"),
        *((key.replace("_", " "), f"{summary[key]:.4f}") for key in evaluated),
        *([("fallbacks", f"{summary['n_fallbacks']:.0f}")] if summary["n_fallbacks"] else []),
        ("parameters", f"sha256 {summary['parameters_sha256'][:16]}..., {equal}"),
    ]
