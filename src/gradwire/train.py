"""Train a workload with a scheme: `gradwire train`, which starts the ranks itself or is one under torchrun."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradwire.bench.specs import parse_spec
from gradwire.choices import describe_choices
from gradwire.errors import InvalidArgument
from gradwire.training import TrainConfig, TrainResult, train_rank
from gradwire.training.display import ProgressDisplay, print_summary
from gradwire.training.run_files import write_json

__all__ = ["TrainConfig", "TrainResult", "add_arguments", "run", "run_ranks", "train_rank"]

# Set for ranks that `run_ranks` starts: rank 0 then reports as lines that the starter turns into a progress bar.
_REPORT_VARIABLE = "GRADWIRE_REPORT_LINES"
_REPORT_MARK = "@gradwire "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--workload", default="gpt", metavar="NAME", help="what to train (default: gpt)")
    parser.add_argument("--workload-option", action="append", default=[], metavar="K=V", help="such as optimizer=sgd, "
                        "learning_rate=0.1, data_dir=..., fold=2")  # fmt: skip
    parser.add_argument("--compute", choices=["real", "emulate"], default="real",
                        help="emulate: replay captured gradients behind calibrated waits")  # fmt: skip
    parser.add_argument("--scheme", nargs="+", default=["gcomp"], metavar="NAME",
                        help="one or more, one run each, options as NAME:option=value,...; ddp is DDP without gradwire "
                        "(default: gcomp)")  # fmt: skip
    parser.add_argument("--scheme-option", action="append", default=[], metavar="K=V", help="such as importance=none")
    parser.add_argument("--ranks", type=int, metavar="N", help="processes to start here (default: 4; torchrun's own)")
    parser.add_argument(
        "--rate", default="none", metavar="RATE", help="each rank's link, such as 1gbit (default: none)"
    )
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="train up to this step (default: 100)")
    parser.add_argument("--batch-size", type=int, metavar="N", help="samples per rank (default: the workload's)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default: 0)")
    parser.add_argument("--deterministic", action=argparse.BooleanOptionalAction, default=True,
                        help="torch's deterministic algorithms (default: on)")  # fmt: skip
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, metavar="N", help="torch's threads per rank (default: 1 if ranks share)")
    parser.add_argument("--bucket-mb", type=float, metavar="MB", help="DDP's bucket size (default: DDP's)")
    parser.add_argument("--out", type=Path, metavar="RUN_DIR", help="write config.json, steps.jsonl, summary.json there "
                        "(several schemes: a folder each inside)")  # fmt: skip
    parser.add_argument("--trace", action="store_true", help="a Chrome trace per rank, in RUN_DIR")
    parser.add_argument("--dump-gradients", type=int, default=0, metavar="EVERY", help="rank 0 writes gradient, parameters "
                        "and optimizer state of every such step into RUN_DIR/gradients")  # fmt: skip
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="write checkpoints there")
    parser.add_argument(
        "--save-every", type=int, default=0, metavar="N", help="steps between checkpoints (default: end)"
    )
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --checkpoint")
    parser.add_argument("--rewrap-at", type=int, nargs="+", default=[], metavar="STEP", help="wrap the model in a new DDP "
                        "there, for comparing a resumed run bit by bit")  # fmt: skip
    parser.add_argument("--evaluate", action=argparse.BooleanOptionalAction, default=True, help="on held-out data")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a list with one flat record a run")


def run(args: argparse.Namespace) -> int:
    """Train as a rank if the environment says so, else start the ranks."""
    configs = configs_from(args)
    if "RANK" in os.environ:
        if args.rate != "none":
            raise InvalidArgument("--rate shapes the links of ranks that this command starts: not under torchrun")
        if args.ranks is not None and args.ranks != int(os.environ["WORLD_SIZE"]):
            raise InvalidArgument(f"--ranks {args.ranks} under torchrun with {os.environ['WORLD_SIZE']}: leave it out")
        summaries = [_train_and_report(config).summary for config in configs]
        is_writer = os.environ["RANK"] == "0"
    else:
        summaries = [run_ranks(config, args.ranks if args.ranks is not None else 4, args.rate) for config in configs]
        is_writer = True
    if args.json is not None and is_writer:
        write_json(args.json, [flat_record(summary) for summary in summaries])
    return 0


def run_ranks(
    config: TrainConfig, n_ranks: int, rate: str = "none", *, show_progress: bool = True, show_table: bool = True
) -> dict[str, Any]:
    """Train in `n_ranks` new processes on this machine, behind links of `rate`; returns the run's summary.

    The per-step records are in `config.out`/steps.jsonl.
    Raises: InvalidArgument, Unsupported (before any rank starts), PeerLost (a rank failed; its own words are on stderr).
    """
    from gradwire.launch import start_ranks
    from gradwire.supervisor import end_on_signals

    check(config)
    summary: dict[str, Any] = {}
    command = [sys.executable, "-m", "gradwire.cli", *to_command_line(config)]
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


def flat_record(summary: dict[str, Any]) -> dict[str, Any]:
    """A summary without nested values: options as "k=v k=v", the scheme's own figures left to summary.json."""
    options = {
        key: " ".join(f"{k}={v}" for k, v in summary[key].items()) for key in ("scheme_options", "workload_options")
    }
    return {key: value for key, value in (summary | options).items() if not isinstance(value, dict)}


