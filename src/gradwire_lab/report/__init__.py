"""One self-contained HTML page from training runs and benchmark results: sections in the style of the pages."""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gradwire.errors import CorruptMessage, GradwireError, InvalidArgument, needs_extra
from gradwire.schemes.slimgc.threshold import NEVER
from gradwire_lab.results.captions import (
    describe_data,
    describe_machine,
    describe_networks,
    format_bytes,
    format_rate,
    is_emulated,
)
from gradwire_lab.results.experiment import Column, Experiment, Plot, Table, group
from gradwire_lab.results.plots import PARTS, css_variables, draw, series_of
from gradwire_lab.results.records import Record, write_text
from gradwire_lab.results.tables import Grid, Summary, tabulate

_STEP_FIELDS = ("step", "loss", "iteration_s", "bytes_sent", "ratio", "encode_s", "decode_s", "exposed_s")

# kind: (fields that tell it from the others, of which these must be positive). Other fields may be null or missing.
_OF_CODEC = ("threads", "ratio", "encode_gb_per_s", "decode_gb_per_s")
BENCH_FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "codec": (("codec", "gradients", *_OF_CODEC), _OF_CODEC),
    "allreduce": (("scheme", "ranks", "rate_bps", "n_bytes", "time_s"), ("ranks", "n_bytes", "time_s")),
    "train": (("scheme", "workload", "ranks", "rate_bps", "iteration_s"), ("ranks", "iteration_s")),
}
_ENVIRONMENT = ("cpu", "n_cores", "memory_bytes", "os", "python", "torch", "gradwire", "commit")
_UNITS = ("_s", "_bytes", "_bps", "_low", "_high", "_bits")


@dataclass
class LoggedRun:
    """One training run, as rank 0 logged it."""

    path: Path
    label: str  # the scheme, with its options or the folder's name where another run of the workload has the same one
    steps: Sequence[Record]  # sorted, each once; a loss that was not finite is None
    config: Mapping[str, Any]
    summary: Mapping[str, Any]

    @property
    def place(self) -> Record:
        """The configuration and the machine, flat."""
        nested = [one.get("environment") for one in (self.config, self.summary)]
        return {**self.config, **{k: v for one in nested if isinstance(one, dict) for k, v in one.items()}}


def load_inputs(paths: Sequence[str | os.PathLike[str]]) -> tuple[list[LoggedRun], dict[str, list[Record]]]:
    """Read run folders, bench JSON files, and folders that hold either: runs, and records by kind (`BENCH_FIELDS`).
    Raises: InvalidArgument (nothing given, missing or to report), CorruptMessage (a file is not what its name promises)."""
    if not paths:
        raise InvalidArgument("a report needs at least one run folder or bench JSON file")
    runs: list[LoggedRun] = []
    records: dict[str, list[Record]] = {kind: [] for kind in BENCH_FIELDS}
    for source in [source for path in dict.fromkeys(map(Path, paths)) for source in _sources(path)]:
        if source.is_dir():
            runs.append(_load_run(source))
            continue
        for number, record in enumerate(read_json(source)):
            records[_kind_of(record, f"{source}: record {number}")].append(record)
    for same in group(runs, lambda run: (run.config.get("workload"), run.config.get("scheme"))):
        words = [_words(run.config.get("scheme_options")) for run in same]
        for run, options in zip(same, words, strict=True):
            if len(same) > 1:
                run.label += f" {options if len(set(words)) == len(same) else f'({run.path.name})'}"
    for same in (same for kind in ("allreduce", "train") for same in group(records[kind], lambda r: str(r["scheme"]))):
        words = [_words(record.get("options") or record.get("scheme_options")) for record in same]
        for record, options in zip(same, words, strict=True):
            record["scheme"] = f"{record['scheme']} {options if len(set(words)) > 1 else ''}".strip()
    return runs, records


def _words(options: Any) -> str:
    return " ".join(f"{k}={v}" for k, v in options.items()) if isinstance(options, dict) else str(options or "")


