"""Counts bytes and times per bucket and step. Cheap enough to be always on; keeps single spans only when tracing."""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

__all__ = ["KINDS", "BucketRecord", "Recorder", "Sink", "Span", "StepRecord"]

_log = logging.getLogger("gradwire.telemetry")

# The first four in the order of native/exchange/codec.hpp.
KINDS = ("encode", "decode", "communicate", "importance", "table", "wait")

# What is summed up of buckets, for a step and for the totals.
_SUMMED = ("original_bytes", "bytes_sent", "bytes_received", "n_messages")
_COUNTED = ("n_buckets", "n_fallbacks", *_SUMMED)

# A caller that never closes a step (a bare comm hook) must not make the recorder grow: older steps close by themselves.
_MAX_OPEN_STEPS = 8
# Reasons may hold numbers of their own; the counter of reasons stays bounded all the same.
_MAX_FALLBACK_REASONS = 100


class Span(NamedTuple):
    """One stretch of work of one thread, on the clock `time.perf_counter_ns`."""

    kind: str
    start_ns: int
    end_ns: int
    thread: int


@dataclass(slots=True, eq=False)
class BucketRecord:
    """One bucket in one step. Any thread may add to it until it is closed."""

    step: int
    bucket: int
    original_bytes: int
    lock: threading.Lock
    spans: list[Span] | None = None  # kept only when tracing
    bytes_sent: int = 0
    bytes_received: int = 0
    n_messages: int = 0
    busy_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    # A reason for each time that the scheme sent this bucket (or a part) some plainer way.
    fallbacks: list[str] = field(default_factory=list)
    thread: int = field(default_factory=threading.get_ident)  # which opened it: DDP's hook
    started_ns: int = field(default_factory=time.perf_counter_ns)
    ended_ns: int = 0
    _summed_into: Counter[str] | None = None  # the totals that hold this bucket already

    def add(self, kind: str, start_ns: int, end_ns: int) -> None:
        """Count `end_ns - start_ns` (clock: `time.perf_counter_ns`) as time of `kind`, one of `KINDS`: busy time, of which
        spans of different threads may overlap."""
        assert end_ns >= start_ns, "a span ends before it starts"
        with self.lock:  # `+=` is not atomic, and hook and lane both add
            self.busy_ns[kind] += end_ns - start_ns
        if self.spans is not None:
            self.spans.append(Span(kind, start_ns, end_ns, threading.get_ident()))

    def timing(self, kind: str) -> "BusyTiming":
        """`with record.timing("encode"):` counts the time inside as time of `kind`, unless it ends in an error."""
        return BusyTiming(self, kind)

    def count_exchanged(self, n_bytes: int) -> None:
        """Count a collective in which this rank sent, and received, `n_bytes`."""
        self.count_sent(n_bytes, n_bytes)

    def add_account(
        self, bytes_sent: int, bytes_received: int, n_messages: int, spans: Sequence[tuple[int, int, int]]
    ) -> None:
        """Count one exchange of the native core: its bytes, and its spans of work (place in `KINDS`, start_ns, end_ns)."""
        self._count(bytes_sent, bytes_received, n_messages)
        with self.lock:
            for kind, start_ns, end_ns in spans:
                self.busy_ns[KINDS[kind]] += end_ns - start_ns
        if self.spans is not None:
            thread = threading.get_ident()
            self.spans += [Span(KINDS[kind], start_ns, end_ns, thread) for kind, start_ns, end_ns in spans]

    def count_sent(self, n_bytes: int, n_received: int = 0) -> None:
        """Count one message of `n_bytes`, headers included, that this rank sent, and the bytes that came with it."""
        self._count(n_bytes, n_received, 1)

    def count_received(self, n_bytes: int) -> None:
        """Count `n_bytes`, headers included, that this rank received."""
        self._count(0, n_bytes, 0)

    def _count(self, n_sent: int, n_received: int, n_messages: int) -> None:
        """It may come after the step's end."""
        with self.lock:
            self.bytes_sent += n_sent
            self.bytes_received += n_received
            self.n_messages += n_messages
            if self._summed_into is not None:
                self._summed_into.update(bytes_sent=n_sent, bytes_received=n_received, n_messages=n_messages)

    def as_dict(self) -> dict[str, Any]:
        """Flat, plain values, times in seconds: the fields of a bucket's line in a JSONL log."""
        return {
            **{name: getattr(self, name) for name in ("step", "bucket", *_SUMMED)},
            **_seconds_of(self.busy_ns),
            "duration_s": (self.ended_ns - self.started_ns) / 1e9,
            "fallbacks": list(self.fallbacks),
        }


