"""Train a workload with a scheme: `gradwire train`, which starts the ranks itself or is one under torchrun."""

from __future__ import annotations

import argparse
import ast
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from gradwire.errors import InvalidArgument
from gradwire.registry import parse_spec
from gradwire_lab.training import TrainConfig
from gradwire_lab.training.launching import run_ranks, train_and_report
from gradwire_lab.training.run_files import write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--workload", default="gpt", metavar="NAME", help="what to train (default: gpt)")
    parser.add_argument("--workload-option", action="append", default=[], metavar="K=V", help="such as optimizer=muon, "
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
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in --checkpoint")
    parser.add_argument("--rewrap-at", type=int, nargs="+", default=[], metavar="STEP", help="wrap the model in a new DDP "
                        "there, for comparing a resumed run bit by bit")  # fmt: skip
    parser.add_argument("--local-sgd", type=int, default=0, metavar="H", help="no exchange of gradients: ranks step by "
                        "themselves, and every H steps exchange how far they went (DiLoCo)")  # fmt: skip
    parser.add_argument("--outer", default="nesterov", choices=["nesterov", "average"], help="how local SGD updates the shared "
                        "parameters: with DiLoCo's optimizer, or by the mean alone")  # fmt: skip
    parser.add_argument("--feedback-decay", type=float, default=1.0, metavar="SHARE", help="share of local SGD's residuals "
                        "that is kept from one exchange to the next (1)")  # fmt: skip
    parser.add_argument("--evaluate", action=argparse.BooleanOptionalAction, default=True, help="on held-out data")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a list with one flat record per run")


def run(args: argparse.Namespace) -> int:
    """Train as a rank if the environment says so, else start the ranks."""
    configs = configs_from(args)
    if "RANK" in os.environ:
        if args.rate != "none":
            raise InvalidArgument("--rate shapes the links of ranks that this command starts: not under torchrun")
        if args.ranks is not None and args.ranks != int(os.environ["WORLD_SIZE"]):
            raise InvalidArgument(f"--ranks {args.ranks} under torchrun with {os.environ['WORLD_SIZE']}: leave it out")
        summaries = [train_and_report(config).summary for config in configs]
        is_writer = os.environ["RANK"] == "0"
    else:
        summaries = [run_ranks(config, args.ranks if args.ranks is not None else 4, args.rate) for config in configs]
        is_writer = True
    if args.json is not None and is_writer:
        write_json(args.json, [flat_record(summary) for summary in summaries])
    return 0


def flat_record(summary: dict[str, Any]) -> dict[str, Any]:
    """A summary without nested values: options as "k=v k=v", the scheme's own figures left to summary.json."""
    options = {
        key: " ".join(f"{k}={v}" for k, v in summary[key].items()) for key in ("scheme_options", "workload_options")
    }
    return {key: value for key, value in (summary | options).items() if not isinstance(value, dict)}


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
        local_sgd=args.local_sgd,
        outer=args.outer,
        feedback_decay=args.feedback_decay,
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
