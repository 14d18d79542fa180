"""The blocks of a report: runs, training at several rates, all-reduce and codecs, in the tables and figures of the pages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradwire.schemes.slimgc.threshold import NEVER
from gradwire_lab.report.inputs import Column as Values
from gradwire_lab.report.inputs import LoggedRun, Record
from gradwire_lab.results.captions import describe_data, describe_machine, describe_networks, format_rate, is_emulated
from gradwire_lab.results.experiment import Column, Experiment, Plot, Table
from gradwire_lab.results.grids import make_grid
from gradwire_lab.results.palette import assign_slots
from gradwire_lab.results.plots import TIMES, Series, Slots, draw, format_power, series_of
from gradwire_lab.results.summary import Summary, Value
from gradwire_lab.results.tables import Grid

# Whom the others are compared with, if it is there: what one would run without gradwire, else its own plain all-reduce.
_BASELINES = ("ddp", "plain", "gloo", "nccl", "allreduce", "none")
# One column of the page, and both with the gap between them: type has one size all over the page.
_NARROW_IN, _WIDE_IN = (5.7, 3.4), (11.8, 3.6)


@dataclass(frozen=True)
class Figure:
    """One figure of the page. `name` is unique; title and caption say in words what it shows."""

    name: str
    title: str
    caption: str
    svg: str
    wide: bool = False


@dataclass(frozen=True)
class Tile:
    """What one scheme comes to, in large type: (value, what it means) a figure."""

    label: str
    values: Sequence[tuple[str, str]]
    slot: str


@dataclass
class Section:
    """One block of the page."""

    anchor: str
    title: str
    intro: str
    tiles: list[Tile] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    tables: list[Grid] = field(default_factory=list)

    def show(self, name: str, title: str, caption: str, plot: Plot, series: Series, slots: Slots, *, wide: bool = False,
             behind: Mapping[str, Any] | None = None) -> None:  # fmt: skip
        """Add the figure of `series`, if there is anything to draw."""
        if any(series.values()):
            full = f"{self.anchor}-{name}"
            height = 0.9 + 0.5 * len({x for points in series.values() for x, _ in points})
            size = _WIDE_IN if wide else _NARROW_IN
            size = (size[0], height) if plot.style == "stacks" else size
            svg = draw(plot, series, full, {name: slots.get(name, ("c0", 0)) for name in series}, size, behind)
            self.figures.append(Figure(full, title, caption, svg, wide))


def make_sections(
    runs: Sequence[LoggedRun], records: Mapping[str, Sequence[Record]], baseline: str | None
) -> list[Section]:
    """Runs first, a section for each workload and number of ranks, then the kinds of records that are there."""
    schemes = {run.label for run in runs} | {str(r["scheme"]) for kind in ("train", "allreduce") for r in records[kind]}
    slots = assign_slots(schemes)
    groups = _group(runs, lambda run: (run.workload, run.ranks))
    sections = [_of_runs(f"run{index}", group, slots, baseline) for index, (_, group) in enumerate(groups)]
    trained = _group(records["train"], lambda r: (str(r["workload"]), r["ranks"], is_emulated(r)))
    sections += [_of_training(f"train{index}", *one, slots, baseline) for index, one in enumerate(trained)]
    reduced = _group(records["allreduce"], lambda r: (r["ranks"], str(r.get("gradients") or "gradient not recorded")))
    sections += [_of_allreduce(f"allreduce{index}", *one, slots, baseline) for index, one in enumerate(reduced)]
    return sections + ([_of_codecs(records["codec"])] if records["codec"] else [])


def pick_baseline(labels: Sequence[str], wanted: str | None = None) -> str | None:
    """The label to compare with, or None where there is nothing to compare."""
    if len(labels) < 2:
        return None
    return next((name for name in (wanted, *_BASELINES) if name in labels), None)


def _measured(records: Sequence[Record], base: str | None, *axes: str) -> Experiment:
    """The records as an experiment over `axes`, `base` the baseline among the schemes."""
    values = {axis: list(dict.fromkeys(record[axis] for record in records)) for axis in axes}
    return Experiment("report", "", "", "", values, baseline={"scheme": base} if base else {})


# ---- training runs


def _of_runs(anchor: str, runs: Sequence[LoggedRun], slots: Slots, wanted: str | None) -> Section:
    first = runs[0]
    ranks = f"{first.ranks} ranks" if first.ranks else "ranks not recorded"
    base_label = pick_baseline([run.label for run in runs], wanted)
    base = next((run for run in runs if run.label == base_label), None)
    runs = sorted(runs, key=lambda run: run is not base)  # the baseline first, the others as they were given
    network = describe_networks([{**run.config, **run.environment} for run in runs])
    where = f"{describe_data(first.config)}, {ranks}; {network}; {describe_machine(first.environment)}"
    section = Section(anchor, f"Training {first.workload}", f"{ranks}. Network: {network}.")
    if base is not None:
        section.intro += f" Large figures: compared with {base.label}."
        section.tiles = [_tile(run, base, slots) for run in runs if run is not base]
    _show_losses(section, runs, base, slots, where)
    _show_bytes(section, runs, slots, where)
    split = {"computation": [], "exposed communication": []}  # type: Series
    for run in runs:
        iteration_ms, exposed_ms = (1e3 * float(_warm(run, name).mean()) for name in ("iteration_s", "exposed_s"))
        split["computation"].append((run.label, Value(max(0.0, iteration_ms - exposed_ms))))
        split["exposed communication"].append((run.label, Value(min(exposed_ms, iteration_ms))))
    caption = (
        f"{where}. Mean over steps after the first tenth, and over ranks, of the training thread; exposed is all that "
    )
    caption += "the backward pass did not hide, the codec's share included."
    section.show(
        "time", "Where an iteration's time goes", caption, _TIME, split, slots, wide=len(section.figures) % 2 == 0
    )
    section.tables = [_table_of_runs(runs, base)]
    section.tables += [table for run in runs if (table := _threshold_table(run)) is not None]
    return section


_TIME = Plot("scheme", Column("ms", "ms an iteration"), style="stacks")


def _tile(run: LoggedRun, base: LoggedRun, slots: Slots) -> Tile:
    sent, base_sent = (float(_warm(one, "bytes_sent").mean()) for one in (run, base))
    seconds, base_seconds = (float(np.median(_warm(one, "iteration_s"))) for one in (run, base))
    values = []
    if base_sent > 0:
        values.append((f"{sent / base_sent:.0%}", "of the bytes"))
    if seconds > 0:
        values.append((f"{base_seconds / seconds:.2f}{TIMES}", "the speed"))
    deviation = _deviation(run, base)
    if deviation is not None:
        values.append((format_power(float(f"{deviation[1].mean():.1e}")), "loss difference, mean"))
    return Tile(run.label, values, slots[run.label][0])


def _show_losses(section: Section, runs: Sequence[LoggedRun], base: LoggedRun | None, slots: Slots, where: str) -> None:
    window = max(1, max(len(run.columns["loss"]) for run in runs) // 25)
    smoothed = f" Bold: mean over {window} steps; faint: every step." if window > 1 else ""
    strayed = {run.label: _deviation(run, base) for run in runs if base is not None and run is not base}
    same = [label for label, curve in strayed.items() if curve is not None and not curve[1].any()]
    alike = f" Equal to {base.label}'s at every step: {', '.join(same)}." if base is not None and same else ""
    for name, x_title, note in (("steps", "step", alike), ("time", "wall time of training, s", "")):
        behind = {
            run.label: (_wall_s(run) if name == "time" else run.columns["step"], run.columns["loss"]) for run in runs
        }
        series = {label: _points(x, _smooth(loss)) for label, (x, loss) in behind.items()}
        plot = Plot(name, Column("loss"), x_title=x_title)
        title = f"Loss against {'wall time' if name == 'time' else 'steps'}"
        section.show(f"loss-{name}", title, f"{where}.{smoothed}{note}", plot, series, slots, behind=behind)
    curves = {label: (curve[0], np.where(curve[1] > 0, curve[1], np.nan)) for label, curve in strayed.items()
              if curve is not None and curve[1].any()}  # fmt: skip
    if base is not None:
        plot = Plot("step", Column("deviation", f"distance to the loss of {base.label}"), log="y")
        series = {label: _points(steps, _smooth(distance)) for label, (steps, distance) in curves.items()}
        caption = f"{where}. Absolute difference at the same step, log axis.{alike}"
        section.show("deviation", "How far the loss strays", caption, plot, series, slots, behind=curves)


def _show_bytes(section: Section, runs: Sequence[LoggedRun], slots: Slots, where: str) -> None:
    series = {run.label: _points(run.columns["step"], run.columns["bytes_sent"] / 1e6) for run in runs}
    middles = [m for run in runs if (m := float(np.median(run.columns["bytes_sent"]))) > 0]
    is_log = bool(middles) and max(middles) > 40 * min(middles)
    computed = [run.label for run in runs if str(run.summary.get("wire_bytes_origin", "counted")) != "counted"]
    note = f" {', '.join(computed)}: computed for a ring, not counted." if computed else ""
    caption = f"{where}. What a rank sent, headers and tables included.{note}"
    plot = Plot("step", Column("bytes_sent", "MB sent a step"), log="y" if is_log else "")
    section.show("bytes", "Bytes over steps", caption, plot, series, slots)


def _table_of_runs(runs: Sequence[LoggedRun], base: LoggedRun | None) -> Grid:
    records = []
    for run in runs:
        low, middle, high = np.percentile(_warm(run, "iteration_s"), (25, 50, 75))
        curve = _deviation(run, base) if base is not None and run is not base else None
        loss = run.columns["loss"]
        record = {"scheme": run.label, "steps": len(loss), "iteration_s": float(middle), "iteration_s_low": float(low),
                  "iteration_s_high": float(high), "loss": float(loss[-1]) if np.isfinite(loss[-1]) else "not finite",
                  "deviation": None if curve is None else format_power(float(f"{curve[1].max():.1e}"))}  # fmt: skip
        names = ("bytes_sent", "ratio", "exposed_s", "encode_s", "decode_s")
        records.append(record | {name: float(_warm(run, name).mean()) for name in names})
    columns = [Column("steps", form=".0f"), Column("iteration_s", "iteration, ms", 1e3, ",.1f", spread=True), _SPEED_UP,
               Column("bytes_sent", "MB sent a step", 1e-6, ",.2f"), Column("ratio", "of a plain ring, %", 100, ".1f"),
               *(Column(f"{name}_s", f"{name}, ms", 1e3, ",.1f") for name in ("exposed", "encode", "decode")),
               Column("loss", "final loss", form=".5g"), Column("deviation", "largest deviation")]  # fmt: skip
    label = base.label if base is not None else None
    caption = "Iteration: median (quartiles). Other times and bytes: means. All after the first tenth of the steps."
    caption += f" Speed-up and deviation against {label}, step by step." if label else ""
    return _grid("The runs in numbers", records, Table(columns), label, ("scheme",), caption)


_SPEED_UP = Column("iteration_s", "speed-up", kind="speed-up")


def _grid(
    title: str, records: Sequence[Record], table: Table, base: str | None, axes: tuple[str, ...], caption: str
) -> Grid:
    made = make_grid(_measured(records, base, *axes), table, records)
    return Grid(title, made.headings, made.rows, " ".join(filter(None, (caption, made.caption))), made.n_names)


def _warm(run: LoggedRun, name: str) -> Values:
    column = run.columns[name]
    return column[len(column) // 10 :]  # DDP rebuilds its buckets, allocators and caches warm up


def _wall_s(run: LoggedRun) -> Values:
    return run.columns.get("elapsed_s", np.cumsum(run.columns["iteration_s"]))


def _deviation(run: LoggedRun, base: LoggedRun | None) -> tuple[Values, Values] | None:
    """(steps, |difference of loss|) at the steps that both have with finite losses; None if there are none."""
    if base is None:
        return None
    steps, mine, theirs = np.intersect1d(run.columns["step"], base.columns["step"], return_indices=True)
    distance = np.abs(run.columns["loss"][mine] - base.columns["loss"][theirs])
    finite = np.isfinite(distance)
    return (steps[finite], distance[finite]) if finite.any() else None


def _points(x: Values, y: Values) -> list[tuple[Any, Value]]:
    return [(float(a), Value(float(b))) for a, b in zip(x, y, strict=True) if np.isfinite(b)]


def _smooth(values: Values) -> Values:
    """Centred mean over a twenty-fifth of the steps, shorter at the ends; NaN are left out, and stay NaN where all are."""
    half = max(1, len(values) // 25) // 2
    finite = np.isfinite(values)
    total = np.concatenate(([0], np.cumsum(np.where(finite, values, 0))))
    count = np.concatenate(([0], np.cumsum(finite)))
    index = np.arange(len(values))
    low, high = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    n = count[high] - count[low]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(n > 0, (total[high] - total[low]) / n, np.nan)


_THRESHOLDS = ("size_bytes", "raw_s", "compressed_s", "codec_s", "total_compressed_s", "benefit")


def _threshold_table(run: LoggedRun) -> Grid | None:
    """SlimGC's table (Fig. 6 of its paper) that decided what this run compressed; None if it has none that reads."""
    stats = run.summary.get("stats")
    rows = stats.get("threshold_table") if isinstance(stats, dict) else None
    threshold = stats.get("threshold_bytes") if isinstance(stats, dict) else None
    if not isinstance(stats, dict) or not isinstance(rows, list) or not rows or not isinstance(threshold, int):
        return None
    if not all(isinstance(row, dict) and all(_is_number(row.get(name)) for name in _THRESHOLDS) for row in rows):
        return None
    cells = [
        [f"{row['size_bytes']:,.0f}", *(f"{1e3 * row[name]:,.2f}" for name in _THRESHOLDS[1:5]), f"{row['benefit']:.2f}",
         "compressed" if row["size_bytes"] >= threshold else "raw"] for row in rows
    ]  # fmt: skip
    chosen = "never: everything travels raw" if threshold >= NEVER else f"{threshold:,} bytes"
    caption = f"Communication threshold: {chosen}. One tensor of each size by itself, the slowest rank's mean over the "
    caption += f"warm-up; benefit: raw / (compressed + codec). Measured {stats.get('threshold_measured', 1)} times."
    headings = ["tensor, bytes", "raw, ms", "compressed, ms", "codec, ms", "both, ms", "benefit", "sent"]
    return Grid(f"Where compression pays: {run.label}", headings, cells, caption)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- records of benchmarks