def _sources(path: Path) -> list[Path]:
    """Run folders and JSON files at `path`: itself, or what it holds."""
    if not path.exists():
        raise InvalidArgument(f"{path} does not exist; give run folders of `gradwire train` or files of `--json`")
    if path.name == "demo.json" or (path / "demo.json").exists():
        raise InvalidArgument(
            f"{path} is of `gradwire demo`, whose page is the demo.svg beside its demo.json; a report takes run folders "
            "of `gradwire train --out` and files of `gradwire bench --json`"
        )
    if path.is_file() or _is_run(path):
        return [path]
    found = sorted(child for child in path.iterdir() if _is_run(child) or child.suffix in (".json", ".jsonl"))
    if not found:
        raise InvalidArgument(f"{path} holds nothing to report: no run of `gradwire train`, no file of `bench --json`")
    return found


def _is_run(path: Path) -> bool:
    return (path / "config.json").exists() or (path / "steps.jsonl").exists()


def _load_run(path: Path) -> LoggedRun:
    config, *more = read_json(path / "config.json")
    summary = read_json(path / "summary.json")[0] if (path / "summary.json").exists() else {}
    if more or not isinstance(config.get("scheme"), str):
        raise CorruptMessage(f"{path / 'config.json'}: is no configuration with a scheme")
    steps: dict[int, Record] = {}  # a resumed run repeats the steps after its checkpoint, the later ones count
    for number, record in enumerate(read_json(path / "steps.jsonl"), start=1):
        if "bucket" in record:
            continue
        for name in _STEP_FIELDS:
            if not (is_number(record.get(name)) or (name == "loss" and name in record and record[name] is None)):
                got = repr(record[name]) if name in record else "missing"
                raise CorruptMessage(f"{path / 'steps.jsonl'}: record {number}: {name} is {got}, expected a number")
        steps[int(record["step"])] = record
    if not steps:
        raise CorruptMessage(f"{path / 'steps.jsonl'}: holds no step; did the run end before its first one?")
    return LoggedRun(path, config["scheme"], [steps[step] for step in sorted(steps)], config, summary)


def _kind_of(record: Record, where: str) -> str:
    kind = next((kind for kind, (fields, _) in BENCH_FIELDS.items() if all(name in record for name in fields)), None)
    if kind is None:
        expected = "; ".join(f"{kind}: {' '.join(fields)}" for kind, (fields, _) in BENCH_FIELDS.items())
        raise CorruptMessage(f"{where}: its fields are of no kind that a report knows ({expected})")
    for name, value in record.items():
        if name in BENCH_FIELDS[kind][1] and not (is_number(value) and value > 0):
            raise CorruptMessage(f"{where}: {name} is {value!r}, expected a positive number")
        if name.endswith(_UNITS) and not (value is None or is_number(value)):
            raise CorruptMessage(f"{where}: {name} is {value!r}, expected a number or null")
    return kind


def is_number(value: Any) -> bool:
    """Whether it is a number that a float holds."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def read_json(path: Path) -> list[Record]:
    """The objects of a JSON file: of a list, of a line each, or one alone. Raises: InvalidArgument, CorruptMessage."""
    try:
        text = path.read_text(encoding="utf-8")
        lines = [line for line in text.splitlines() if line.strip()] if path.suffix == ".jsonl" else [text]
        found = [json.loads(line) for line in lines]
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CorruptMessage(f"{path}: not JSON that gradwire writes ({error}); is it cut short?") from error
    records = [one for value in found for one in (value if isinstance(value, list) else [value])]
    if not all(isinstance(record, dict) for record in records):
        raise CorruptMessage(f"{path}: expected objects with fields, as `gradwire train` and `bench --json` write them")
    return records


# ---- sections: runs, training at several rates, all-reduce and codecs

# Whom the others are compared with, if it is there: what one would run without gradwire, else its own plain all-reduce.
_BASELINES = ("ddp", "plain", "gloo", "nccl", "allreduce", "none")
_SIZE_IN = (5.7, 3.4)  # half of the page's width
_MOST_POINTS = 100  # of a line over steps
_SPEED_UP = "speed-up"
_PARTS = Plot("scheme", Column("ms", "ms an iteration"), "part", "stacks")


@dataclass
class Section:
    """One block of the page. `base`: the scheme that ratios are to."""

    anchor: str
    title: str
    intro: str
    base: str | None = None
    figures: list[dict[str, str]] = field(default_factory=list)  # their name, title, caption and svg
    tables: list[Grid] = field(default_factory=list)

    def draw(self, plot: Plot, records: Sequence[Record], caption: str) -> None:
        """Add a figure, if there is anything to draw."""
        axes = {axis: list(dict.fromkeys(record[axis] for record in records)) for axis in (plot.series, plot.x)}
        experiment = Experiment("", "", "", "", axes, baseline=self.baseline)
        if series := series_of(plot, Summary(experiment, records)):
            height = 0.9 + 0.5 * len({x for points in series.values() for x, _ in points})
            size = (_SIZE_IN[0], height) if plot.style == "stacks" else _SIZE_IN
            name = f"{self.anchor}-{len(self.figures)}"
            svg = draw(replace(plot, title=""), series, name, size)
            self.figures.append({"name": name, "title": plot.title, "caption": caption, "svg": svg})

    @property
    def baseline(self) -> dict[str, str]:
        """The value of the field that ratios are to."""
        return {"scheme": self.base} if self.base else {}

    def tabulate(self, table: Table, records: Sequence[Record], caption: str) -> None:
        """Add a table, the rows' names from its `rows`."""
        self.tables.append(tabulate(records, table, caption, self.baseline))


