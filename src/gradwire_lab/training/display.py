"""What a person sees of a training run: a progress line while it goes, a table when it is done."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gradwire_lab.results.captions import describe_network
from gradwire_lab.results.tables import Grid, print_grid
from gradwire_lab.training.config import TrainConfig


class ProgressDisplay:
    """A progress bar of one run; use it in a with statement. Where there is no terminal it prints a line now and then."""

    def __init__(self, config: TrainConfig, start: bool = True) -> None:
        self._config = config
        self._console = Console()
        self._is_live = start and self._console.is_terminal
        self._prints_lines = start and not self._is_live
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"), console=self._console,
        )  # fmt: skip
        self._task = self._progress.add_task(f"{config.workload}, {config.scheme}", total=config.steps, figures="")

    def __enter__(self) -> ProgressDisplay:
        if self._is_live:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_live:
            self._progress.stop()

    def print(self, line: str) -> None:
        """A line of a rank's own, above the bar."""
        self._console.print(line, markup=False, highlight=False)

    def show_step(self, record: dict[str, Any]) -> None:
        """Move to the step of `record`."""
        done = record["step"] + 1
        figures = f"loss {record['loss']:.4f}  {1e3 * record['iteration_s']:.0f} ms  ratio {record['ratio']:.3f}"
        self._progress.update(self._task, completed=done, figures=figures)
        tenth = max(1, self._config.steps // 10)
        if self._prints_lines and (done % tenth == 0 or done == self._config.steps):
            self.print(f"{self._config.workload}, {self._config.scheme}: step {done}/{self._config.steps}  {figures}")


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