def _of_training(anchor: str, what: tuple[str, Any, bool], records: Sequence[Record], slots: Slots,
                 wanted: str | None) -> Section:  # fmt: skip
    workload, ranks, emulated = what
    network = describe_networks(records)
    section = Section(anchor, f"Iteration time of {workload}", f"{ranks} ranks. Network: {network}.")
    if emulated:
        section.intro += " Computation is emulated by calibrated waits; communication and codecs are real."
    base = pick_baseline(list(dict.fromkeys(record["scheme"] for record in records)), wanted)
    records = _by_rate(records, "iteration_s")
    where = f"{describe_data(records[0])}, {ranks} ranks; {network}; {describe_machine(records[0])}"
    _show_speed_up(section, records, "iteration_s", base, slots, where)
    for index, (rate, at_rate) in enumerate(_group(records, lambda record: record["rate"])):
        splits = {part: [] for part in ("computation", "exposed communication", "waiting for slower ranks")}  # type: Series
        for record in sorted(at_rate, key=lambda record: -float(record["iteration_s"])):
            for part, seconds in zip(splits, _split(record), strict=True):
                splits[part].append((record["scheme"], Value(1e3 * seconds)))
        title = "An iteration, unshaped" if rate == "unshaped" else f"An iteration at {rate}"
        section.show(f"split{index}", title, f"{where}. Median.", _TIME, splits, slots)
    columns = [Column("iteration_s", "iteration, ms", 1e3, ",.1f", spread=True), _SPEED_UP,
               *(Column(f"{name}_s", f"{title}, ms", 1e3, ",.1f") for name, title in
                 (("compute", "computation"), ("codec", "codec"), ("exposed", "exposed"))),
               Column("wire_bytes", "MB on the wire", 1e-6, ",.4g"), Column("loss", form=".5g")]  # fmt: skip
    caption = "Median (spread) of the iterations." + (f" Speed-up against {base} at the same rate." if base else "")
    table = Table(columns, rows=("scheme", "rate"))
    section.tables.append(_grid("Training in numbers", records, table, base, ("scheme", "rate"), caption))
    return section


