"""What a user brings: a model in blocks and a cluster, from JSON files whose mistakes are named by line and field.

A model is a file of blocks, a plan of `gradwire recommend --json`, or the Chrome trace of a run (`gradwire train --trace`,
`attach(trace=True)`). A cluster is groups of workers, racks or sites, and what joins them. Formats: docs/simulator.md.
"""

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradwire.errors import InvalidArgument
from gradwire.registry import describe_choices
from gradwire_lab.ranks.netlab.rate import parse_rate
from gradwire_lab.simulator.stage import Failures, Setting, Trace
from gradwire_lab.simulator.workloads import BlockTimes, WorkloadTimes, from_moments

# Of what a step computes a third is its forward pass, as in `gradwire.schemes.auto.costs`.
_FORWARD_SHARE = 1 / 3
_MOST_VALUES, _MOST_WORKERS, _MOST_S, _MOST_BPS = 10**13, 10**6, 1e5, 10**13


class Given:
    """A value of a JSON file; what is wrong with it is said with the file, the line and the field."""

    def __init__(self, path: Path, text: str, value: Any, field: tuple[str | int, ...] = ()) -> None:
        self.value = value
        self._path, self._text, self._field = path, text, field

    @classmethod
    def load(cls, path: Path) -> "Given":
        """Raises: InvalidArgument (cannot be read, or is cut off or no JSON: the line says where)."""
        try:
            text = path.read_text(encoding="utf-8")
            return cls(path, text, json.loads(text))
        except json.JSONDecodeError as error:
            how = "is cut off" if not text[error.pos :].strip() or error.msg.startswith("Unterminated") else "breaks"
            raise InvalidArgument(f"{path}, line {error.lineno}: the JSON {how} here ({error.msg})") from error
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidArgument(f"cannot read {path}: {error}") from error

    def wrong(self, what: str) -> InvalidArgument:
        name = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self._field).lstrip(".")
        line = self._text.count("\n", 0, self._place()) + 1
        return InvalidArgument(f"{self._path}, line {line}, {name or 'the whole'}: {what}")

    def _place(self) -> int:
        """Where the value begins in the text; of one that is missing, what it is missing in."""
        decode, at = json.JSONDecoder().raw_decode, _skip(self._text, 0)
        for step in self._field:
            begin, number, at = at, 0, _skip(self._text, at + 1)
            while self._text[at] not in "]}":
                key: Any = number
                if isinstance(step, str):
                    key, at = decode(self._text, at)
                    at = _skip(self._text, _skip(self._text, at) + 1)
                if key == step:
                    break
                at = _skip(self._text, decode(self._text, at)[1])
                at, number = _skip(self._text, at + (self._text[at] == ",")), number + 1
            else:
                return begin
        return at

    def _fields(self, *names: str) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            raise self.wrong(f"expected an object with {', '.join(names)}, got {_shown(self.value)}")
        return self.value

    def member(self, name: str, default: Any = None) -> "Given":
        """A field of an object, or `default`. Raises: InvalidArgument (no object; it is missing and `default` is ...)."""
        found = Given(self._path, self._text, self._fields(name).get(name, default), (*self._field, name))
        if found.value is ...:
            raise found.wrong("is missing")
        return found

    def known(self, *names: str) -> "Given":
        """The same, an object of no other fields than these. Raises: InvalidArgument."""
        for name in self._fields(*names):
            if name not in names:
                raise self.member(name).wrong(f"there is no such field; {describe_choices(name, names)}")
        return self

    def items(self) -> "list[Given]":
        if not isinstance(self.value, list) or not self.value:
            raise self.wrong(f"expected a list with something in it, got {_shown(self.value)}")
        return [Given(self._path, self._text, one, (*self._field, i)) for i, one in enumerate(self.value)]

    def number(self, at_least: float, at_most: float = math.inf, is_whole: bool = False) -> Any:
        """Raises: InvalidArgument (no number, or one out of range)."""
        value, kind = self.value, "a whole number" if is_whole else "a number"
        is_number = isinstance(value, int) or (isinstance(value, float) and not is_whole)
        if isinstance(value, bool) or not is_number or not at_least <= value <= at_most or math.isinf(value):
            to = "" if math.isinf(at_most) else f" to {at_most:g}"
            raise self.wrong(f"expected {kind} from {at_least:g}{to}, got {_shown(value)}")
        return value

    def rate(self) -> float:
        try:
            return parse_link_rate(self.value)
        except InvalidArgument as error:
            raise self.wrong(str(error)) from error

    def each(self, n: int) -> "list[Given]":
        """One value for each of `n` workers: a list of so many, or the same for all. Raises: InvalidArgument."""
        if not isinstance(self.value, list):
            return [self] * n
        if len(self.value) != n:
            raise self.wrong(f"{len(self.value)} values for {n} workers")
        return self.items()


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _shown(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)[:40]


