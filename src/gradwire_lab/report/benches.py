"""The part of a report on benchmarks: codecs, all-reduce, and training at several rates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gradwire_lab.report.drawing import (
    DASH,
    SURFACE,
    TIMES,
    Drawing,
    PageTable,
    Palette,
    add_end_labels,
    add_point_labels,
    new_axes,
    set_log_axis,
    to_svg,
)
from gradwire_lab.report.inputs import Record
from gradwire_lab.report.runs import Section, TimeSplit, draw_time_split, pick_baseline
from gradwire_lab.report.speed_up import base_value, by_rate, draw_speed_up
from gradwire_lab.results.captions import describe_data, describe_machine, describe_networks, format_rate, is_emulated

__all__ = ["make_bench_sections"]


def make_bench_sections(
    records: Mapping[str, Sequence[Record]], palette: Palette, baseline: str | None
) -> list[Section]:
    """Sections for the kinds of records that are there: training, all-reduce, codecs."""
    sections = []
    if records["train"]:
        sections += _make_train_sections(_merge_repeats(records["train"], "train"), palette, baseline)
    if records["allreduce"]:
        sections += _make_allreduce_sections(_merge_repeats(records["allreduce"], "allreduce"), palette, baseline)
    if records["codec"]:
        sections.append(_make_codec_section(_merge_repeats(records["codec"], "codec"), palette))
    return sections


_IDENTITY = {
    "codec": ("codec", "importance", "gradients", "threads"),
    "allreduce": ("scheme", "ranks", "rate_bps", "n_bytes", "gradients", "network"),
    "train": ("scheme", "workload", "ranks", "rate_bps", "network", "compute"),
}
_MEASURE = {"codec": "encode_gb_per_s", "allreduce": "time_s", "train": "iteration_s"}


def _merge_repeats(records: Sequence[Record], kind: str) -> list[Record]:
    """One record for each thing measured: of repeats the median one; its spread, if it has none, is their extremes."""
    groups: dict[tuple[str, ...], list[Record]] = defaultdict(list)
    for record in records:
        groups[tuple(repr(record.get(field)) for field in _IDENTITY[kind])].append(record)
    merged = []
    measure = _MEASURE[kind]
    for group in groups.values():
        group.sort(key=lambda record: record[measure])
        middle = dict(group[(len(group) - 1) // 2])
        if len(group) > 1:
            middle.setdefault(f"{measure}_low", group[0][measure])
            middle.setdefault(f"{measure}_high", group[-1][measure])
        merged.append(middle)
    return merged


# --- training ---------------------------------------------------------------------------------------------------------


def _make_train_sections(records: Sequence[Record], palette: Palette, wanted: str | None) -> list[Section]:
    sections = []
    for index, ((workload, ranks, emulated), group) in enumerate(
        _group(records, lambda record: (str(record["workload"]), record["ranks"], is_emulated(record)))
    ):
        network, machine = describe_networks(group), describe_machine(group[0])
        section = Section(f"train{index}", f"Iteration time of {workload}", f"{ranks} ranks. Network: {network}.")
        if emulated:
            section.intro += " Computation is emulated by calibrated waits; communication and codecs are real."
        base = pick_baseline(list(dict.fromkeys(record["scheme"] for record in group)), wanted)
        rates, data = by_rate(group), describe_data(group[0])
        if base:
            where, wide = f"{data}, {ranks} ranks; {network}; {machine}", len(rates) % 2 == 0
            name = f"train{index}-speedup"
            section.plots.append(draw_speed_up(name, group, "iteration_s", base, palette, where, wide))
        for rate_index, (rate_bps, at_rate) in enumerate(rates):
            splits = [_split(record) for record in sorted(at_rate, key=lambda record: -record["iteration_s"])]
            title = f"An iteration at {format_rate(rate_bps)}" if rate_bps else "An iteration, unshaped"
            caption = f"{data}, {ranks} ranks; {describe_networks(at_rate)}; {machine}. Median; whiskers: spread."
            section.plots.append(draw_time_split(f"train{index}-split{rate_index}", title, splits, caption, wide=False))
        section.tables.append(_make_train_table(group, base))
        sections.append(section)
    return sections


def _split(record: Record) -> TimeSplit:
    total_s = record["iteration_s"]
    compute_s = min(record.get("compute_s") or 0.0, total_s)
    exposed_s = min(record.get("exposed_s") or 0.0, total_s - compute_s)
    # A record that does not say how long it waited for others leaves the rest, whatever it was, under that name.
    rest_s = total_s - compute_s - exposed_s
    wait_s = rest_s if record.get("wait_s") is None else min(record["wait_s"], rest_s)
    parts = {"computation": compute_s, "exposed communication": exposed_s, "waiting for slower ranks": wait_s}
    # The codec works beside the backward pass, so it is no part of the sum.
    lane = {"codec": record["codec_s"]} if record.get("codec_s") else {}
    return TimeSplit(record["scheme"], total_s, parts, lane, _spread(record, "iteration_s"))


def _make_train_table(records: Sequence[Record], base: str | None) -> PageTable:
    columns = [
        ("scheme", False),
        ("rate", True),
        ("iteration, ms", True),
        ("speed-up", True),
        ("computation, ms", True),
    ]
    columns += [("codec, ms", True), ("exposed, ms", True), ("on the wire", True), ("loss", True)]
    rows = []
    for rate_bps, group in by_rate(records):
        base_s = base_value(group, "iteration_s", base)
        for record in sorted(group, key=lambda record: record["iteration_s"]):
            row = [record["scheme"], format_rate(rate_bps), _with_spread(record, "iteration_s", 1e3)]
            row += [f"{base_s / record['iteration_s']:.2f}{TIMES}" if base_s else DASH]
            row += [_number(record.get(name), 1e3) for name in ("compute_s", "codec_s", "exposed_s")]
            row += [format_bytes(record.get("wire_bytes")), _number(record.get("loss"), 1, ".5g")]
            rows.append(row)
    caption = "Median (spread) of the iterations." + (f" Speed-up against {base} at the same rate." if base else "")
    return PageTable("Training in numbers", columns, rows, caption)


# --- all-reduce -------------------------------------------------------------------------------------------------------


def _make_allreduce_sections(records: Sequence[Record], palette: Palette, wanted: str | None) -> list[Section]:
    sections = []
    panels = _group(records, lambda record: (record["ranks"], str(record.get("gradients") or "gradient not recorded")))
    for index, ((ranks, gradients), group) in enumerate(panels):
        network, machine = describe_networks(group), describe_machine(group[0])
        section = Section(f"allreduce{index}", f"All-reduce over {ranks} ranks", f"{gradients}. Network: {network}.")
        base = pick_baseline(list(dict.fromkeys(record["scheme"] for record in group)), wanted)
        sizes = {record["n_bytes"] for record in group}
        # The size that most schemes and rates share, the largest of these.
        size = max(sizes, key=lambda size: (sum(record["n_bytes"] == size for record in group), size))
        by_size = [
            (rate, at_rate) for rate, at_rate in by_rate(group) if len({record["n_bytes"] for record in at_rate}) > 1
        ]
        if base:
            name = f"allreduce{index}-speedup"
            where = f"{format_bytes(size)} of {gradients}, {ranks} ranks; {network}; {machine}"
            of_size = [record for record in group if record["n_bytes"] == size]
            wide = len(by_size) % 2 == 0
            section.plots.append(draw_speed_up(name, of_size, "time_s", base, palette, where, wide))
        for rate_index, (rate_bps, at_rate) in enumerate(by_size):
            name = f"allreduce{index}-sizes{rate_index}"
            section.plots.append(_draw_sizes(name, at_rate, rate_bps, ranks, palette))
        section.tables.append(_make_allreduce_table(group, base))
        sections.append(section)
    return sections


def _draw_sizes(name: str, records: Sequence[Record], rate_bps: float | None, ranks: int, palette: Palette) -> Drawing:
    lines = list(_group(records, lambda record: record["scheme"]))
    with new_axes(labels_at_right=[scheme for scheme, _ in lines]) as axes:
        ends = []
        for scheme, group in lines:
            points = sorted((record["n_bytes"], record["time_s"] * 1e3) for record in group)
            x, y = zip(*points, strict=True)
            axes.plot(x, y, color=palette.colour(scheme), ls=palette.dash(scheme), marker=palette.marker(scheme), ms=5)
            ends.append((x[-1], y[-1], scheme, palette.colour(scheme)))
        set_log_axis(axes.xaxis)
        set_log_axis(axes.yaxis)
        axes.xaxis.set_major_formatter(lambda value, _: format_bytes(value))
        axes.set_xlabel("size of the gradient")
        axes.set_ylabel("time, ms")
        add_end_labels(axes, ends)
        svg = to_svg(axes, name)
    title = f"Time against size at {format_rate(rate_bps)}" if rate_bps else "Time against size, unshaped"
    gradients = records[0].get("gradients") or "gradient not recorded"
    where = f"{gradients}, {ranks} ranks; {describe_networks(records)}; {describe_machine(records[0])}"
    return Drawing(name, title, f"{where}. Median; both axes log.", svg)


def _make_allreduce_table(records: Sequence[Record], base: str | None) -> PageTable:
    columns = [("scheme", False), ("rate", True), ("size", True), ("time, ms", True), ("speed-up", True)]
    columns += [("on the wire", True), ("wire bytes / size", True)]
    rows = []
    for rate_bps, at_rate in by_rate(records):
        for n_bytes, group in sorted(_group(at_rate, lambda record: record["n_bytes"])):
            base_s = base_value(group, "time_s", base)
            for record in sorted(group, key=lambda record: record["time_s"]):
                wire_bytes = record.get("wire_bytes")
                row = [record["scheme"], format_rate(rate_bps), format_bytes(n_bytes)]
                row += [
                    _with_spread(record, "time_s", 1e3),
                    f"{base_s / record['time_s']:.2f}{TIMES}" if base_s else DASH,
                ]
                row += [format_bytes(wire_bytes), DASH if wire_bytes is None else f"{wire_bytes / n_bytes:.3f}"]
                rows.append(row)
    caption = "Median (spread)." + (f" Speed-up against {base} at the same rate and size." if base else "")
    return PageTable("All-reduce in numbers", columns, rows, caption)


# --- codecs -----------------------------------------------------------------------------------------------------------


def _make_codec_section(records: Sequence[Record], palette: Palette) -> Section:
    section = Section("codec", "Codecs", "What is left of a gradient, and how fast it gets there and back.")
    panels = list(_group(records, lambda record: (str(record["gradients"]), record["threads"])))
    for index, ((gradients, threads), group) in enumerate(panels):
        section.plots.append(_draw_codecs(f"codec-{index}", group, gradients, threads, palette))
    columns = [("codec", False), ("gradients", False), ("threads", True), ("ratio", True), ("exponent, bits", True)]
    columns += [("encode, GB/s", True), ("decode, GB/s", True)]
    rows = []
    for record in sorted(records, key=lambda r: (str(r["gradients"]), r["threads"], r["ratio"])):
        row = [codec_label(record), str(record["gradients"]), str(record["threads"]), f"{record['ratio']:.4f}"]
        row += [_number(record.get("exponent_bits"), 1, ".3f")]
        row += [_with_spread(record, f"{way}_gb_per_s", 1, ".2f") for way in ("encode", "decode")]
        rows.append(row)
    caption = "Ratio: encoded / original size. GB/s of original bytes, median (spread); every round trip verified."
    section.tables.append(PageTable("Codecs in numbers", columns, rows, caption))
    return section


def codec_label(record: Record) -> str:
    """A codec's name, with its mode where it has one."""
    return f"{record['codec']} {record.get('importance') or ''}".strip()