def make_sections(
    runs: Sequence[LoggedRun], records: Mapping[str, Sequence[Record]], baseline: str | None
) -> list[Section]:
    """Runs first, a section for each workload and number of ranks, then the kinds of records that are there."""
    kinds: list[tuple[str, Any, list[list[Any]]]] = [
        ("run", _of_runs, group(runs, lambda run: (run.config.get("workload"), run.config.get("ranks")))),
        ("train", _of_training, group(records["train"], lambda r: (r["workload"], r["ranks"], is_emulated(r)))),
        ("allreduce", _of_allreduce, group(records["allreduce"], lambda r: (r["ranks"], _gradients_of(r)))),
    ]
    sections = [
        make(f"{kind}{index}", same, baseline) for kind, make, groups in kinds for index, same in enumerate(groups)
    ]
    return sections + ([_of_codecs(records["codec"])] if records["codec"] else [])


def _gradients_of(record: Record) -> str:
    return str(record.get("gradients") or "gradient not recorded")


def _begin(anchor: str, title: str, what: str, places: Sequence[Record], wanted: str | None) -> Section:
    """A section that says what was measured where; with a baseline, if there is anything to compare."""
    known, ranks = {place["scheme"] for place in places}, places[0].get("ranks")
    base = next((name for name in (wanted, *_BASELINES) if name in known), None) if len(known) > 1 else None
    words = f"{ranks} ranks" if ranks else "ranks not recorded"
    intro = f"{what}, {words}; {describe_networks(places)}; {describe_machine(places[0])}."
    return Section(anchor, title, intro, base)


def _columns(digits: int = 1, **titles: str) -> list[Column]:
    """Seconds as ms: field=title."""
    return [Column(field, f"{title}, ms", 1e3, f",.{digits}f") for field, title in titles.items()]


def _timed(field: str, title: str, digits: int = 1) -> list[Column]:
    """A time with its spread, and how many times the baseline's it is shorter."""
    (column,) = _columns(digits, **{field: title})
    return [replace(column, spread=True), Column(field, _SPEED_UP, kind="speed-up")]


# ---- training runs