def check(config: TrainConfig) -> None:
    """Make the scheme and the workload once, so that a wrong name or option is one error and not one a rank.

    Raises: InvalidArgument, Unsupported.
    """
    from gradwire import schemes, workloads
    from gradwire.training.session import PLAIN_DDP

    if config.scheme == PLAIN_DDP:
        if config.scheme_options:
            raise InvalidArgument(f"scheme {PLAIN_DDP!r} is DDP without gradwire and takes no options")
    elif config.scheme not in schemes.names():
        choices = describe_choices(config.scheme, [PLAIN_DDP, *schemes.names()])
        raise InvalidArgument(f"no scheme is called {config.scheme!r}; {choices}")
    else:
        schemes.by_name(config.scheme, **config.scheme_options)
    workloads.by_name(config.workload, **config.workload_options)


def configs_from(args: argparse.Namespace) -> list[TrainConfig]:
    """One configuration per scheme."""
    workload_options = parse_options(args.workload_option, "--workload-option")
    if args.compute != "real":
        workload_options["compute"] = args.compute
    config = TrainConfig(
        workload=args.workload,
        workload_options=workload_options,
        **schemes_of(args)[0],
        steps=args.steps,
        batch_size=args.batch_size,
        seed=args.seed,
        deterministic=args.deterministic,
        device=args.device,
        n_threads=args.threads,
        bucket_cap_mb=args.bucket_mb,
        out=args.out,
        trace=args.trace,
        dump_gradients_every=args.dump_gradients,
        checkpoint=args.checkpoint,
        resume=args.resume,
        save_every=args.save_every,
        rewrap_at=tuple(args.rewrap_at),
        evaluate=args.evaluate,
    )
    if len(args.scheme) == 1:
        return [config]
    if config.checkpoint is not None:
        raise InvalidArgument("--checkpoint is for one run: give one --scheme")
    folders = [re.sub(r"[^A-Za-z0-9._]+", "-", spec) for spec in args.scheme]
    return [
        replace(config, **scheme, out=None if config.out is None else config.out / folder)
        for scheme, folder in zip(schemes_of(args), folders, strict=True)
    ]


def schemes_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Name and options of each `--scheme`: NAME, or NAME:option=value,..., which go before `--scheme-option`."""
    shared = parse_options(args.scheme_option, "--scheme-option")
    specs = [parse_spec(spec) for spec in args.scheme]
    return [{"scheme": name, "scheme_options": shared | options} for name, options in specs]


def parse_options(words: list[str], option: str) -> dict[str, Any]:
    """{"k": value} of K=V words; values are Python's numbers, True, False, None, or else strings."""
    options = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.isidentifier():
            raise InvalidArgument(f"{option} {word!r}: expected KEY=VALUE")
        try:
            options[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key] = {"true": True, "false": False, "none": "none"}.get(value, value)
    return options


def to_command_line(config: TrainConfig) -> list[str]:
    """The arguments with which `gradwire` trains `config` as a rank."""
    workload_options = dict(config.workload_options)
    words = ["train", "--workload", config.workload, "--scheme", config.scheme, "--steps", str(config.steps)]
    words += ["--compute", workload_options.pop("compute", "real")]
    words += [f"--workload-option={key}={value!r}" for key, value in workload_options.items()]
    words += [f"--scheme-option={key}={value!r}" for key, value in config.scheme_options.items()]
    words += ["--seed", str(config.seed), "--device", config.device, "--save-every", str(config.save_every)]
    words += ["--dump-gradients", str(config.dump_gradients_every)]
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


def _train_and_report(config: TrainConfig) -> TrainResult:
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