def _split(record: Record) -> tuple[float, float, float]:
    """Seconds of computation, of exposed communication, and of waiting for slower ranks."""
    total_s = float(record["iteration_s"])
    compute_s = min(record.get("compute_s") or 0.0, total_s)
    exposed_s = min(record.get("exposed_s") or 0.0, total_s - compute_s)
    # A record that does not say how long it waited for others leaves the rest, whatever it was, under that name.
    rest_s = total_s - compute_s - exposed_s
    return compute_s, exposed_s, rest_s if record.get("wait_s") is None else min(record["wait_s"], rest_s)


def _of_allreduce(anchor: str, what: tuple[Any, str], records: Sequence[Record], slots: Slots,
                  wanted: str | None) -> Section:  # fmt: skip
    ranks, gradients = what
    network, machine = describe_networks(records), describe_machine(records[0])
    section = Section(anchor, f"All-reduce over {ranks} ranks", f"{gradients}. Network: {network}.")
    base = pick_baseline(list(dict.fromkeys(record["scheme"] for record in records)), wanted)
    records = _by_rate(records, "time_s")
    sizes = [record["n_bytes"] for record in records]
    size = max(
        sizes, key=lambda size: (sizes.count(size), size)
    )  # that most schemes and rates share, the largest of these
    where = f"{format_bytes(size)} of {gradients}, {ranks} ranks; {network}; {machine}"
    _show_speed_up(section, [r for r in records if r["n_bytes"] == size], "time_s", base, slots, where)
    plot = Plot("n_bytes", Column("time_s", "ms", 1e3), log="xy", x_title="bytes of the gradient")
    for index, (rate, at_rate) in enumerate(_group(records, lambda record: record["rate"])):
        if len({record["n_bytes"] for record in at_rate}) > 1:
            series = series_of(plot, Summary(_measured(at_rate, base, "scheme", "n_bytes"), at_rate))
            title = "Time against size, unshaped" if rate == "unshaped" else f"Time against size at {rate}"
            caption = f"{gradients}, {ranks} ranks; {describe_networks(at_rate)}; {machine}. Median; both axes log."
            section.show(f"sizes{index}", title, caption, plot, series, slots)
    records = [
        record | {"size": format_bytes(record["n_bytes"])} for record in sorted(records, key=lambda r: r["n_bytes"])
    ]
    records = [r | {"share": None if r.get("wire_bytes") is None else r["wire_bytes"] / r["n_bytes"]} for r in records]
    columns = [Column("time_s", "time, ms", 1e3, ",.2f", spread=True), Column("time_s", "speed-up", kind="speed-up"),
               Column("wire_bytes", "MB on the wire", 1e-6, ",.4g"),
               Column("share", "wire bytes / size", form=".3f")]  # fmt: skip
    caption = "Median (spread)." + (f" Speed-up against {base} at the same rate and size." if base else "")
    axes = ("scheme", "rate", "size")
    section.tables.append(_grid("All-reduce in numbers", records, Table(columns, rows=axes), base, axes, caption))
    return section