# ---- a model


def load_model(path: Path) -> WorkloadTimes:
    """Blocks, a plan or a trace, whichever the file is. Raises: InvalidArgument."""
    given = Given.load(path)
    names = given.value if isinstance(given.value, dict) else ()
    if "traceEvents" in names:
        return _of_trace(given, path)
    if "profile" in names:
        compute_s = given.member("compute_s", ...).number(1e-9, _MOST_S)
        buckets = given.member("profile").member("buckets", ...).items()
        sizes = [one.number(1, _MOST_VALUES, is_whole=True) for one in buckets]
        shares = [_FORWARD_SHARE + (1 - _FORWARD_SHARE) * done / sum(sizes) for done in itertools.accumulate(sizes)]
        ready = [(n, compute_s * share) for n, share in zip(sizes, shares, strict=True)]
        return _of_ready(path.stem, ready, compute_s, f"the plan {path}")
    given.known("name", "blocks")
    blocks: list[BlockTimes] = []
    for one in given.member("blocks", ...).items():
        one.known("name", "values", "forward_s", "backward_s")
        n_values = one.member("values", ...).number(1, _MOST_VALUES, is_whole=True)
        times_s = [one.member(name, ...).number(0, _MOST_S) for name in ("forward_s", "backward_s")]
        blocks.append(BlockTimes(str(one.member("name", f"block {len(blocks)}").value), n_values, *times_s))
    if not sum(block.forward_s + block.backward_s for block in blocks):
        raise given.member("blocks").wrong("expected some computation, got 0 s in all")
    return WorkloadTimes(str(given.member("name", path.stem).value), tuple(blocks), str(path))


def _of_ready(name: str, buckets: Sequence[tuple[int, float]], compute_s: float, origin: str) -> WorkloadTimes:
    """Of (values, when its gradient is there), the first ready first, in a step that computes `compute_s`."""
    late_s = compute_s - buckets[-1][1]  # what follows the last gradient is before the next forward pass
    forward_s, n_values = min(_FORWARD_SHARE * compute_s, buckets[0][1]) + late_s, sum(n for n, _ in buckets)
    pieces = [(f"bucket {i}", n, ready_s + late_s, forward_s * n / n_values) for i, (n, ready_s) in enumerate(buckets)]
    return from_moments(name, pieces, compute_s, origin)


