"""gradwire bench slimgc-speed: SlimGC's Fig. 12 (throughput), Fig. 13 (where a step's time goes) and Table 3 (rivals).

Every row is one `gradwire bench train` over all of these schemes, so that they are compared side by side; rows that are
finished are not measured again.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.bench.sweep import Sweep
from gradwire.bench.sweep_table import Row
from gradwire.errors import InvalidArgument
from gradwire.ranks.netlab import parse_rate
from gradwire.registry import parse_spec
from gradwire.results.console import make_console
from gradwire.results.records import write_json, write_text

# Fig. 12 and 13: a bare quantiser, then one strategy after the other.
_STRATEGIES = ("threshold_bytes=0", "", "backup=true,threshold_bytes=0", "backup=true")
_QUANTISERS = {"1 bit": "one-bit", "2 bit": "two-bit"}
# Table 3, in its own settings.
_RIVALS = ("terngrad", "top-k:share=0.1", "dgc:share=0.1", "thc")
_WORKLOADS = ("resnet50", "gpt2", "bert-base", "vgg16")
_RATES = ("100mbit", "1gbit", "none")
# Steps in which the table is measured; half of them are raw, which at 100 Mb/s is a minute each.
_TABLE_STEPS = 4
# Steps before those that count, of contenders that measure nothing: one with DDP's single bucket, one with its own.
_WARMUP = 2
_EVERYTHING = "backup=true"

# What the estimates are made of: millions of values, and bytes sent in the end over those of a ring of the gradient.
_MEGAVALUES = {"resnet50": 25.6, "gpt2": 124.4, "bert-base": 109.5, "vgg16": 138.4, "gpt": 1.2, "resnet": 1.2,
               "resnet152": 60.2, "vgg19": 143.7, "bert-large": 335.1}  # fmt: skip
_RATIOS = {"ddp": 1.0, "terngrad": 0.125, "top-k": 0.4, "dgc": 0.4, "thc": 0.25, "slimgc": 0.1, "one-bit": 0.04,
           "two-bit": 0.07, "ddp-one-bit": 0.04, "ddp-two-bit": 0.07}  # fmt: skip
# Seconds that four ranks on two cores work for each million values of a step, and to start (the model, the ranks).
_WORK_S_PER_MEGAVALUE, _START_S = 0.025, 25.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gradwire bench slimgc-speed`."""
    parser.add_argument("--workload", nargs="+", default=list(_WORKLOADS), metavar="NAME",
                        help=f"shapes ({' '.join(_WORKLOADS)})")  # fmt: skip
    parser.add_argument("--rate", nargs="+", default=list(_RATES), metavar="RATE", help=f"links ({' '.join(_RATES)})")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="ranks on this machine (4)")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="steps that count (5)")
    parser.add_argument("--table-steps", type=int, default=_TABLE_STEPS, metavar="N",
                        help=f"steps before them in which SlimGC measures its table ({_TABLE_STEPS}, its least)")  # fmt: skip
    parser.add_argument("--compute", choices=("real", "emulate"), default="emulate",
                        help="emulate (default): computation as waits, for ranks that share cores")  # fmt: skip
    parser.add_argument("--bits", nargs="+", choices=tuple(_QUANTISERS), default=list(_QUANTISERS), metavar="BITS")
    parser.add_argument("--no-rivals", action="store_true", help="without Table 3's methods")
    parser.add_argument("--no-plain", action="store_true",
                        help="without DDP in float32, which takes minutes a step on slow links")  # fmt: skip
    parser.add_argument("--no-table", action="store_true",
                        help="without the forms of SlimGC that measure their threshold in raw steps")  # fmt: skip
    parser.add_argument("--only", nargs="+", default=[], metavar="KEY", help="rows whose keys begin with one of these")
    parser.add_argument("--list", action="store_true", help="print the rows and about how long they take, and stop")
    parser.add_argument("--fresh", action="store_true", help="measure again what is finished")
    parser.add_argument("--out", type=Path, default=Path("runs/slimgc-speed"), metavar="DIR",
                        help="folder of the results; a row that is finished there is not measured again")  # fmt: skip
    parser.add_argument("--report", action="store_true", help="measure nothing: report on what is finished")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary here too")


def specs(
    bits: Sequence[str],
    has_rivals: bool,
    table_steps: int = _TABLE_STEPS,
    has_plain: bool = True,
    has_table: bool = True,
) -> list[str]:
    """The contenders of one row."""
    chosen = ["ddp"] if has_plain else []
    for name in bits:
        codec = _QUANTISERS[name]
        chosen += [f"ddp-{codec}", codec]
        for options in _STRATEGIES:
            measures = "" if "threshold_bytes" in options else f"warmup_steps={table_steps}"
            if measures and not has_table:
                continue
            chosen.append(",".join(filter(None, (f"slimgc:codec={codec}", options, measures))))
    return chosen + (list(_RIVALS) if has_rivals else [])


