"""Measure: experiments of the catalogue, or codecs, all-reduce and training beside their competitors by hand."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from gradwire_lab.bench.launching import DEFAULT_RANKS

# name: (module:function that runs it, one-line help); only the one that is called is imported.
BENCHES: dict[str, tuple[str, str]] = {
    "list": ("cli.bench.experiments:list_experiments", "list the experiments and which are measured"),
    "run": (
        "cli.bench.experiments:run_experiments",
        "run experiments into results/, continuing where the last run stopped",
    ),
    "render": (
        "cli.bench.experiments:render_pages",
        "make docs/results from results/; --check: only say what is stale",
    ),
    "codec": ("bench.codec:run", "ratio and speed of gradwire's and other codecs on real gradients"),
    "allreduce": ("bench.allreduce:run", "time and bytes of every scheme's all-reduce beside the backend's own"),
    "train": ("bench.train:run", "iteration time, bytes and loss of a workload under schemes and PyTorch's hooks"),
    "regret": ("bench.regret:run", "compare auto with DDP and with every scheme that it may use"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's name, and everything after it, which its own parser reads in `run`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "commands:\n" + "\n".join(f"  {name:10} {summary}" for name, (_, summary) in BENCHES.items())
    parser.add_argument("bench", choices=list(BENCHES), metavar="COMMAND", help="one of the commands below")
    parser.add_argument(
        "rest", nargs=argparse.REMAINDER, metavar="...", help="its options; `COMMAND --help` lists them"
    )


def run(args: argparse.Namespace) -> int:
    """Run the chosen command; returns its exit status."""
    parsed = parser_of(args.bench).parse_args(args.rest)
    parsed.arguments = args.rest  # what a benchmark that starts ranks hands on to them
    module, _, function = BENCHES[args.bench][0].partition(":")
    return int(getattr(importlib.import_module(f"gradwire_lab.{module}"), function)(parsed))


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser of one benchmark's options."""
    parser = argparse.ArgumentParser(prog=f"gradwire bench {name}", description=BENCHES[name][1])
    add = {
        "list": _add_list_arguments,
        "run": _add_run_arguments,
        "render": _add_render_arguments,
        "codec": _add_codec_arguments,
        "allreduce": _add_allreduce_arguments,
        "train": _add_train_arguments,
        "regret": _add_regret_arguments,
    }
    add[name](parser)
    return parser


def _add_list_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key", nargs="*", metavar="KEY", help="an experiment, or the beginning of several keys (all)")
    parser.add_argument("--quick", action="store_true", help="those of `make bench` alone")
    parser.add_argument("--here", action="store_true", help="count only what this machine has measured")
    parser.add_argument("--wide", action="store_true", help="the papers' figures and the runs too")
    _add_store_arguments(parser)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("key", nargs="*", metavar="KEY", help="an experiment, or the beginning of several keys; `all`: "
                        "the catalogue's first list; `long`: its second; `gradwire bench list` has them")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="the small set of `make bench`, under half an hour")
    parser.add_argument(
        "--list", action="store_true", help="list what would be measured and how long it takes, then exit"
    )
    parser.add_argument(
        "--missing", action="store_true", help="only what has never been measured, not even by older code"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="WORD",
        help="only runs whose names, as --list shows them, hold all of these words",
    )
    parser.add_argument("--fresh", action="store_true", help="also measure again what is finished")
    parser.add_argument("--wide", action="store_true", help="all columns of the tables")
    _add_store_arguments(parser)


def _add_render_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="print what stands between the marks "
                        "`<!-- generated: bench render NAME -->` and `<!-- end -->` of a page, and write nothing")  # fmt: skip
    parser.add_argument("--check", action="store_true", help="write nothing; exit with status 1 if a page is stale")
    parser.add_argument("--root", type=Path, metavar="DIR", help="the checkout (default: around this folder)")


def _add_codec_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gradients", nargs="+", required=True, metavar="FILE",
                        help=".npz files, or WORKLOAD@STEP for the gradients of a short training (gpt@50)")  # fmt: skip
    parser.add_argument(
        "--codec",
        nargs="+",
        default=["all"],
        metavar="NAME",
        help="codecs, of other libraries too; `all` is every one (default)",
    )
    parser.add_argument(
        "--threads", nargs="+", type=int, default=None, metavar="N", help="thread counts (default: 1 and the cores)"
    )
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="samples per codec, after one dropped (7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a list of flat records")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the records as a table")
    parser.add_argument("--wide", action="store_true", help="all columns, however wide the table gets")


