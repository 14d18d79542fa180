"""gradwire bench sketch: count sketches against the bound (Fig. 2), their recovery (Fig. 3), and the codec's speed."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from gradwire.bench.figures import sketch_numbers
from gradwire.bench.figures.numbers import Records
from gradwire.bench.gcomp_figures import make_table
from gradwire.bench.sources import PATTERNS
from gradwire.core.threads import set_thread_count
from gradwire.errors import GradwireError, InvalidArgument, Unsupported
from gradwire.results.console import make_console
from gradwire.results.records import write_json
from gradwire.telemetry.environment import describe_environment

SECTIONS = ("sizes", "recovery", "speed")
_SPEED_DENSITIES = (0.01, 0.05, 0.1)
_SPEED_SIZES = (1 << 18, 1 << 20, 1 << 22)
# A bucket of 25 MB is 6.3 million values; recovery rates no longer change from 2^20 on.
_DEFAULT_ELEMENTS = 1 << 22


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gradwire bench sketch`."""
    parser.add_argument(
        "--section", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="what to do (default: all)"
    )
    parser.add_argument("--n-elements", type=int, default=_DEFAULT_ELEMENTS, metavar="N", help="values (%(default)s)")
    parser.add_argument("--density", nargs="+", type=float, metavar="D", help="shares of non-zeros, of sizes and speed")
    parser.add_argument(
        "--pattern", choices=list(PATTERNS), default="element", help="how non-zeros cluster: singly, in 32s, in 1,024s"
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of the codec (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="samples of a timing (default: %(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of plots and numbers (runs/sketch-*)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here too")


def run(args: argparse.Namespace) -> int:
    """Compute the numbers, draw the plots, print the tables."""
    densities = args.density or None
    if not 1024 <= args.n_elements <= 1 << 30 or args.rounds < 1:
        raise InvalidArgument("--n-elements is from 1,024 to 2^30, --rounds from 1")
    if densities and not all(0 < density < 1 for density in densities):
        raise InvalidArgument("--density is above 0 and below 1")
    try:
        from gradwire.bench.figures import sketch_plots
    except ImportError as error:
        raise Unsupported(f"the figures need matplotlib ({error}); pip install 'gradwire[report]'") from error
    set_thread_count(args.threads)
    folder: Path = args.out or Path("runs") / time.strftime("sketch-%Y%m%d-%H%M%S")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GradwireError(f"could not make {folder}: {error.strerror or error}") from error
    results = measure(args)
    if "sizes" in args.section:
        sketch_plots.plot_sizes(results["size_formulas"], results["built_sizes"], folder)
    if "recovery" in args.section:
        sketch_plots.plot_recovery(results["recovery"], folder)
    if "speed" in args.section:
        sketch_plots.plot_speed(results["speed"], folder)
    console = make_console()
    for name, records in results.items():
        if name == "size_formulas":  # 168 rows are for the plot; the densities of the paper's models for the reader
            records = [one for one in records if _is_shown(one["density"])]
        console.print(make_table(name, records))
    environment = describe_environment()
    flat = [{"figure": name, **record, **environment} for name, records in results.items() for record in records]
    write_json(folder / "sketch.json", flat)
    if args.json:
        write_json(args.json, flat)
    console.print(f"plots and numbers: {folder}")
    return 0


def measure(args: argparse.Namespace) -> dict[str, Records]:
    """The numbers of the chosen sections, by name."""
    n, pattern = args.n_elements, args.pattern
    sizes = [size for size in _SPEED_SIZES if size < n] + [n]
    parts: dict[str, tuple[str, Callable[[], Records]]] = {
        "size_formulas": ("sizes", sketch_numbers.size_formulas),
        "built_sizes": (
            "sizes",
            lambda: sketch_numbers.built_sizes(n, args.density or sketch_numbers.BUILT_DENSITIES, pattern),
        ),
        "recovery": (
            "recovery",
            lambda: sketch_numbers.recovery_over_size(
                min(n, 1 << 20), sketch_numbers.VGG19_DENSITY, sketch_numbers.default_recovery_sizes(), pattern
            ),
        ),
        "speed": (
            "speed",
            lambda: sketch_numbers.codec_speed(sizes, args.density or _SPEED_DENSITIES, pattern, args.rounds),
        ),
    }
    return {name: function() for name, (section, function) in parts.items() if section in args.section}


def _is_shown(density: float) -> bool:
    return any(abs(density / shown - 1) < 0.01 for shown in (1e-4, 1e-3, 1e-2, 0.0501, 0.1, 0.794))
