"""gradwire bench tfp-figures: truncated and embedded floats beside QSGD and 1 bit at equal widths: AQGB's Fig. 2."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from gradwire.bench.figures import tfp_numbers
from gradwire.bench.figures.numbers import Records
from gradwire.bench.gcomp_figures import make_table
from gradwire.errors import GradwireError, InvalidArgument, Unsupported
from gradwire.results.console import make_console
from gradwire.results.records import write_csv, write_json
from gradwire.telemetry.environment import describe_environment
from gradwire.workloads.gradients import load_gradients


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gradwire bench tfp-figures`."""
    parser.add_argument("--gradients", nargs="*", default=[], metavar="FILE.npz", help="gradients to measure errors on")
    parser.add_argument(
        "--method",
        nargs="+",
        default=list(tfp_numbers.METHODS),
        metavar="CODEC",
        help="codecs as NAME:option=value,...; `none`: 32 bits; `+ef` behind one: with error feedback; A|B: one of the two "
        f"for each value, by chance ({' '.join(tfp_numbers.METHODS)})",
    )
    parser.add_argument("--workload", default="resnet", metavar="NAME", help="what to train (resnet: digits)")
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="workers, all in this process (4)")
    parser.add_argument("--steps", type=int, default=300, metavar="N", help="steps a training; 0: errors only (300)")
    parser.add_argument(
        "--decay-every",
        type=int,
        default=0,
        metavar="N",
        help="divide the learning rate by 10 every N steps (0: never)",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="N", help="of weights and batches (0)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of plots and numbers (runs/tfp-*)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here too")


def run(args: argparse.Namespace) -> int:
    """Measure, train, plot, print."""
    if args.workers < 1 or args.steps < 0 or args.decay_every < 0:
        raise InvalidArgument("--workers counts from 1, --steps and --decay-every from 0")
    if not args.gradients and args.steps == 0:
        raise InvalidArgument("nothing to do: give --gradients, or --steps above 0")
    try:
        from gradwire.bench.figures import tfp_plots
    except ImportError as error:
        raise Unsupported(f"the figures need matplotlib ({error}); pip install 'gradwire[report]'") from error
    for spec in args.method:
        tfp_numbers.Method(spec)  # all of them, before the first one is measured
    files = [load_gradients(path) for path in args.gradients]
    folder: Path = args.out or Path("runs") / time.strftime("tfp-%Y%m%d-%H%M%S")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GradwireError(f"could not make {folder}: {error.strerror or error}") from error
    console, results = make_console(), {}
    if files:
        results["errors"] = tfp_numbers.measure_errors(files, args.method)
        tfp_plots.plot_errors(results["errors"], folder)
        console.print(make_table("errors", results["errors"]))
    if args.steps:
        steps: Records = []
        for seed in dict.fromkeys(args.seeds):
            for spec in args.method:
                steps += tfp_numbers.train(args.workload, spec, args.workers, args.steps, seed, args.decay_every)
                write_csv(folder / "steps.csv", steps)  # whoever stops the run keeps what was measured
                console.print(f"seed {seed}, {spec}: loss {steps[-1]['loss']:.4f}", markup=False, highlight=False)
        results["training"] = tfp_numbers.summarise(steps)
        tfp_plots.plot_losses(steps, folder)
        console.print(make_table("training", results["training"]))
    environment = describe_environment()
    flat = [{"figure": name, **record, **environment} for name, records in results.items() for record in records]
    write_json(folder / "tfp.json", flat)
    if args.json:
        write_json(args.json, flat)
    console.print(f"plots and numbers: {folder}")
    return 0
