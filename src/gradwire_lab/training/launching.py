"""Starting a training: ranks on this machine with their progress shown, or this process as one of torchrun's."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from gradwire import checks
from gradwire.errors import InvalidArgument
from gradwire.registry import describe_choices
from gradwire_lab.training.config import TrainConfig, TrainResult
from gradwire_lab.training.display import ProgressDisplay, print_summary
from gradwire_lab.training.loop import train_rank

# Set for ranks that `run_ranks` starts: rank 0 then reports as lines that the starter turns into a progress bar.
_REPORT_VARIABLE = "GRADWIRE_REPORT_LINES"
_REPORT_MARK = "@gradwire "


def run_ranks(
    config: TrainConfig, n_ranks: int, rate: str = "none", *, show_progress: bool = True, show_table: bool = True
) -> dict[str, Any]:
    """Train in `n_ranks` new processes on this machine, behind links of `rate`; returns the run's summary.

    The per-step records are in `config.out`/steps.jsonl.
    Raises: InvalidArgument, Unsupported (before any rank starts), PeerLost (a rank failed; its own words are on stderr).
    """
    from gradwire_lab.ranks.launch import start_ranks
    from gradwire_lab.ranks.netlab.rate import parse_rate
    from gradwire_lab.ranks.supervisor import end_on_signals

    check(config)
    checks.count("ranks", n_ranks)
    parse_rate(rate)
    summary: dict[str, Any] = {}
    command = [sys.executable, "-m", "gradwire", *to_command_line(config)]
    with ProgressDisplay(config, start=show_progress) as display:

        def take_line(rank: int, line: str) -> None:
            if not line.startswith(_REPORT_MARK):
                display.print(f"[{rank}] {line}")
                return
            report = json.loads(line[len(_REPORT_MARK) :])
            if "summary" in report:
                summary.update(report["summary"])
            else:
                display.show_step(report["step"])

        environment = {_REPORT_VARIABLE: "1"}
        with end_on_signals(), start_ranks(command, n_ranks, rate, env=environment, on_line=take_line) as launch:
            launch.wait().raise_if_failed()
    if show_table:
        print_summary(summary)
    return summary


def check(config: TrainConfig) -> None:
    """Make the scheme and the workload once, so that a wrong name or option is one error and not one a rank.

    Raises: InvalidArgument, Unsupported.
    """
    from gradwire import schemes
    from gradwire_lab import workloads
    from gradwire_lab.training.torch_hooks import HOOKS, check_options

    if config.scheme in HOOKS:
        check_options(config.scheme, config.scheme_options)
    elif config.scheme not in schemes.names():
        choices = describe_choices(config.scheme, [*HOOKS, *schemes.names()])
        raise InvalidArgument(f"no scheme is called {config.scheme!r}; {choices}")
    else:
        schemes.by_name(config.scheme, **config.scheme_options)
    workloads.by_name(config.workload, **config.workload_options)


def to_command_line(config: TrainConfig) -> list[str]:
    """The arguments with which `gradwire` trains `config` as a rank."""
    workload_options = dict(config.workload_options)
    words = ["train", "--workload", config.workload, "--scheme", config.scheme, "--steps", str(config.steps)]
    words += ["--compute", workload_options.pop("compute", "real")]
    words += [f"--workload-option={key}={value!r}" for key, value in workload_options.items()]
    words += [f"--scheme-option={key}={value!r}" for key, value in config.scheme_options.items()]
    words += ["--seed", str(config.seed), "--device", config.device, "--save-every", str(config.save_every)]
    words += ["--dump-gradients", str(config.dump_gradients_every), "--local-sgd", str(config.local_sgd)]
    words += ["--outer", config.outer, "--feedback-decay", str(config.feedback_decay)]
    for flag, value in (
        ("--batch-size", config.batch_size),
        ("--threads", config.n_threads),
        ("--bucket-mb", config.bucket_cap_mb),
        ("--out", config.out),
        ("--checkpoint", config.checkpoint),
    ):
        words += [] if value is None else [flag, str(value)]
    for flag, is_on in (("deterministic", config.deterministic), ("evaluate", config.evaluate)):
        words.append(f"--{flag}" if is_on else f"--no-{flag}")
    words += ["--trace"] * config.trace + ["--resume"] * config.resume
    if config.rewrap_at:
        words += ["--rewrap-at", *map(str, config.rewrap_at)]
    return words


def train_and_report(config: TrainConfig) -> TrainResult:
    """Train as a rank; rank 0 shows progress and summary, or reports them to the process that started it."""
    if os.environ["RANK"] != "0":
        return train_rank(config)
    if os.environ.get(_REPORT_VARIABLE):
        result = train_rank(config, lambda record: _report({"step": record}))
        _report({"summary": result.summary})
        return result
    with ProgressDisplay(config) as display:
        result = train_rank(config, display.show_step)
    print_summary(result.summary)
    return result


def _report(content: dict[str, Any]) -> None:
    print(_REPORT_MARK + json.dumps(content), flush=True)
