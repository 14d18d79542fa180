"""What of communication and codec work hides behind computation: from intervals, on one rank (SlimGC, Fig. 13)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gradwire.schemes.aqgb.overlap import Interval, length_s, overlap_s, without
from gradwire.telemetry.recorder import BucketRecord, StepRecord

_CODEC_KINDS = ("encode", "decode", "importance", "table")


@dataclass
class Timeline:
    """One method's intervals on `time.perf_counter`, in seconds; a sink of gradwire's recorder.

    Attributes:
        computing: forward and backward passes, up to the last gradient.
        waiting: from there to the end of the optimizer's step.
        communicating: time in which this rank waited for messages or a collective was under way.
        training_codec, other_codec: codec work on the training thread, and on others beside it.
    """

    wants_spans = True

    computing: list[Interval] = field(default_factory=list)
    waiting: list[Interval] = field(default_factory=list)
    communicating: list[Interval] = field(default_factory=list)
    training_codec: list[Interval] = field(default_factory=list)
    other_codec: list[Interval] = field(default_factory=list)
    training_thread: int = field(default_factory=threading.get_ident)

    def note_step(self, started_s: float, last_gradient_s: float, ended_s: float) -> None:
        """One step of the training thread."""
        self.computing.append((started_s, max(started_s, last_gradient_s)))
        self.waiting.append((max(started_s, last_gradient_s), ended_s))

    def extend_last(self, ended_s: float) -> None:
        """The last step's work went on until then: what had been put off was done."""
        self.waiting[-1] = (self.waiting[-1][0], ended_s)

    def write_step(self, step_record: StepRecord, bucket_records: Sequence[BucketRecord]) -> None:
        """Keep the spans of a closed step."""
        self.add(bucket_records)

    def add(self, bucket_records: Iterable[BucketRecord]) -> None:
        """Keep the spans of these buckets."""
        for record in bucket_records:
            for span in record.spans or ():
                interval = (span.start_ns / 1e9, span.end_ns / 1e9)
                if span.kind == "communicate":
                    self.communicating.append(interval)
                elif span.kind in _CODEC_KINDS:
                    is_training = span.thread == self.training_thread
                    (self.training_codec if is_training else self.other_codec).append(interval)

    def close(self) -> None:
        """Nothing is left to write."""

    def measure(self, since_s: float, until_s: float | None = None) -> dict[str, float]:
        """Sums over the steps that began in [since_s, until_s), in seconds.

        Returns:
            overlap_s: computation and communication at once. Codec work on the training thread is not computation.
            exposed_codec_s: codec work that training stood still for: all of it on the training thread; of the rest what
                fell after a step's last gradient.
        """
        end = time.perf_counter() if until_s is None else until_s
        computing = _within(self.computing, since_s, end)
        waiting = _within(self.waiting, since_s, end)
        training_codec = _within(self.training_codec, since_s, end)
        computed = without(computing, training_codec)
        return {
            "overlap_s": overlap_s(computed, self.communicating),
            "exposed_codec_s": length_s(training_codec) + overlap_s(waiting, self.other_codec),
        }


def _within(intervals: Sequence[Interval], since_s: float, until_s: float) -> list[Interval]:
    return [interval for interval in intervals if since_s <= interval[0] < until_s]
