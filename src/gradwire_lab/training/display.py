"""What a person sees of a training run: a progress line while it goes, a table when it is done."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from gradwire_lab.results.captions import describe_network
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
    table = Table(
        title=f"{summary['workload']} with {summary['scheme']}, {summary['ranks']} ranks",
        title_justify="left",
        show_header=False,
    )
    table.add_column("")
    table.add_column("", justify="right")
    for name, value in summary_rows(summary):
        table.add_row(name, value)
    Console().print(table)


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, value) of what matters in a summary, ready to print."""
    computed = " (computed)" if summary["wire_bytes_origin"] != "counted" else ""
    rows = [
        ("steps", str(summary["n_steps"])),
        ("parameters", f"{summary['n_parameters']:,}"),
        ("data, compute", f"{summary['data']}, {summary['compute']}"),
        ("network", describe_network(summary)),
        (f"bytes sent per step and rank{computed}", format_bytes(summary["wire_bytes"])),
        ("ratio to a float32 ring", f"{summary['ratio']:.4f}"),
        ("iteration time, median", format_ms(summary["iteration_s"])),
        ("  exposed communication", format_ms(summary["exposed_s"])),
        ("  codec (busy, overlaps)", format_ms(summary["codec_s"])),
        ("loss, last step", f"{summary['loss']:.6f}"),
        ("loss, mean of last 10", f"{summary['loss_last_10']:.6f}"),
    ]
    rows += [
        (key.replace("_", " "), f"{summary[key]:.4f}")
        for key in ("held_out_loss", "accuracy", "exact")
        if key in summary
    ]
    if summary["n_fallbacks"]:
        rows.append(("fallbacks", f"{summary['n_fallbacks']:.0f}"))
    equal = "equal on all ranks" if summary["replicas_equal"] else "NOT equal on all ranks"
    rows.append((f"parameters, {equal}", f"sha256 {summary['parameters_sha256'][:16]}..."))
    return rows


def format_bytes(n_bytes: float) -> str:
    """Decimal units, as networks count."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= size:
            return f"{n_bytes / size:.3f} {unit}"
    return f"{n_bytes:.0f} B"


def format_ms(seconds: float | None) -> str:
    """Milliseconds, or a dash for what is not known."""
    return "-" if seconds is None else f"{1e3 * seconds:.1f} ms"
