"""gradwire bench slimgc-speed: SlimGC's Fig. 12 (throughput), Fig. 13 (where a step's time goes) and Table 3 (rivals).

Every row is one `gradwire bench train` over all of these schemes, so that they are compared side by side; rows that are
finished are not measured again.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.bench.console import make_console
from gradwire.bench.records import write_json, write_text
from gradwire.bench.sweep import Sweep
from gradwire.bench.sweep_table import Row
from gradwire.errors import InvalidArgument

# Fig. 12 and 13: a bare quantiser, then one strategy after the other.
_STRATEGIES = ("threshold_bytes=0", "", "backup=true,threshold_bytes=0", "backup=true")
_QUANTISERS = {"1 bit": "one-bit", "2 bit": "two-bit"}
# Table 3, in its own settings.
_RIVALS = ("terngrad", "top-k:share=0.1", "dgc:share=0.1", "thc")
_WORKLOADS = ("resnet50", "gpt2", "bert-base", "vgg16")
_RATES = ("100mbit", "1gbit", "none")
# The table takes 10 steps, two more wait; then everything is warm.
_WARMUP = 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `gradwire bench slimgc-speed`."""
    parser.add_argument("--workload", nargs="+", default=list(_WORKLOADS), metavar="NAME",
                        help=f"shapes ({' '.join(_WORKLOADS)})")  # fmt: skip
    parser.add_argument("--rate", nargs="+", default=list(_RATES), metavar="RATE", help=f"links ({' '.join(_RATES)})")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="ranks on this machine (4)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps that count (20)")
    parser.add_argument("--compute", choices=("real", "emulate"), default="emulate",
                        help="emulate (default): computation as waits, for ranks that share cores")  # fmt: skip
    parser.add_argument("--bits", nargs="+", choices=tuple(_QUANTISERS), default=list(_QUANTISERS), metavar="BITS")
    parser.add_argument("--no-rivals", action="store_true", help="without Table 3's methods")
    parser.add_argument("--out", type=Path, default=Path("runs/slimgc-speed"), metavar="DIR")
    parser.add_argument("--report", action="store_true", help="measure nothing: report on what is finished")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary here too")


def specs(bits: Sequence[str], has_rivals: bool) -> list[str]:
    """The contenders of one row."""
    chosen = ["ddp", "plain"]
    for name in bits:
        codec = _QUANTISERS[name]
        chosen.append(codec)
        chosen += [f"slimgc:codec={codec}" + (f",{options}" if options else "") for options in _STRATEGIES]
    return chosen + (list(_RIVALS) if has_rivals else [])


def run(args: argparse.Namespace) -> int:
    """Measure what is missing, then print Fig. 12, Fig. 13 and Table 3."""
    if args.ranks < 2 or args.steps < 5:
        raise InvalidArgument("--ranks counts from 2 (one rank communicates nothing) and --steps from 5")
    contenders = specs(args.bits, not args.no_rivals)
    rows = [
        Row(
            f"{workload}-{rate}",
            "train",
            ("--workload", workload, "--rate", rate, "--ranks", str(args.ranks), "--steps", str(args.steps),
             "--warmup", str(_WARMUP), "--compute", args.compute, "--scheme", *contenders),
            600,
        )
        for workload in args.workload
        for rate in args.rate
    ]  # fmt: skip
    console = make_console()
    sweep = Sweep(args.out.resolve(), lambda text: console.print(text, highlight=False, markup=False))
    status = 0 if args.report else sweep.run(rows)
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
    """
    summary: list[dict[str, Any]] = []
    for row in dict.fromkeys(record["row"] for record in records):
        mine = [record for record in records if record["row"] == row]
        by_name = {_name(record): record for record in mine}
        for name, record in by_name.items():
            codec = next((c for c in _QUANTISERS.values() if name == c or name.startswith(f"slimgc codec={c}")), None)
            bare = by_name.get(codec) if codec is not None else None
            codec_s = record["codec_s"] or 0.0
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
                "compute_s": record["compute_s"],
                "codec_s": codec_s,
                "wire_s": wire_s,
                "exposed_s": record["exposed_s"],
                "hidden_s": max(0.0, record["compute_s"] + codec_s + wire_s - record["iteration_s"]),
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
    options = str(record.get("options") or "").replace(",", " ")
    return f"{record['scheme']} {options}".strip()


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
            "| scheme | ms a step | samples/s | C | K | X | exposed | hidden | x bare | bound | share of bound |"
        )
        lines.append("|" + "---|" * 11)
        for r in mine:
            cells = [r["scheme"], f"{1e3 * r['iteration_s']:.1f}", f"{r['samples_per_s']:.1f}"]
            cells += [f"{1e3 * r[part]:.1f}" for part in ("compute_s", "codec_s", "wire_s", "exposed_s", "hidden_s")]
            if r["speed_up"] is None:
                cells += ["-", "-", "-"]
            else:
                share = r["speed_up"] / r["attainable"] if r["attainable"] else float("nan")
                cells += [f"{r['speed_up']:.2f}", f"{r['bound']:.2f} ({r['attainable']:.2f} left)", f"{share:.0%}"]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)
