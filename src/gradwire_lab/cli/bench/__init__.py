"""Measure: experiments of the catalogue, or codecs, all-reduce and training beside their competitors by hand."""

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path

from gradwire import checks
from gradwire_lab.cli.options import ShortHelp, add_json, add_way, add_workload, option, switch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's name, and everything after it, which its own parser reads in `run`."""
    parser.epilog = "commands:\n" + "\n".join(f"  {name:10} {add.__doc__}" for name, (_, add) in BENCHES.items())
    parser.add_argument("bench", choices=list(BENCHES), metavar="COMMAND", help="one of the commands below")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its options: `COMMAND --help`")


def run(args: argparse.Namespace) -> int:
    """Run the chosen command; returns its exit status."""
    parsed = parser_of(args.bench).parse_args(args.rest)
    checks.count("--seed", getattr(parsed, "seed", 0), 0, 2**32 - 1)
    parsed.arguments = args.rest  # what a benchmark that starts ranks hands on to them
    module, _, function = BENCHES[args.bench][0].partition(":")
    return int(getattr(importlib.import_module(f"gradwire_lab.{module}"), function)(parsed))


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser of one benchmark's options."""
    add = BENCHES[name][1]
    parser = argparse.ArgumentParser(prog=f"gradwire bench {name}", description=add.__doc__, formatter_class=ShortHelp)
    add(parser)
    return parser


def _add_list_arguments(parser: argparse.ArgumentParser) -> None:
    """List the experiments and which are measured."""
    parser.add_argument("key", nargs="*", metavar="KEY", help="an experiment, or the beginning of several keys (all)")
    switch(parser, "--quick", "those of `make bench` alone")
    switch(parser, "--here", "count only what this machine has measured")
    switch(parser, "--wide", "the papers' figures and the runs too")
    _add_store_arguments(parser)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Run experiments into results/, going on where the last run stopped."""
    words = "an experiment, or the beginning of several keys; `all`, `long`: the catalogue's first and second list, "
    parser.add_argument("key", nargs="*", metavar="KEY", help=f"{words}but for what is current on some machine")
    switch(parser, "--quick", "the small set of `make bench`, under half an hour")
    switch(parser, "--list", "list what would be measured and how long it takes, then exit")
    switch(parser, "--missing", "only what has never been measured, not even by older code")
    option(parser, "--only", "WORD", "only runs whose names, as --list shows them, hold all of these", [], nargs="+")
    switch(parser, "--fresh", "also measure again what is finished")
    switch(parser, "--wide", "all columns of the tables")
    _add_store_arguments(parser)


def _add_render_arguments(parser: argparse.ArgumentParser) -> None:
    """Make docs/results from results/; --check: only say what is stale."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="print what stands between the marks "
                        "`<!-- generated: bench render NAME -->` and `<!-- end -->` of a page, and write nothing")  # fmt: skip
    switch(parser, "--check", "write nothing; exit with status 1 if a page is stale")
    option(parser, "--root", "DIR", "the checkout (default: around here)", type=Path)


def _add_codec_arguments(parser: argparse.ArgumentParser) -> None:
    """Ratio and speed of gradwire's and other codecs on real gradients."""
    words = ".npz files, or WORKLOAD@STEP for the gradients of a short training (gpt@50)"
    option(parser, "--gradients", "FILE", words, nargs="+", required=True)
    option(parser, "--codec", "NAME", "codecs, of other libraries too; `all` is every one", ["all"], nargs="+")
    option(parser, "--threads", "N", "thread counts (default: 1 and the cores)", nargs="+", type=int)
    option(parser, "--rounds", "N", "samples per codec, after one dropped", 7)
    add_json(parser, csv=True)
    switch(parser, "--wide", "all columns of the tables")