def _draw_codecs(name: str, records: Sequence[Record], gradients: str, threads: int, palette: Palette) -> Drawing:
    with new_axes(height_in=3.9) as axes:
        labels, others = [], []
        for record in records:
            colour, marker = palette.colour(codec_label(record)), palette.marker(codec_label(record))
            ratio, encode, decode = 100 * record["ratio"], record["encode_gb_per_s"], record["decode_gb_per_s"]
            axes.plot([ratio, ratio], [encode, decode], color=colour, lw=1.2, alpha=0.55)
            axes.plot(ratio, decode, marker, mfc=SURFACE, mec=colour, ms=6.5, mew=1.5)
            axes.plot(ratio, encode, marker, color=colour, ms=7)
            labels.append((ratio, encode, codec_label(record), colour))
            # The line between the two, thickly enough that no label lies across it.
            others += [(ratio, encode * (decode / encode) ** (i / 8)) for i in range(1, 9)]
        axes.margins(y=0.12)
        axes.set_yscale("log")
        axes.autoscale_view()
        set_log_axis(axes.yaxis)
        axes.grid(axis="x", visible=True)
        axes.set_xlim(*_padded([100 * record["ratio"] for record in records]))
        axes.set_xlabel("encoded size, % of the original (less is better)")
        axes.set_ylabel("GB/s of original bytes, one way")
        add_point_labels(axes, labels, others)
        svg = to_svg(axes, name)
    many = f"{threads} thread" + ("s" if threads > 1 else "")
    caption = f"{gradients}, {many}; {describe_machine(records[0])}. Filled: encode, hollow: decode; log axis."
    caption += " Upper left is best."
    return Drawing(name, f"Ratio against throughput: {gradients}, {many}", caption, svg)