def _of_runs(anchor: str, runs: Sequence[LoggedRun], wanted: str | None) -> Section:
    places = [run.place | {"scheme": run.label} for run in runs]
    title = f"Training {places[0].get('workload') or 'a workload'}"
    section = _begin(anchor, title, describe_data(places[0]), places, wanted)
    base = section.base
    runs = sorted(runs, key=lambda run: run.label != base)  # the baseline first, the others as they were given
    first = next((run for run in runs if run.label == base), None)
    rows = [_row_of(run, first) for run in runs]
    shares = []
    for row in rows:
        exposed_s = min(row["exposed_s"], row["mean_s"])
        for part, seconds in (("computation", row["mean_s"] - exposed_s), ("exposed communication", exposed_s)):
            shares.append({"scheme": row["scheme"], "part": part, "ms": 1e3 * seconds})
    caption = f"Mean over each of up to {_MOST_POINTS} parts of the training; the band: its smallest and largest."
    losses = [point for run in runs for point in _loss_over_steps(run)]
    for x, title, words in (("step", "steps", "step"), ("elapsed_s", "wall time", "wall time of training, s")):
        section.draw(Plot(x, Column("loss"), x_title=words, title=f"Loss against {title}"), losses, caption)
    caption = "Mean over steps after the first tenth, and over ranks, of the training thread; exposed is all that the "
    caption += "backward pass did not hide, the codec's share included."
    section.draw(replace(_PARTS, title="Where an iteration's time goes"), shares, caption)
    columns = [Column("steps", form=".0f"), *_timed("iteration_s", "iteration"),
               Column("bytes_sent", "MB sent a step", 1e-6, ",.2f"), Column("ratio", "of a plain ring, %", 100, ".1f"),
               *_columns(exposed_s="exposed", encode_s="encode", decode_s="decode"),
               Column("loss", "final loss", form=".5g"), Column("deviation", "largest deviation")]  # fmt: skip
    caption = "Iteration: median (quartiles). Other times and bytes: means. All after the first tenth of the steps."
    caption += f" Speed-up and deviation against {base}, step by step." if base else ""
    computed = [run.label for run in runs if str(run.summary.get("wire_bytes_origin", "counted")) != "counted"]
    caption += f" Bytes of {', '.join(computed)}: computed for a ring, not counted." if computed else ""
    section.tabulate(Table(columns, title="The runs in numbers"), rows, caption)
    section.tables += [table for run in runs if (table := _threshold_table(run)) is not None]
    return section


def _loss_over_steps(run: LoggedRun) -> list[Record]:
    elapsed_s = np.cumsum([step["iteration_s"] for step in run.steps])
    found = []
    for part in np.array_split(np.arange(len(run.steps)), min(_MOST_POINTS, len(run.steps))):
        losses = [run.steps[index]["loss"] for index in part if run.steps[index]["loss"] is not None]
        if losses:
            record = {"scheme": run.label, "step": run.steps[part[-1]]["step"], "elapsed_s": float(elapsed_s[part[-1]])}
            found.append(record | {"loss": float(np.mean(losses)), "loss_low": min(losses), "loss_high": max(losses)})
    return found