def _add_allreduce_arguments(parser: argparse.ArgumentParser) -> None:
    """Time and bytes of every scheme's all-reduce, and the backend's own."""
    from gradwire_lab.bench.sources import PATTERNS

    words = "schemes, ddp and ddp-bf16, as NAME:option=value,...; `all`: all but dense-switch, which compresses nothing"
    option(parser, "--scheme", "NAME", words, ["all"], nargs="+")
    _add_rank_arguments(parser)
    option(parser, "--n-bytes", "N", "sizes of the float32 gradient", nargs="+", type=int)
    switch(parser, "--quick", "four sizes to 25 MB, few samples: under two minutes")
    option(parser, "--gradients", "FILE.npz", "take the values from a gradient file")
    option(parser, "--density", "D", "share of non-zeros (random gradient)", 1.0)
    words = "how non-zeros cluster: singly, in 32s, in 1,024s"
    parser.add_argument("--pattern", choices=list(PATTERNS), default="element", help=words)
    option(parser, "--rounds", "N", "samples per scheme and size (default: 9; quick 5)", type=int)
    option(parser, "--warmup", "N", "calls dropped before the first sample", 2)
    option(parser, "--budget", "S", "seconds per scheme and size (default: 20; quick 2)", type=float)
    switch(parser, "--wide", "all columns of the tables")


def _add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Step time, bytes and loss of a workload under schemes and hooks."""
    from gradwire_lab.bench.train_methods import BASELINES

    words = f"schemes and baselines ({', '.join(BASELINES)}), as NAME:option=value,...; `all`: every one"
    _add_training_arguments(parser, ["all"], words)
    option(parser, "--steps", "N", "measured steps per scheme", 30)
    option(parser, "--warmup", "N", "steps before them; more if a scheme measures first", 5)
    switch(parser, "--overlap", "record what computation hides of the rest")
    words = "emulate: replay captured gradients, calibrated waits"
    parser.add_argument("--compute", choices=("real", "emulate"), default="real", help=words)
    option(parser, "--batch-size", "N", "samples per rank and step (default: the workload's)", type=int)
    option(parser, "--optimizer", "NAME", "optimizer (default: the workload's)")
    switch(parser, "--wide", "all columns of the tables")


def _add_regret_arguments(parser: argparse.ArgumentParser) -> None:
    """Compare auto with DDP and with every scheme that it may use."""
    autos = [f"auto:fidelity={level}" for level in ("exact", "close", "any")]
    words = "ddp, auto with its classes, schemes to compare with; all that one of the autos may use are trained too"
    _add_training_arguments(parser, ["ddp", *autos], words)
    option(parser, "--steps", "N", "steps of each method", 300)
    option(parser, "--seconds", "S", "most seconds of training for DDP and for each auto", 60.0)
    words = "exit with status 1 if auto is below 0.98 of DDP's speed, or in the second half below 0.95 of the best "
    switch(parser, "--check", f"{words}fixed scheme's")


def _add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """Where results are."""
    option(parser, "--root", "DIR", "the checkout with results/ (default: around here)", type=Path)
    option(parser, "--machine", "NAME", "this machine's folder in results/")
    option(parser, "--folder", "DIR", "working files: logs, gradients, trainings", Path("runs/bench"), type=Path)


def _add_training_arguments(parser: argparse.ArgumentParser, default_scheme: list[str], schemes: str) -> None:
    """What is trained, from which seed, and how the links change meanwhile; `schemes`: the help of `--scheme`."""
    option(parser, "--scheme", "NAME", schemes, default_scheme, nargs="+")
    add_workload(parser)
    _add_rank_arguments(parser)
    option(parser, "--then", "RATE", "rates to change to in mid-run, for --steps steps each", [], nargs="+")
    option(parser, "--seed", "N", "seed of weights and batches", 0)


def _add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say where the ranks run and where results go; the same in every benchmark with ranks."""
    option(parser, "--ranks", "N", "ranks to start here (default: 4)", type=int)
    words = "link rates, one run each: 100mbit, none (default), or R,R,R,S: one a rank or node"
    option(parser, "--rate", "RATE", words, nargs="+")
    add_way(parser)
    option(parser, "--ranks-per-node", "N", "ranks that share a node and its link", 1)
    add_json(parser, csv=True)
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)  # JSONL of records, from rank 0 to its launcher


# name: (module:function that runs it, its options, which say what it does); only the module that is called is imported.
BENCHES: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "list": ("cli.bench.experiments:list_experiments", _add_list_arguments),
    "run": ("cli.bench.experiments:run_experiments", _add_run_arguments),
    "render": ("cli.bench.experiments:render_pages", _add_render_arguments),
    "codec": ("bench.codec:run", _add_codec_arguments),
    "allreduce": ("bench.allreduce:run", _add_allreduce_arguments),
    "train": ("bench.train:run", _add_train_arguments),
    "regret": ("bench.regret:run", _add_regret_arguments),
}