class BusyTiming:
    """A stretch of time, from where it is made, or from `with`, that is counted when it ends."""

    __slots__ = ("_kind", "_record", "_started_ns")

    def __init__(self, record: BucketRecord, kind: str) -> None:
        self._record, self._kind = record, kind
        self._started_ns = time.perf_counter_ns()

    def end(self) -> None:
        """Count it; on any thread."""
        self._record.add(self._kind, self._started_ns, time.perf_counter_ns())

    def __enter__(self) -> None:
        self._started_ns = time.perf_counter_ns()

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.end()


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The sums over one step's buckets."""

    step: int
    # gradient buckets; traffic outside of them (bucket < 0) is in the bytes and times, not in this count
    n_buckets: int
    original_bytes: int
    # what a ring all-reduce of the gradients as they are sends per rank: 2 (N-1)/N original_bytes
    reference_bytes: float
    bytes_sent: int
    bytes_received: int
    n_messages: int
    n_fallbacks: int
    busy_ns: dict[str, int]  # time by kind
    exposed_ns: int  # how long the training thread stood still for communication, i.e. what no overlap hid.
    iteration_ns: int  # from the previous step's close to this one's; in the first step from its first bucket
    closed_ns: int  # the step closed, on `time.perf_counter_ns`
    scheme: str = ""  # what reduced it, where that may differ from step to step (`auto`); else empty

    @property
    def ratio(self) -> float:
        """bytes_sent / reference_bytes; 1.0 where there is nothing to send (one rank, or no gradients)."""
        return self.bytes_sent / self.reference_bytes if self.reference_bytes else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Flat, plain values, times in seconds: the fields of a step's line in a JSONL log."""
        return {
            "step": self.step,
            "iteration_s": self.iteration_ns / 1e9,
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
            "original_bytes": self.original_bytes,
            "ratio": self.ratio,
            **_seconds_of(self.busy_ns),
            "exposed_s": self.exposed_ns / 1e9,
            "n_buckets": self.n_buckets,
            "n_messages": self.n_messages,
            "n_fallbacks": self.n_fallbacks,
        } | ({"scheme": self.scheme} if self.scheme else {})


class Sink(Protocol):
    """Takes records. Called once a step on the training thread, never for one sink from two threads at once.

    A sink that sets `wants_spans = True` turns tracing on. One that raises is reported once and dropped.
    """

    def write_step(self, step_record: StepRecord, bucket_records: Sequence[BucketRecord]) -> None:
        """Take one closed step and its closed buckets, in the order in which they closed."""
        ...

    def close(self) -> None:
        """Write out what is left; called once."""
        ...