def _row_of(run: LoggedRun, base: LoggedRun | None) -> Record:
    warm = run.steps[len(run.steps) // 10 :]  # DDP rebuilds its buckets, allocators and caches warm up
    names = ("bytes_sent", "ratio", "exposed_s", "encode_s", "decode_s")
    row: Record = {name: float(np.mean([step[name] for step in warm])) for name in names}
    times = [step["iteration_s"] for step in warm]
    low, middle, high = (float(one) for one in np.percentile(times, (25, 50, 75)))
    row |= {"iteration_s": middle, "iteration_s_low": low, "iteration_s_high": high, "mean_s": float(np.mean(times))}
    last = run.steps[-1]["loss"]
    row |= {"scheme": run.label, "steps": len(run.steps), "loss": "not finite" if last is None else last}
    if base is not None and run is not base:
        theirs = {step["step"]: step["loss"] for step in base.steps if step["loss"] is not None}
        both = [(step["loss"], theirs[step["step"]]) for step in run.steps if step["step"] in theirs]
        row["deviation"] = max((abs(a - b) for a, b in both if a is not None), default=None)
    return row


_THRESHOLDS = ("size_bytes", "raw_s", "compressed_s", "codec_s", "total_compressed_s", "benefit")


def _threshold_table(run: LoggedRun) -> Grid | None:
    """SlimGC's table (Fig. 6 of its paper) that decided what this run compressed; None if it has none that reads."""
    stats = run.summary.get("stats")
    found = stats if isinstance(stats, dict) else {}
    rows, threshold = found.get("threshold_table"), found.get("threshold_bytes")
    if not isinstance(rows, list) or not rows or not isinstance(threshold, int):
        return None
    if not all(isinstance(row, dict) and all(is_number(row.get(name)) for name in _THRESHOLDS) for row in rows):
        return None
    shown = []
    for row in rows:
        sent = "compressed" if row["size_bytes"] >= threshold else "raw"
        shown.append({**row, "tensor, bytes": f"{row['size_bytes']:,.0f}", "sent": sent})
    names = zip(_THRESHOLDS[1:5], ("raw", "compressed", "codec", "both"), strict=True)
    columns = [*_columns(digits=2, **dict(names)), Column("benefit", form=".2f"), Column("sent")]
    chosen = "never: everything travels raw" if threshold >= NEVER else f"{threshold:,} bytes"
    caption = f"Communication threshold: {chosen}. One tensor of each size by itself, the slowest rank's mean over the "
    caption += "warm-up; benefit: raw / (compressed + codec)."
    table = Table(columns, rows=("tensor, bytes",), title=f"Where compression pays: {run.label}")
    return tabulate(shown, table, caption)


# ---- records of benchmarks


def _of_training(anchor: str, records: Sequence[Record], wanted: str | None) -> Section:
    title = f"Iteration time of {records[0]['workload']}"
    section = _begin(anchor, title, describe_data(records[0]), records, wanted)
    if is_emulated(records[0]):
        section.intro += " Computation is emulated by calibrated waits; communication and codecs are real."
    records = _by_rate(records, "iteration_s")
    _draw_speed_up(section, records, "iteration_s")
    for at_rate in group(records, lambda record: record["rate"]):
        shares = []
        for record in sorted(at_rate, key=lambda record: -float(record["iteration_s"])):
            left_s = float(record["iteration_s"])
            # A record that does not say how long it waited for others leaves the rest, whatever it was, under that name.
            waited_s = left_s if record.get("wait_s") is None else record["wait_s"]
            parts_s = (record.get("compute_s") or 0.0, record.get("exposed_s") or 0.0, waited_s)
            for part, seconds in zip(PARTS, parts_s, strict=True):
                shares.append({"scheme": record["scheme"], "part": part, "ms": 1e3 * min(seconds, left_s)})
                left_s -= min(seconds, left_s)
        section.draw(replace(_PARTS, title=f"An iteration, {at_rate[0]['rate']}"), shares, "Median.")
    columns = [*_timed("iteration_s", "iteration"),
               *_columns(compute_s="computation", codec_s="codec", exposed_s="exposed"),
               Column("wire_bytes", "MB on the wire", 1e-6, ",.4g"), Column("loss", form=".5g")]  # fmt: skip
    caption = f"Median (spread) of the iterations.{_against(section, 'rate')}"
    section.tabulate(Table(columns, rows=("scheme", "rate"), title="Training in numbers"), records, caption)
    return section


def _of_allreduce(anchor: str, records: Sequence[Record], wanted: str | None) -> Section:
    title = f"All-reduce over {records[0]['ranks']} ranks"
    section = _begin(anchor, title, _gradients_of(records[0]), records, wanted)
    records = [{**record, "size": format_bytes(record["n_bytes"])} for record in _by_rate(records, "time_s")]
    for record in records:
        sent = record.get("wire_bytes")
        record["share"] = None if sent is None else sent / record["n_bytes"]
    sizes = [record["n_bytes"] for record in records]
    size = max(sizes, key=lambda size: (sizes.count(size), size))  # that most have in common, the largest of these
    _draw_speed_up(section, [r for r in records if r["n_bytes"] == size], "time_s", f" of {format_bytes(size)}")
    for at_rate in group(records, lambda record: record["rate"]):
        if len({record["n_bytes"] for record in at_rate}) > 1:
            title = f"Time against size, {at_rate[0]['rate']}"
            plot = Plot("n_bytes", Column("time_s", "ms", 1e3), log="xy", x_title="bytes of the gradient", title=title)
            section.draw(plot, at_rate, "Median; both axes log.")
    columns = [*_timed("time_s", "time", digits=2), Column("wire_bytes", "MB on the wire", 1e-6, ",.4g"),
               Column("share", "wire bytes / size", form=".3f")]  # fmt: skip
    records.sort(key=lambda record: record["n_bytes"])
    table = Table(columns, rows=("scheme", "rate", "size"), title="All-reduce in numbers")
    section.tabulate(table, records, f"Median (spread).{_against(section, 'rate and size')}")
    return section


def _of_codecs(records: Sequence[Record]) -> Section:
    records = [record | {"codec": f"{record['codec']} {record.get('importance') or ''}".strip()} for record in records]
    section = Section("codec", "Codecs", "What is left of a gradient, and how fast it gets there and back.")
    for same in group(records, lambda record: (record["gradients"], record["threads"])):
        title = f"Ratio against throughput: {same[0]['gradients']}, threads: {same[0]['threads']}"
        plot = Plot("ratio", Column("encode_gb_per_s", "GB/s of original bytes, encoding"), "codec", log="y",
                    x_title="size / original", title=title)  # fmt: skip
        section.draw(plot, same, f"{describe_machine(same[0])}. Log axis; upper left is best.")
    columns = [Column("ratio", form=".4f"), Column("exponent_bits", "exponent, bits", form=".3f"),
               *(Column(f"{way}_gb_per_s", f"{way}, GB/s", form=".2f", spread=True)
                 for way in ("encode", "decode"))]  # fmt: skip
    caption = "Ratio: encoded / original size. GB/s of original bytes, median (spread); every round trip verified."
    section.tabulate(Table(columns, ("codec", "gradients", "threads"), title="Codecs in numbers"), records, caption)
    return section


def _against(section: Section, same: str) -> str:
    return f" Speed-up against {section.base} at the same {same}." if section.base else ""


def _draw_speed_up(section: Section, records: Sequence[Record], measure: str, of: str = "") -> None:
    if section.base:
        title, speed_up = f"Speed-up{of} over {section.base}", Column(measure, _SPEED_UP, kind="speed-up")
        plot = Plot("rate", speed_up, style="bars", x_title="every link", title=title)
        section.draw(plot, records, "Ratio of medians in one run; above 1 is faster.")


def _by_rate(records: Iterable[Record], measure: str) -> list[Record]:
    """By the rate of their links in words, slowest first, unshaped last; with their spread under the names of tables."""
    ordered = sorted(records, key=lambda r: (float(r["rate_bps"] or "inf"), float(r[measure])))
    return [  # `train --json` says what a tenth and what nine tenths are below
        {f"{measure}_low": record.get(f"{measure}_p10"), f"{measure}_high": record.get(f"{measure}_p90")}
        | record
        | {"rate": format_rate(record["rate_bps"] or None)}
        for record in ordered
    ]


# ---- the page


def write_report(
    run_dirs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    title: str = "gradwire report",
    baseline: str | None = None,
) -> Path:
    """Write one HTML page with all figures inside; it needs no network, no script and no other file.

    Args:
        run_dirs: run folders of `gradwire train`, JSON files of `gradwire bench --json`, or folders that hold either.
        out: the page; its folder is made if need be, and an older page stays as it is if anything fails.
        baseline: the label (scheme) to compare with; by default `ddp`, else `plain`.
    Raises: InvalidArgument (missing input, unknown baseline, page not writable), CorruptMessage (a file that holds
        something else), Unsupported (the packages of the extra `report` are missing).
    """
    runs, records = load_inputs(run_dirs)
    schemes = {run.label for run in runs}
    schemes |= {str(record["scheme"]) for kind in ("allreduce", "train") for record in records[kind]}
    if baseline is not None and baseline not in schemes:
        there_are = ", ".join(sorted(schemes)) or "none"
        raise InvalidArgument(f"no run or record is of a scheme called {baseline!r}; there are: {there_are}")
    sections = make_sections(runs, records, baseline)
    try:
        import jinja2
    except ImportError as error:
        raise needs_extra(f"a report needs jinja2 ({error})", "report") from error
    # Where and when each run and record was measured, and the distinct machines.
    places = [run.place for run in runs]
    for record in (record for batch in records.values() for record in batch):
        inner = record.get("environment")
        places.append(inner if isinstance(inner, dict) else record)
    machines = [{key: place[key] for key in _ENVIRONMENT if key in place} for place in places]
    days = sorted({str(place["date"])[:10] for place in places if place.get("date")})
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,  # names come from files that anyone may have written
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.j2").render(
        title=title,
        sections=sections,
        runs=runs,
        environments=[one for number, one in enumerate(machines) if one and one not in machines[:number]],
        light=css_variables(dark=False),
        dark=css_variables(dark=True),
        dates=" to ".join(dict.fromkeys((days[0], days[-1]))) if days else "",
    )
    try:
        write_text(Path(out), page)
    except GradwireError as error:
        raise InvalidArgument(f"cannot write the report to {out}: {error.__cause__}") from error
    return Path(out)