def _of_trace(given: Given, path: Path) -> WorkloadTimes:
    """The medians of a run's steps: gradients in float32, and what a step computes without waiting."""
    steps: dict[Any, tuple[float, float]] = {}
    buckets: dict[Any, list[tuple[float, int]]] = {}
    ranks: set[Any] = set()
    for event in given.member("traceEvents").items():
        what = event.member("cat").value
        is_bucket = what == "bucket" and event.member("ph", ...).value == "b"
        if what != "step" and not is_bucket:
            continue
        arguments, rank = event.member("args", ...), event.member("pid", ...).number(0, is_whole=True)
        step, at_s = arguments.member("step", ...).number(0, is_whole=True), event.member("ts", ...).number(0) / 1e6
        ranks.add(rank)
        if not is_bucket:
            exposed_s = arguments.member("exposed_s", ...).number(0)
            steps[rank, step] = (at_s, event.member("dur", ...).number(0) / 1e6 - exposed_s)
        elif arguments.member("bucket", ...).number(-1, is_whole=True) >= 0:
            n_bytes = arguments.member("original_bytes", ...).number(1, 4 * _MOST_VALUES, is_whole=True)
            buckets.setdefault((rank, step), []).append((at_s, n_bytes // 4))
    whole = [key for key in sorted(steps) if key in buckets and key[0] == min(ranks) and steps[key][1] > 0]
    if not whole:
        raise given.member("traceEvents").wrong("no step of the trace has its computation and its buckets")
    sizes = [n for _, n in sorted(buckets[whole[-1]])]
    # The first step's buckets are others, and what starts up is in the next one.
    alike = [key for key in whole if [n for _, n in sorted(buckets[key])] == sizes][1:] or whole[-1:]
    compute_s = statistics.median(steps[key][1] for key in alike)
    ready = [
        statistics.median(min(compute_s, max(0.0, sorted(buckets[key])[i][0] - steps[key][0])) for key in alike)
        for i in range(len(sizes))
    ]
    return _of_ready(path.stem, list(zip(sizes, ready, strict=True)), compute_s, f"the trace {path}")


# ---- a cluster


def load_cluster(path: Path, workload: WorkloadTimes) -> Setting:
    """All of its workers with a model; fewer or more: `Setting.of_workers`. Raises: InvalidArgument."""
    given = Given.load(path).known("groups", "latency_us", "between", "at_once", "failures")
    sizes, rates, speeds, uplinks = list[int](), list[float](), list[float](), list[float]()
    for group in given.member("groups", ...).items():
        group.known("workers", "rate", "speed", "uplink")
        n = group.member("workers", ...).number(1, _MOST_WORKERS, is_whole=True)
        sizes.append(n)
        rates += [one.rate() for one in group.member("rate", ...).each(n)]
        speeds += [one.number(1e-3, 1e3) for one in group.member("speed", 1.0).each(n)]
        uplink = group.member("uplink")
        uplinks.append(sum(rates[-n:]) if uplink.value is None else uplink.rate())
    between = given.member("between", {}).known("rtt_ms", "loss", "streams")
    rtt_ms = between.member("rtt_ms", ... if between.value else None)
    return Setting(
        workload,
        sum(sizes),
        rates[0],
        rates_bps=tuple(rates),
        speeds=tuple(speeds),
        racks=tuple(sizes),
        core_bps=tuple(uplinks) if len(sizes) > 1 else None,
        latency_s=given.member("latency_us", 0).number(0, 1e7) / 1e6,
        core_latency_s=None if rtt_ms.value is None else rtt_ms.number(0, 1e4) / 2e3,
        loss=between.member("loss", 0).number(0, 0.5),
        streams=between.member("streams", 1).number(1, 1024, is_whole=True),
        at_once=given.member("at_once", 1).number(1, 64, is_whole=True),
        failures=_failures_of(given.member("failures")),
    )


def _failures_of(given: Given) -> Failures | None:
    if given.value is None:
        return None
    every_s = given.known("mtbf_hours", "restart_s", "checkpoint_s", "every_s").member("every_s")
    mtbf_s = given.member("mtbf_hours", ...).number(1e-3, 1e9) * 3600
    restart_s, checkpoint_s = (given.member(name, ...).number(0, 1e7) for name in ("restart_s", "checkpoint_s"))
    return Failures(mtbf_s, restart_s, checkpoint_s, None if every_s.value is None else every_s.number(1e-3, 1e9))


# ---- rates


def make_trace(steps: Sequence[tuple[float, float]]) -> Trace:
    """A bandwidth trace, checked: times from 0 on that grow, rates above 0. Raises: InvalidArgument."""
    if not steps:
        raise InvalidArgument("a bandwidth trace needs at least one line: seconds,rate")
    before_s = -math.inf
    for at_s, rate_bps in steps:
        if not 0 <= at_s < math.inf:
            raise InvalidArgument(f"a bandwidth trace has a time of {at_s} s; times count from the start, 0 or more")
        if at_s <= before_s:
            raise InvalidArgument(f"a bandwidth trace goes from {before_s} s to {at_s} s; times must grow")
        if not 0 < rate_bps < math.inf:
            raise InvalidArgument(f"a bandwidth trace has a rate of {rate_bps} bits a second; rates are above 0")
        before_s = at_s
    return tuple((float(at_s), float(rate_bps)) for at_s, rate_bps in steps)


def parse_trace(text: str) -> Trace:
    """`0=2.5gbit,60=1gbit` or a file with lines `seconds,rate` (# begins a comment). Raises: InvalidArgument."""
    if "=" in text:
        return make_trace([_read_step(part.split("=", 1), text) for part in text.split(",")])
    try:
        content = Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"cannot read the bandwidth trace {text}: {error}") from error
    lines = [line.split("#", 1)[0].strip() for line in content.splitlines()]
    return make_trace([_read_step(line.replace(",", " ").split(), line) for line in lines if line])


def _read_step(words: Sequence[str], text: str) -> tuple[float, float]:
    try:
        at, rate = words
        at_s = float(at)
    except ValueError as error:
        raise InvalidArgument(f"{text!r}: expected seconds and a rate, such as 60,1gbit or 60=1gbit") from error
    return at_s, parse_link_rate(rate)


def parse_link_rate(rate: str | float) -> float:
    """Bits a second of a simulated link, up to 10 Tb/s. Raises: InvalidArgument (none: a simulated link has a rate)."""
    rate_bps = parse_rate(rate, _MOST_BPS)
    if rate_bps is None:
        raise InvalidArgument(f"{rate!r}: a simulated link needs a rate; 'none' is not one")
    return float(rate_bps)
