"""Measure codecs, all-reduce and training against their rivals."""

from __future__ import annotations

import argparse
import importlib

from gradwire.results.console import WIDE_HELP, Wide

# name: (module with `add_arguments` and `run`, one-line help); only the one that is called is imported.
BENCHES: dict[str, tuple[str, str]] = {
    "adaptation": (
        "gradwire.bench.adaptation",
        "how AQGB's bits follow the network in a run of `gradwire train`: Fig. 9",
    ),
    "aqgb-accuracy": (
        "gradwire.bench.aqgb_accuracy",
        "what fixed and adaptive bits cost in accuracy on a shaped link: AQGB's table 2",
    ),
    "codec": ("gradwire.bench.codec", "ratio and speed of codecs and their rivals on real gradients"),
    "allreduce": ("gradwire.bench.allreduce", "time and bytes of every scheme's all-reduce beside the backend's own"),
    "train": ("gradwire.bench.train", "iteration time, bytes and loss of a workload under schemes and PyTorch's hooks"),
    "fidelity": (
        "gradwire.bench.fidelity",
        "how far compression moves the loss, and what it sends: GComp's figures 9, 13a, 18-20",
    ),
    "acp-figures": (
        "gradwire.bench.acp_figures",
        "the ACP-SGD paper's tables and figures about time and volume, from training on shaped links",
    ),
    "compression-cost": (
        "gradwire.bench.compression_cost",
        "time to compress a step's gradient, without a network, beside PyTorch's powerSGD_hook",
    ),
    "convergence": (
        "gradwire.bench.convergence",
        "where training ends under each scheme, over several seeds: ACP-SGD's figures 6 and 7",
    ),
    "simulator": (
        "gradwire.bench.simulator",
        "predicted against measured iteration times in the test network; --measure makes the simulator's table",
    ),
    "sweep": ("gradwire.bench.sweep", "all of it by one table, resumable; --quick is what `make bench` runs"),
    "dump-gradients": ("gradwire.bench.dump_gradients", "gradient files for the others, from a short training"),
    "sketch": ("gradwire.bench.sketch", "count sketches against the bound (Fig. 2), recovery (Fig. 3), codec speed"),
    "tfp-figures": (
        "gradwire.bench.tfp_figures",
        "truncated and embedded floats beside QSGD and 1 bit, on gradients and in training: AQGB's Fig. 2",
    ),
    "slimgc-accuracy": (
        "gradwire.bench.slimgc_accuracy",
        "what SlimGC's strategies give back of the accuracy that few bits cost: figures 9 to 11",
    ),
    "slimgc-speed": ("gradwire.bench.slimgc_speed", "SlimGC's throughput and time split: figures 12, 13 and table 3"),
    "gcomp-figures": ("gradwire.bench.gcomp_figures", "the GComp paper's figures 2, 3, 12, 13 and 14, from gradients"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The benchmark's name, and everything after it, which its own parser reads in `run`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "benchmarks:\n" + "\n".join(f"  {name:17} {summary}" for name, (_, summary) in BENCHES.items())
    parser.add_argument("bench", choices=list(BENCHES), metavar="BENCH", help="one of the benchmarks below")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its options; `BENCH --help` lists them")


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark; returns its exit status."""
    module_path, summary = BENCHES[args.bench]
    module = importlib.import_module(module_path)
    parser = argparse.ArgumentParser(prog=f"gradwire bench {args.bench}", description=summary)
    module.add_arguments(parser)
    parser.add_argument("--wide", action=Wide, nargs=0, help=WIDE_HELP)
    parsed = parser.parse_args(args.rest)
    parsed.arguments = args.rest  # what a benchmark that starts ranks hands on to them
    return int(module.run(parsed))
