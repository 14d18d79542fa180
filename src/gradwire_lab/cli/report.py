"""`gradwire report`: one self-contained HTML page from training runs and benchmark results."""

import argparse
from pathlib import Path

from gradwire.errors import InvalidArgument
from gradwire.telemetry.chrome_trace import merge_traces
from gradwire_lab.cli.options import option
from gradwire_lab.report import write_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    words = "runs of `gradwire train`, JSON files of `gradwire bench`, or folders of either"
    parser.add_argument("inputs", nargs="+", type=Path, metavar="RUN_DIR", help=words)
    option(parser, "--out", "FILE", "the page", Path("report.html"), type=Path)
    option(parser, "--title", "TEXT", "the page's heading", "gradwire report")
    option(parser, "--baseline", "LABEL", "the scheme to compare with (default: ddp, else plain)")
    option(parser, "--trace", "FILE", "also merge the runs' trace*.json, for Perfetto", type=Path)


def run(args: argparse.Namespace) -> int:
    print(write_report(args.inputs, args.out, args.title, args.baseline))
    if args.trace is not None:
        traces = [trace for path in args.inputs if path.is_dir() for trace in sorted(path.glob("**/trace*.json"))]
        if not traces:
            raise InvalidArgument("no trace*.json in the run folders; a run writes them when it is traced")
        print(merge_traces([trace for trace in traces if trace != args.trace], args.trace))
    return 0