def _of_codecs(records: Sequence[Record]) -> Section:
    records = [record | {"codec": codec_label(record)} for record in records]
    slots = assign_slots(record["codec"] for record in records)
    section = Section("codec", "Codecs", "What is left of a gradient, and how fast it gets there and back.")
    plot = Plot(
        "ratio", Column("encode_gb_per_s", "GB/s of original bytes"), "codec", log="y", x_title="size / original"
    )
    for index, ((gradients, threads), group) in enumerate(
        _group(records, lambda r: (str(r["gradients"]), r["threads"]))
    ):
        series: Series = {}
        for record in group:
            encode, decode = float(record["encode_gb_per_s"]), float(record["decode_gb_per_s"])
            series[record["codec"]] = [(record["ratio"], Value(encode, min(encode, decode), max(encode, decode)))]
        many = f"{threads} thread" + ("s" if threads > 1 else "")
        caption = (
            f"{gradients}, {many}; {describe_machine(group[0])}. The mark: encode; the other end: decode; log axis. "
        )
        title = f"Ratio against throughput: {gradients}, {many}"
        section.show(str(index), title, f"{caption}Upper left is best.", plot, series, slots)
    columns = [Column("ratio", form=".4f"), Column("exponent_bits", "exponent, bits", form=".3f"),
               *(Column(f"{way}_gb_per_s", f"{way}, GB/s", form=".2f", spread=True)
                 for way in ("encode", "decode"))]  # fmt: skip
    caption = "Ratio: encoded / original size. GB/s of original bytes, median (spread); every round trip verified."
    axes = ("codec", "gradients", "threads")
    section.tables.append(_grid("Codecs in numbers", records, Table(columns, rows=axes), None, axes, caption))
    return section