class Recorder:
    """The telemetry of one rank: opens and closes records, keeps totals and the last steps, feeds the sinks. Thread-safe.
    Without tracing its memory does not grow over steps: it keeps 1000 StepRecords and one step's buckets."""

    MAX_STEPS = 1000

    def __init__(self, rank: int, world_size: int, trace: bool = False, sinks: Iterable[Sink] = ()) -> None:
        self.rank = rank
        self.world_size = world_size
        self.trace = trace
        self.steps: deque[StepRecord] = deque(maxlen=self.MAX_STEPS)
        self.fallback_reasons: Counter[str] = Counter()
        self._sinks: list[Sink] = []
        self._lock = threading.Lock()
        self._sink_lock = threading.Lock()  # apart from _lock: a slow disk must not stall the lane
        self._closed: list[BucketRecord] = []
        self._totals: Counter[str] = Counter()
        self._last_step_ns = 0
        self.scheme = ""  # what reduces the steps that close from now on
        for sink in sinks:
            self.add_sink(sink)

    def add_sink(self, sink: Sink) -> None:
        """Feed `sink` from the next closed step on; if it wants spans, buckets opened from now on are traced."""
        self.trace = self.trace or bool(getattr(sink, "wants_spans", False))
        with self._sink_lock:
            self._sinks.append(sink)

    def open_bucket(self, step: int, bucket: int, original_bytes: int) -> BucketRecord:
        """Start the record of DDP's `bucket`, as DDP would send it; -1: traffic of none (preamble, tables), with 0 bytes."""
        oldest = self._closed[0].step if self._closed else step
        if step - oldest >= _MAX_OPEN_STEPS:
            self.close_step(oldest, 0)
        return BucketRecord(step, bucket, original_bytes, self._lock, [] if self.trace else None)

    def open_apart(self) -> BucketRecord:
        """The record of traffic that belongs to no step: what it counts goes straight to the totals."""
        return BucketRecord(0, -1, 0, self._lock, _summed_into=self._totals)

    def close_bucket(self, record: BucketRecord) -> None:
        """End a bucket's record; it counts to its step, or to the next one to close if its own has closed already."""
        record.ended_ns = time.perf_counter_ns()
        with self._lock:
            self._closed.append(record)

    def close_step(self, step: int, exposed_ns: int) -> StepRecord:
        """Sum up the closed buckets of `step`, and of earlier ones that came late, and feed the sinks."""
        now_ns = time.perf_counter_ns()
        with self._lock:
            closed = self._closed
            buckets = [record for record in closed if record.step <= step]
            self._closed = [record for record in closed if record.step > step]
            first_ns = min((record.started_ns for record in buckets), default=now_ns)
            started_ns, self._last_step_ns = self._last_step_ns or first_ns, now_ns
            sums = _sum(buckets)
            step_record = StepRecord(
                step=step,
                **{name: sums[name] for name in _COUNTED},
                reference_bytes=self._ring_bytes(sums),
                busy_ns={kind: sums[kind] for kind in KINDS},
                exposed_ns=exposed_ns,
                iteration_ns=now_ns - started_ns,
                closed_ns=now_ns,
                scheme=self.scheme,
            )
            self.steps.append(step_record)
            self._totals.update(sums, n_steps=1, exposed=exposed_ns, iteration=now_ns - started_ns)
            for record in buckets:
                record._summed_into = self._totals
                for reason in record.fallbacks:
                    if reason in self.fallback_reasons or len(self.fallback_reasons) < _MAX_FALLBACK_REASONS:
                        self.fallback_reasons[reason] += 1
        if self._sinks:
            self._feed_sinks(step_record, buckets)
        return step_record

    def unsummed_buckets(self) -> list[BucketRecord]:
        """List the closed buckets that no closed step has counted yet: their traffic ended after their step did."""
        with self._lock:
            return list(self._closed)

    def totals(self) -> dict[str, float | int]:
        """Sums over all closed steps, and closed buckets that no step has summed up yet: counts, bytes, seconds, and the ratio
        of bytes sent to a plain ring's."""
        with self._lock:
            totals = Counter(self._totals)
            totals.update(_sum(self._closed))
        reference_bytes = self._ring_bytes(totals)
        return {
            **{name: totals[name] for name in ("n_steps", *_COUNTED)},
            "ratio": totals["bytes_sent"] / reference_bytes if reference_bytes else 1.0,
            **{f"{name}_s": totals[name] / 1e9 for name in (*KINDS, "exposed", "iteration")},
        }

    def _ring_bytes(self, sums: Mapping[str, int]) -> float:
        return 2 * (self.world_size - 1) / self.world_size * sums["original_bytes"]

    def close(self) -> None:
        """Close all sinks; the recorder itself stays readable."""
        with self._sink_lock:
            sinks, self._sinks = self._sinks, []
            for sink in sinks:
                try:
                    sink.close()
                # A sink may be the user's own and raise anything; the others are closed all the same.
                except Exception:
                    _log.exception("telemetry sink %s failed to close; its output may be incomplete", _name(sink))

    def _feed_sinks(self, step_record: StepRecord, buckets: Sequence[BucketRecord]) -> None:
        with self._sink_lock:
            for sink in list(self._sinks):
                try:
                    sink.write_step(step_record, buckets)
                # Whatever a sink raises (a full disk, a bug of the user's own), training is worth more than its log.
                except Exception:
                    self._sinks.remove(sink)
                    _log.exception(
                        "telemetry sink %s failed at step %d on rank %d; it is dropped, what it wrote so far is kept, "
                        "training goes on",
                        _name(sink),
                        step_record.step,
                        self.rank,
                    )


def _seconds_of(busy_ns: dict[str, int]) -> dict[str, float]:
    """The fields of a log's line: {"encode_s": ...}."""
    return {f"{kind}_s": ns / 1e9 for kind, ns in busy_ns.items()}


def _sum(buckets: Sequence[BucketRecord]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for record in buckets:
        sums.update({name: getattr(record, name) for name in _SUMMED} | record.busy_ns)
        sums.update(n_buckets=record.bucket >= 0, n_fallbacks=len(record.fallbacks))
    return sums


def _name(sink: Sink) -> str:
    path = getattr(sink, "path", None)
    return type(sink).__name__ + (f" ({path})" if path else "")