def _add_allreduce_arguments(parser: argparse.ArgumentParser) -> None:
    from gradwire_lab.bench.sources import PATTERNS

    parser.add_argument(
        "--scheme",
        nargs="+",
        default=["all"],
        metavar="NAME",
        help="schemes and baselines (ddp, ddp-bf16), with options as NAME:option=value,...; `all` is every one (default) "
        "but dense-switch, the emulated switch without compression",
    )
    _add_rank_arguments(parser)
    parser.add_argument("--n-bytes", nargs="+", type=int, metavar="N", help="sizes of the float32 gradient")
    parser.add_argument("--quick", action="store_true", help="four sizes to 25 MB, few samples: under two minutes")
    parser.add_argument("--gradients", metavar="FILE.npz", help="take the values from a gradient file")
    parser.add_argument("--density", type=float, default=1.0, metavar="D", help="share of non-zeros (random gradient)")
    parser.add_argument(
        "--pattern", choices=list(PATTERNS), default="element", help="how non-zeros cluster: singly, in 32s, in 1,024s"
    )
    parser.add_argument("--rounds", type=int, metavar="N", help="samples per scheme and size (9; quick 5)")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="calls dropped before the first sample (2)")
    parser.add_argument(
        "--budget",
        type=float,
        metavar="S",
        help="seconds per scheme and size; three samples are always taken (20; quick 2)",
    )
    parser.add_argument("--wide", action="store_true", help="all columns, however wide the table gets")


def _add_train_arguments(parser: argparse.ArgumentParser) -> None:
    from gradwire_lab.bench.train_methods import BASELINES

    baselines = ", ".join(BASELINES)
    schemes = (
        f"schemes and baselines ({baselines}), with options as NAME:option=value,...; `all` is every one (default)"
    )
    _add_training_arguments(parser, ["all"], schemes)
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="measured steps per scheme (30)")
    parser.add_argument("--warmup", type=int, default=5, metavar="N",
                        help="steps before the measured ones (5); more if a scheme measures first")  # fmt: skip
    parser.add_argument("--overlap", action="store_true",
                        help="record how much communication and codec work is hidden by computation")  # fmt: skip
    parser.add_argument(
        "--compute",
        choices=("real", "emulate"),
        default="real",
        help="run the model, or replay captured gradients of its shape behind calibrated waits",
    )
    parser.add_argument("--batch-size", type=int, metavar="N", help="samples per rank and step (the workload's own)")
    parser.add_argument("--optimizer", metavar="NAME", help="optimizer (the workload's own)")
    parser.add_argument("--wide", action="store_true", help="all columns, however wide the table gets")


def _add_regret_arguments(parser: argparse.ArgumentParser) -> None:
    autos = [f"auto:fidelity={level}" for level in ("exact", "close", "any")]
    schemes = (
        "ddp, auto with its classes, schemes to compare with; every scheme that one of the autos may use is trained too"
    )
    _add_training_arguments(parser, ["ddp", *autos], schemes)
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="steps of each method (300)")
    parser.add_argument(
        "--seconds", type=float, default=60.0, metavar="S", help="maximum training time of DDP and of each auto (60)"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit with status 1 if auto is below 0.98 of DDP's speed, or in the second half "
        "below 0.95 of the best fixed scheme's"
    )  # fmt: skip


def _add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """Where results are."""
    parser.add_argument(
        "--root", type=Path, metavar="DIR", help="the checkout that has results/ (default: around this folder)"
    )
    parser.add_argument("--machine", metavar="NAME", help="folder of this machine in results/ (by processor and cores)")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench"), metavar="DIR",
                        help="working files: logs, gradients, trainings (runs/bench)")  # fmt: skip


def _add_training_arguments(parser: argparse.ArgumentParser, default_scheme: list[str], schemes: str) -> None:
    """What is trained, from which seed, and how the links change meanwhile; `schemes`: the help of `--scheme`."""
    parser.add_argument("--scheme", nargs="+", default=default_scheme, metavar="NAME", help=schemes)
    parser.add_argument("--workload", default="gpt", metavar="NAME", help="what to train (gpt); NAME:option=value,...")
    _add_rank_arguments(parser)
    parser.add_argument(
        "--then", nargs="+", default=[], metavar="RATE",
        help="link rates to change to during the run, for --steps steps each",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of weights and batches (0)")


def _add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say where the ranks run and where results go; the same in every benchmark with ranks."""
    parser.add_argument("--ranks", type=int, metavar="N", help=f"ranks to start on this machine ({DEFAULT_RANKS})")
    parser.add_argument(
        "--rate",
        nargs="+",
        metavar="RATE",
        help="link rates to measure at, one run each: 100mbit, 1gbit, none (default); R,R,R,S: one a rank or node",
    )
    parser.add_argument(
        "--ranks-per-node", type=int, default=1, metavar="N", help="ranks that share a node and its link (1)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a list of flat records")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the records as a table")
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)  # JSONL of records, from rank 0 to its launcher
