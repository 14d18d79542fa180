"""The recorder counts what happened, from any thread, and stays small."""

import logging
import threading
import tracemalloc

import pytest

from gradwire.telemetry.recorder import KINDS, BucketRecord, Recorder, StepRecord
from meshes import at_once


def run_step(recorder: Recorder, step: int, n_buckets: int = 3) -> StepRecord:
    for bucket in range(n_buckets):
        record = recorder.open_bucket(step, bucket, 4000)
        record.add("encode", 100, 110)
        record.add("communicate", 110, 150)
        record.count_sent(600)
        record.count_received(700)
        recorder.close_bucket(record)
    return recorder.close_step(step, 5)


def test_step_record_sums_its_buckets_and_compares_them_with_a_plain_ring() -> None:
    step = run_step(Recorder(rank=0, world_size=4), 7)
    assert (step.step, step.n_buckets, step.original_bytes) == (7, 3, 12000)
    assert (step.bytes_sent, step.bytes_received, step.n_messages) == (1800, 2100, 3)
    assert (*(step.busy_ns[kind] for kind in ("encode", "communicate", "decode")), step.exposed_ns) == (30, 120, 0, 5)
    assert step.ratio == 1800 / 18000, "2 (4-1)/4 of 12000 bytes is what a ring sends"


def test_one_rank_has_ratio_one() -> None:
    recorder = Recorder(rank=0, world_size=1)
    recorder.close_bucket(recorder.open_bucket(0, 0, 4000))
    assert recorder.close_step(0, 0).ratio == 1.0
    assert recorder.totals()["ratio"] == 1.0


def test_every_kind_of_time_is_summed_apart() -> None:
    recorder = Recorder(rank=0, world_size=2)
    record = recorder.open_bucket(0, 0, 4)
    for number, kind in enumerate(KINDS):
        record.add(kind, 10, 30)
        record.add(kind, 40, 45 + number)
    recorder.close_bucket(record)
    found = recorder.close_step(0, 0).as_dict()
    assert [found[f"{kind}_s"] for kind in KINDS] == [(25 + number) / 1e9 for number in range(len(KINDS))]


def test_totals_outlive_the_bounded_list_of_steps() -> None:
    recorder = Recorder(rank=0, world_size=4)
    for step in range(Recorder.MAX_STEPS + 5):
        run_step(recorder, step, n_buckets=1)
    assert len(recorder.steps) == Recorder.MAX_STEPS
    totals = recorder.totals()
    assert totals["n_steps"] == Recorder.MAX_STEPS + 5
    assert totals["bytes_sent"] == 600 * (Recorder.MAX_STEPS + 5)
    assert totals["exposed_s"] == pytest.approx(5e-9 * (Recorder.MAX_STEPS + 5))


def test_memory_does_not_grow_over_steps_without_tracing() -> None:
    recorder = Recorder(rank=0, world_size=4)
    tracemalloc.start()
    for step in range(Recorder.MAX_STEPS + 10):  # fills the bounded deque
        run_step(recorder, step)
    before, _ = tracemalloc.get_traced_memory()
    for step in range(Recorder.MAX_STEPS + 10, 2 * Recorder.MAX_STEPS):
        run_step(recorder, step)
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert after - before < 20 * Recorder.MAX_STEPS  # not even 20 bytes a step


def test_steps_that_nobody_closes_close_by_themselves() -> None:
    recorder = Recorder(rank=0, world_size=2)
    for step in range(100):
        record = recorder.open_bucket(step, 0, 4)
        record.count_sent(4)
        recorder.close_bucket(record)
    assert [record.step for record in recorder.steps] == list(range(92))
    recorder.close_step(99, 0)
    assert recorder.totals()["bytes_sent"] == 400


def test_totals_hold_what_was_sent_after_the_last_step_had_closed() -> None:
    recorder = Recorder(rank=0, world_size=2)
    early, late = recorder.open_bucket(0, 0, 4), recorder.open_bucket(0, 1, 8)
    early.count_sent(4)
    recorder.close_bucket(early)
    recorder.close_step(0, 0)
    late.count_sent(8)
    late.count_received(5)
    late.add("communicate", 10, 40)
    recorder.close_bucket(late)  # no step comes that would sum it up
    early.count_sent(16)  # and a message that ended after its bucket
    apart = recorder.open_apart()
    apart.count_sent(32)
    apart.count_received(64)
    for _ in range(2):  # with the next step, and without
        totals = recorder.totals()
        assert totals["bytes_sent"] == 4 + 8 + 16 + 32
        assert (totals["bytes_received"], totals["n_messages"]) == (5 + 64, 4)
        assert (totals["n_buckets"], totals["original_bytes"]) == (2, 12)
        assert totals["communicate_s"] == 30e-9
        recorder.close_step(1, 0)
    assert sum(step.bytes_sent for step in recorder.steps) == 4 + 8


def test_bucket_that_closes_late_counts_to_the_next_step() -> None:
    recorder = Recorder(rank=0, world_size=2)
    late = recorder.open_bucket(0, -1, 0)
    late.count_sent(64)
    run_step(recorder, 0)
    recorder.close_bucket(late)
    step = run_step(recorder, 1)
    assert step.bytes_sent == 3 * 600 + 64
    assert step.n_buckets == 3  # traffic outside buckets is no bucket


def test_hook_and_lane_may_count_at_once() -> None:
    recorder = Recorder(rank=0, world_size=2)
    record = recorder.open_bucket(0, 0, 4)

    def work() -> None:
        for _ in range(5000):
            record.add("encode", 0, 1)
            record.count_sent(1)
            record.count_received(2)

    assert at_once(*[work] * 4) == [None] * 4
    assert (record.busy_ns["encode"], record.n_messages) == (20000, 20000)
    assert (record.bytes_sent, record.bytes_received) == (20000, 40000)


def test_spans_are_kept_with_their_thread_only_when_tracing() -> None:
    record = Recorder(0, 2, trace=True).open_bucket(0, 0, 4)
    record.add("encode", 3, 4)
    assert record.spans == [("encode", 3, 4, threading.get_ident())]
    assert Recorder(0, 2).open_bucket(0, 0, 4).spans is None


def test_fallbacks_are_counted_by_reason() -> None:
    recorder = Recorder(0, 2)
    for step in range(3):
        record = recorder.open_bucket(step, 0, 4)
        record.fallbacks.append("non-finite gradient")
        recorder.close_bucket(record)
        recorder.close_step(step, 0)
    assert recorder.totals()["n_fallbacks"] == 3
    assert recorder.fallback_reasons == {"non-finite gradient": 3}


class ListSink:
    path = "some.log"

    def __init__(self, is_broken: bool = False) -> None:
        self.is_broken, self.closed = is_broken, False
        self.steps: list[int] = []

    def write_step(self, step_record: StepRecord, bucket_records: list[BucketRecord]) -> None:
        self.steps.append(step_record.step)
        if self.is_broken:
            raise OSError("no space left on device")

    def close(self) -> None:
        assert not self.is_broken, "a dropped sink is not closed again"
        self.closed = True


def test_failing_sink_is_reported_once_and_dropped_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    broken, good = ListSink(is_broken=True), ListSink()
    recorder = Recorder(0, 2, sinks=[broken, good])
    with caplog.at_level(logging.ERROR, logger="gradwire.telemetry"):
        for step in range(3):
            run_step(recorder, step)
        recorder.close()
    assert broken.steps == [0]
    assert good.steps == [0, 1, 2]
    assert good.closed
    (message,) = (record.getMessage() for record in caplog.records)
    assert "some.log" in message
    assert "step 0 on rank 0" in message