def codec_label(record: Record) -> str:
    """A codec's name, with its mode where it has one."""
    return f"{record['codec']} {record.get('importance') or ''}".strip()


def _show_speed_up(section: Section, records: Sequence[Record], measure: str, base: str | None, slots: Slots,
                   where: str) -> None:  # fmt: skip
    if base:
        plot = Plot(
            "rate", Column(measure, f"speed-up over {base}", kind="speed-up"), style="bars", x_title="every link"
        )
        summary = Summary(_measured(records, base, "scheme", "rate"), records)
        caption = f"{where}. Ratio of medians in one run; above 1 is faster."
        title = (
            "Speed-up against bandwidth"
            if len({r["rate"] for r in records}) > 1
            else f"Speed-up at {records[0]['rate']}"
        )
        section.show("speedup", title, caption, plot, series_of(plot, summary), slots, wide=True)


def _by_rate(records: Iterable[Record], measure: str) -> list[Record]:
    """By the rate of their links, slowest first, unshaped last, the fastest first at each; `rate` in words."""
    ordered = sorted(records, key=lambda r: (float(r["rate_bps"] or "inf"), float(r[measure])))
    return [_with_ends(record, measure) | {"rate": format_rate(record["rate_bps"] or None)} for record in ordered]


def _with_ends(record: Record, measure: str) -> Record:
    """With its spread under the names that tables know: `train --json` calls it the tenth and ninetieth of a hundred."""
    ends = {f"{measure}_{end}": record.get(f"{measure}_{end}", record.get(f"{measure}_{old}"))
            for end, old in (("low", "p10"), ("high", "p90"))}  # fmt: skip
    return {**record, **ends}


def _group(things: Iterable[Any], key: Callable[[Any], Any]) -> list[tuple[Any, list[Any]]]:
    groups: dict[Any, list[Any]] = defaultdict(list)
    for thing in things:
        groups[key(thing)].append(thing)
    return list(groups.items())


def format_bytes(n_bytes: float) -> str:
    """`25 MB`, decimal units."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if n_bytes >= unit:
            return f"{n_bytes / unit:,.3g} {name}"
    return f"{n_bytes:,.0f} B"