# --- shared -----------------------------------------------------------------------------------------------------------


def _group(records: Iterable[Record], key: Callable[[Record], Any]) -> list[tuple[Any, list[Record]]]:
    groups: dict[Any, list[Record]] = defaultdict(list)
    for record in records:
        groups[key(record)].append(record)
    return list(groups.items())


def _spread(record: Record, measure: str) -> tuple[float, float] | None:
    # `train --json` names its spread after the tenth and ninetieth of a hundred.
    low = record.get(f"{measure}_low", record.get(f"{measure}_p10"))
    high = record.get(f"{measure}_high", record.get(f"{measure}_p90"))
    return None if low is None or high is None else (low, high)


def _with_spread(record: Record, measure: str, scale: float, form: str = ",.1f") -> str:
    text = _number(record[measure], scale, form)
    spread = _spread(record, measure)
    return text if spread is None else f"{text} ({spread[0] * scale:{form}}{DASH}{spread[1] * scale:{form}})"


def _number(value: Any, scale: float, form: str = ",.1f") -> str:
    return DASH if value is None else f"{value * scale:{form}}"


def format_bytes(n_bytes: float | None) -> str:
    """`25 MB`, decimal units; an en dash for None."""
    if n_bytes is None:
        return DASH
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n_bytes >= unit:
            return f"{n_bytes / unit:.3g} {name}"
    return f"{n_bytes:.0f} B"


def _padded(values: Sequence[float]) -> tuple[float, float]:
    """Limits of an axis of percentages: from zero if the values reach down there, else around them."""
    low, high = min(values), max(values)
    room = max(0.12 * (high - low), 3.0)
    return (0.0 if low < 0.5 * high else low - room), high + room