def make_rows(args: argparse.Namespace) -> list[Row]:
    """One row for every workload and rate, those of `--only`. Raises: InvalidArgument."""
    contenders = specs(args.bits, not args.no_rivals, args.table_steps, not args.no_plain, not args.no_table)
    rows = [
        Row(
            f"{workload.replace(':', '-')}-{rate}",
            "train",
            ("--workload", workload, "--rate", rate, "--ranks", str(args.ranks), "--steps", str(args.steps),
             "--warmup", str(_WARMUP), "--compute", args.compute, "--overlap", "--scheme", *contenders),
            estimate_s(workload, rate, args, contenders),
        )
        for workload in args.workload
        for rate in args.rate
    ]  # fmt: skip
    chosen = [row for row in rows if not args.only or row.key.startswith(tuple(args.only))]
    if not chosen:
        raise InvalidArgument(f"no row's key begins with {' or '.join(args.only)}; --list shows the keys")
    return chosen


def estimate_s(workload: str, rate: str, args: argparse.Namespace, contenders: Sequence[str]) -> float:
    """About how long a row takes: what its contenders send at this rate, and what two cores do for four ranks."""
    megavalues = _MEGAVALUES.get(parse_spec(workload)[0], 30.0)
    rates = [parse_rate(word) for word in rate.split(",")]
    slowest = min((one for one in rates if one is not None), default=None)
    raw_s = 0.0 if slowest is None else 2 * (args.ranks - 1) / args.ranks * 32e6 * megavalues / slowest
    work_s = _WORK_S_PER_MEGAVALUE * megavalues * args.ranks / 4 + 0.1
    total_s = _START_S
    for spec in contenders:
        name, options = parse_spec(spec)
        measured = int(options.get("warmup_steps", 0))
        n_steps = args.steps + (measured + 4 if measured else _WARMUP)
        total_s += n_steps * (work_s + _RATIOS.get(name, 1.0) * raw_s) + measured / 2 * raw_s
    return total_s


def run(args: argparse.Namespace) -> int:
    """Measure what is missing, then print Fig. 12, Fig. 13 and Table 3."""
    if args.ranks < 2 or args.steps < 3:
        raise InvalidArgument("--ranks counts from 2 (one rank communicates nothing) and --steps from 3")
    if args.table_steps < _TABLE_STEPS:
        raise InvalidArgument(f"--table-steps counts from {_TABLE_STEPS}")
    rows = make_rows(args)
    console = make_console()
    if args.list:
        for row in rows:
            print(f"{row.key:20} about {row.estimate_s / 60:.0f} min: gradwire bench train {' '.join(row.arguments)}")
        print(f"{len(rows)} rows, about {sum(row.estimate_s for row in rows) / 60:.0f} min")
        return 0
    sweep = Sweep(args.out.resolve(), lambda text: console.print(text, highlight=False, markup=False))
    status = 0 if args.report else sweep.run(rows, fresh=args.fresh)
    keys = {row.key for row in rows}
    summary = summarize([record for record in sweep.records() if record["row"] in keys])
    write_json(args.out / "slimgc-speed.json", summary)
    if args.json:
        write_json(args.json, summary)
    markdown = to_markdown(summary)
    write_text(args.out / "slimgc-speed.md", markdown)
    console.print(markdown, markup=False, highlight=False, soft_wrap=True)
    return status


