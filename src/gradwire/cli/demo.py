"""The demo: a small GPT trained with plain DDP and with a scheme, compared in a table and an HTML report."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gradwire.cli.train import parse_options
from gradwire.errors import InvalidArgument
from gradwire.results.captions import describe_network
from gradwire.training import TrainConfig
from gradwire.training.display import format_bytes, format_ms
from gradwire.training.launching import check, run_ranks

# 200 steps of two runs take about 2 minutes on 2 cores; 20 are enough to see that everything works.
_STEPS, _QUICK_STEPS = 200, 20
_RANKS, _QUICK_RANKS = 4, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--workload", default="gpt", metavar="NAME", help="default: gpt")
    parser.add_argument("--workload-option", action="append", default=[], metavar="K=V")
    parser.add_argument("--scheme", default="gcomp", metavar="NAME", help="what to compare with DDP (default: gcomp)")
    parser.add_argument("--scheme-option", action="append", default=[], metavar="K=V")
    parser.add_argument("--ranks", type=int, metavar="N", help=f"default: {_RANKS}")
    parser.add_argument("--steps", type=int, metavar="N", help=f"default: {_STEPS}")
    parser.add_argument("--rate", default="none", metavar="RATE", help="each rank's link: 1gbit, ... (default: none)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK_STEPS} steps of {_QUICK_RANKS} ranks, for CI")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), metavar="DIR", help="default: runs/demo")


def run(args: argparse.Namespace) -> int:
    """Train twice with the same seeds, compare, write DIR/report.html."""
    from gradwire.report import write_report

    n_ranks = args.ranks if args.ranks is not None else _QUICK_RANKS if args.quick else _RANKS
    n_steps = args.steps if args.steps is not None else _QUICK_STEPS if args.quick else _STEPS
    if args.scheme == "ddp":
        raise InvalidArgument("the demo compares a scheme with plain DDP: name another --scheme than ddp")
    scheme_options = parse_options(args.scheme_option, "--scheme-option")
    configs = [
        TrainConfig(
            workload=args.workload,
            workload_options=parse_options(args.workload_option, "--workload-option"),
            scheme=scheme,
            scheme_options=options,
            steps=n_steps,
            seed=args.seed,
            out=args.out / scheme,
        )
        for scheme, options in (("ddp", {}), (args.scheme, scheme_options))
    ]
    for config in configs:
        check(config)  # the second run's mistakes, before the first takes its minute
    console = Console()
    console.print(f"Training {args.workload} for {n_steps} steps on {n_ranks} local ranks, with plain DDP and with "
                  f"{args.scheme}: same seeds, same data.", highlight=False)  # fmt: skip
    summaries = [run_ranks(config, n_ranks, args.rate, show_table=False) for config in configs]
    losses = [read_losses(args.out / config.scheme / "steps.jsonl") for config in configs]
    console.print(make_table(summaries, losses))
    report = write_report([args.out / config.scheme for config in configs], args.out / "report.html")
    console.print(f"Report with plots: {report}", highlight=False, soft_wrap=True)
    return 0


def read_losses(path: Path) -> list[float]:
    """The loss of each step in a run's steps.jsonl, in full precision."""
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


def make_table(summaries: list[dict[str, Any]], losses: list[list[float]]) -> Table:
    """The two runs side by side."""
    baseline, compared = summaries
    table = Table(title=f"{compared['workload']}, {compared['ranks']} ranks, {compared['n_steps']} steps, "
                  f"{compared['n_parameters']:,} parameters, {describe_network(compared)}", title_justify="left")  # fmt: skip
    table.add_column("")
    for summary in summaries:
        table.add_column(str(summary["scheme"]), justify="right")

    def add(name: str, values: list[str]) -> None:
        table.add_row(name, *values)

    add("bytes sent per step and rank", [format_bytes(summary["wire_bytes"]) for summary in summaries])
    add("ratio to a float32 ring", [f"{summary['ratio']:.4f}" for summary in summaries])
    add("iteration time, median", [format_ms(summary["iteration_s"]) for summary in summaries])
    add("  exposed communication", [format_ms(summary["exposed_s"]) for summary in summaries])
    add("loss, last step", [f"{curve[-1]:.7f}" for curve in losses])
    for key in ("held_out_loss", "accuracy"):
        if key in baseline:
            add(key.replace("_", " "), [f"{summary[key]:.5f}" for summary in summaries])
    deviations = [abs(ours - theirs) for theirs, ours in zip(*losses, strict=True)]
    add("deviation of the loss, largest", ["", f"{max(deviations):.2e}"])
    add("deviation of the loss, mean", ["", f"{sum(deviations) / len(deviations):.2e}"])
    add("parameters equal on all ranks", ["yes" if summary["replicas_equal"] else "NO" for summary in summaries])
    add("parameters, sha256", [summary["parameters_sha256"][:12] + "..." for summary in summaries])
    return table
