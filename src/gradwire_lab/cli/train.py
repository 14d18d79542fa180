"""Train a workload with a scheme: `gradwire train`, which starts the ranks itself or is one under torchrun."""

import argparse
import ast
import os
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from gradwire import checks
from gradwire.errors import InvalidArgument
from gradwire.registry import parse_spec
from gradwire_lab.cli.options import add_json, add_ranks, add_workload, option, switch
from gradwire_lab.results.records import write_json
from gradwire_lab.training import TrainConfig
from gradwire_lab.training.launching import given_config, run_ranks, train_and_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    option(parser, "--workload-option", "K=V", "such as optimizer=muon, data_dir=..., fold=2", [], action="append")
    parser.add_argument("--compute", choices=["real", "emulate"], default="real", help="emulate: captured gradients")
    option(parser, "--scheme", "NAME", "a run each; ddp: without gradwire", ["gcomp"], nargs="+")
    option(parser, "--scheme-option", "K=V", "such as importance=none", [], action="append")
    add_ranks(parser)
    option(parser, "--steps", "N", "train up to this step", 100)
    option(parser, "--batch-size", "N", "samples per rank (default: the workload's)", type=int)
    option(parser, "--seed", "N", "of weights and data", 0)
    _either(parser, "--deterministic", "allow what does not repeat bit for bit")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="default: cpu")
    option(parser, "--threads", "N", "torch's per rank (default: 1 if ranks share)", type=int, dest="n_threads")
    option(parser, "--bucket-mb", "MB", "DDP's bucket size (default: DDP's)", type=float, dest="bucket_cap_mb")
    option(parser, "--out", "RUN_DIR", "records of steps; of several schemes a folder each", type=Path)
    switch(parser, "--trace", "a Chrome trace per rank, in RUN_DIR")
    option(parser, "--dump-gradients", "EVERY", "gradients, as files of RUN_DIR", 0, dest="dump_gradients_every")
    option(parser, "--checkpoint", "DIR", "write checkpoints there", type=Path)
    option(parser, "--save-every", "N", "steps between checkpoints; 0: at the end", 0)
    switch(parser, "--resume", "from the newest checkpoint in --checkpoint")
    option(parser, "--rewrap-at", "STEP", "wrap anew in DDP there, as a resumption does", [], nargs="+", type=int)
    option(parser, "--local-sgd", "H", "DiLoCo: exchange every H steps", 0)
    parser.add_argument("--outer", default="nesterov", choices=["nesterov", "average"], help="DiLoCo's, or the mean")
    option(parser, "--feedback-decay", "SHARE", "of its residuals that last", 1.0)
    option(parser, "--fragments", "N", "parts of the model, exchanged in turn", 1)
    option(parser, "--delay", "STEPS", "that an exchange may overlap with", 0)
    _either(parser, "--evaluate", "leave out the evaluation on held-out data")
    add_json(parser, "write a list with one flat record per run")


def _either(parser: argparse.ArgumentParser, name: str, words: str) -> None:
    parser.add_argument(name, action=argparse.BooleanOptionalAction, default=True, help=words)


def run(args: argparse.Namespace) -> int:
    given = given_config()
    configs = [given] if given is not None else configs_from(args)
    for name, folder in ((name, getattr(config, name)) for config in configs for name in ("out", "checkpoint")):
        try:  # now, not when the first of it is written
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"--{name} {folder}: {error.strerror}; name a folder that can be made") from error
    if "RANK" in os.environ:
        if args.rate != "none":
            raise InvalidArgument("--rate shapes the links of ranks that this command starts: not under torchrun")
        if args.ranks is not None and args.ranks != int(os.environ["WORLD_SIZE"]):
            raise InvalidArgument(f"--ranks {args.ranks} under torchrun with {os.environ['WORLD_SIZE']}: leave it out")
        summaries = [train_and_report(config).summary for config in configs]
    else:
        summaries = [run_ranks(config, args.ranks if args.ranks is not None else 4, args.rate) for config in configs]
    if args.json is not None and os.environ.get("RANK", "0") == "0":
        write_json(args.json, [flat_record(summary) for summary in summaries])
    return 0


def flat_record(summary: dict[str, Any]) -> dict[str, Any]:
    """A summary without nested values: options as "k=v k=v", the scheme's own figures left to summary.json."""
    options = {
        key: " ".join(f"{k}={v}" for k, v in summary[key].items()) for key in ("scheme_options", "workload_options")
    }
    return {key: value for key, value in (summary | options).items() if not isinstance(value, dict)}


def configs_from(args: argparse.Namespace) -> list[TrainConfig]:
    checks.count("--threads", 1 if args.n_threads is None else args.n_threads, 1, 1024)
    checks.count("--seed", args.seed, 0, 2**32 - 1)
    checks.finite("--bucket-mb", args.bucket_cap_mb or 0.0, 0)
    checks.finite("--feedback-decay", args.feedback_decay, 0)
    for name in () if args.local_sgd else ("outer", "feedback_decay", "fragments", "delay"):
        if getattr(args, name) != getattr(TrainConfig, name):
            raise InvalidArgument(f"--{name.replace('_', '-')} is local SGD's: give --local-sgd H, or leave it out")
    workload, workload_options = parse_spec(args.workload)
    workload_options |= parse_options(args.workload_option, "--workload-option")
    if args.compute != "real":
        workload_options["compute"] = args.compute
    given = {field.name: getattr(args, field.name) for field in fields(TrainConfig) if field.name in args}
    given |= {"workload": workload, "workload_options": workload_options, "rewrap_at": tuple(args.rewrap_at)}
    config = TrainConfig(**given | schemes_of(args)[0])
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