def summarize(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One record for every scheme and row, beside the bare quantiser of the same bits.

    C is the computation, K the codec's busy time, X the time that the bytes sent take at the links' rate (unshaped: what
    is left of the bare quantiser's iteration). `bound` is (C+K+X) / max(C+K, X) of the bare quantiser: what overlap can
    gain at most over no overlap; `attainable` is its iteration over max(C+K, X): what is left to gain over what its
    own overlap has gained already. `hidden_s` is C+K+X - iteration: what runs beside something else.

    `overlap_s` and `exposed_codec_s` come from recorded intervals (`bench.overlap`); `overlap_x` and `exposed_codec_x`
    set them against the bare quantiser with its codec on the training thread.
    """
    summary: list[dict[str, Any]] = []
    for row in dict.fromkeys(record["row"] for record in records):
        mine = [record for record in records if record["row"] == row]
        by_name = {_name(record): record for record in mine}
        for name, record in by_name.items():
            codec = _codec_of(name)
            bare = by_name.get(codec) if codec is not None else None
            on_thread = by_name.get(f"ddp-{codec}")
            codec_s = record["codec_s"] or 0.0
            # Its codec works between its gradients, so its own figure for the computation holds some of it.
            alone = by_name.get("ddp", bare or record)
            compute_s = (alone if record is on_thread else record)["compute_s"]
            wire_s = _wire_s(record, bare)
            entry: dict[str, Any] = {
                "row": row,
                "workload": record["workload"],
                "rate_bps": record["rate_bps"],
                "ranks": record["ranks"],
                "compute": record["compute"],
                "scheme": name,
                "iteration_s": record["iteration_s"],
                "samples_per_s": record["samples_per_s"],
                "compute_s": compute_s,
                "codec_s": codec_s,
                "wire_s": wire_s,
                "exposed_s": record["exposed_s"],
                "hidden_s": max(0.0, compute_s + codec_s + wire_s - record["iteration_s"]),
                "overlap_s": record.get("overlap_s"),
                "exposed_codec_s": record.get("exposed_codec_s"),
                "overlap_x": _ratio(record, on_thread, "overlap_s"),
                "exposed_codec_x": _ratio(record, on_thread, "exposed_codec_s"),
                "n_warmup": record.get("n_warmup"),
                "n_steps": record.get("n_steps"),
                "wire_ratio": record["wire_ratio"],
                "speed_up": None if bare is None else bare["iteration_s"] / record["iteration_s"],
                "bound": None,
                "attainable": None,
            }
            if bare is not None:
                computed_s, bare_wire_s = bare["compute_s"] + (bare["codec_s"] or 0.0), _wire_s(bare, bare)
                longest_s = max(computed_s, bare_wire_s)
                entry["bound"] = (computed_s + bare_wire_s) / longest_s
                entry["attainable"] = bare["iteration_s"] / longest_s
            summary.append(entry)
    return summary


def _name(record: Mapping[str, Any]) -> str:
    options = str(record.get("options") or "").split(",")
    return " ".join([record["scheme"], *(word for word in options if word and not word.startswith("warmup_steps="))])


def _codec_of(name: str) -> str | None:
    """The quantiser that a contender is a form of."""
    words = name.split()
    return next((c for c in _QUANTISERS.values() if words[0] in (c, f"ddp-{c}") or f"codec={c}" in words), None)


def _ratio(record: Mapping[str, Any], other: Mapping[str, Any] | None, field: str) -> float | None:
    mine, theirs = record.get(field), None if other is None else other.get(field)
    return mine / theirs if mine is not None and theirs else None


def _wire_s(record: Mapping[str, Any], bare: Mapping[str, Any] | None) -> float:
    if record["rate_bps"]:
        return 8.0 * float(record["wire_bytes"]) / float(record["rate_bps"])
    source = bare or record
    left_s = source["iteration_s"] - source["compute_s"] - (source["codec_s"] or 0.0)
    return max(0.0, float(left_s)) * float(record["wire_bytes"]) / max(1.0, float(source["wire_bytes"]))


def to_markdown(summary: Sequence[Mapping[str, Any]]) -> str:
    """A table a row: ms a step; speed-up over the bare quantiser, and what share of the bound it is."""
    lines: list[str] = []
    for row in dict.fromkeys(record["row"] for record in summary):
        mine = [record for record in summary if record["row"] == row]
        first = mine[0]
        lines += [
            f"### {first['workload']}, {row.rpartition('-')[2]}, {first['ranks']} ranks, computation {first['compute']}",
            "",
        ]
        lines.append(
            "| scheme | ms a step | samples/s | C | K | X | exposed | hidden | overlap (x on thread) | exposed codec "
            "(x on thread) | x bare | bound | share of bound |"
        )
        lines.append("|" + "---|" * 13)
        for r in mine:
            cells = [r["scheme"], f"{1e3 * r['iteration_s']:.1f}", f"{r['samples_per_s']:.1f}"]
            cells += [f"{1e3 * r[part]:.1f}" for part in ("compute_s", "codec_s", "wire_s", "exposed_s", "hidden_s")]
            for part in ("overlap", "exposed_codec"):
                ms, ratio = r.get(f"{part}_s"), r.get(f"{part}_x")
                cells.append("-" if ms is None else f"{1e3 * ms:.1f}" + ("" if ratio is None else f" ({ratio:.2f})"))
            if r["speed_up"] is None:
                cells += ["-", "-", "-"]
            else:
                share = r["speed_up"] / r["attainable"] if r["attainable"] else float("nan")
                cells += [f"{r['speed_up']:.2f}", f"{r['bound']:.2f} ({r['attainable']:.2f} left)", f"{share:.0%}"]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
        lines += _goals(mine)
    return "\n".join(lines)


def _goals(row: Sequence[Mapping[str, Any]]) -> list[str]:
    """Fig. 13's two ratios of SlimGC with everything, one line a quantiser."""
    lines = []
    for bits, codec in _QUANTISERS.items():
        found = next((r for r in row if r["scheme"] == f"slimgc codec={codec} {_EVERYTHING}"), None)
        if found is None or found.get("overlap_x") is None or found.get("exposed_codec_x") is None:
            continue
        lines.append(
            f"{bits}, SlimGC with everything against the quantiser on the training thread: overlap "
            f"{found['overlap_x']:.2f}x (goal 3.5), exposed codec {found['exposed_codec_x']:.2f}x (goal 0.4)"
        )
    return [*lines, ""] if lines else []
