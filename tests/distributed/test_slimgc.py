"""SlimGC: what it conserves, what ranks agree on, and how the threshold table comes about."""

import functools
import io
import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import buckets
from buckets import Driver, flat, mean_over_ranks
from gradwire import codecs, schemes
from gradwire.core.checkpoint import take
from gradwire.errors import InvalidArgument, RankMismatch
from gradwire.exchange.parts import Cut
from gradwire.schemes.slimgc import SlimGC, exchange
from gradwire.schemes.slimgc.exchange import FusedExchange
from gradwire.schemes.slimgc.threshold import NEVER
from gradwire.wire.communicator import Communicator
from gradwire.wire.wire import Wire
from ranks import agree, on_ranks
from small_training import Training

SHAPES = [(24, 18), (7,), (30, 11), (0, 5), (), (50,), (300,)]
LAYOUT = [3, 4]
COARSE = {"codec": "truncate", "bits": 22}  # one bit of mantissa: every value loses something


gradients_of = functools.partial(buckets.gradients_of, shapes=SHAPES)


def by_clock(took: Callable[[int, int], tuple[float, float]]) -> None:
    """From now on the table is made by these times of (a tensor's size, a mode) instead of what the network takes."""
    send_alone = SlimGC._send_alone

    def timed(self: SlimGC, step: int, values: Tensor, mode: int) -> Callable[[], tuple[float, float]]:
        send_alone(self, step, values, mode)()
        return lambda: took(values.numel(), mode)

    SlimGC._send_alone = timed  # type: ignore[method-assign,assignment]


def like_any_network(n_values: int, mode: int) -> tuple[float, float]:
    """For runs that are compared with each other."""
    return (1e-3, 1e-4) if mode else (4e-6 * n_values, 0.0)


def driver_of(scheme: SlimGC, dtype: torch.dtype = torch.float32, layout: Sequence[int] = LAYOUT) -> Driver:
    return Driver(scheme, [torch.zeros(shape, dtype=dtype) for shape in SHAPES], layout)


@on_ranks([2, 3])
def test_gradients_are_conserved_in_every_mode(rank: int, world_size: int) -> None:
    """Through the warm-up every tensor changes mode at every step; after it some are compressed and some are not."""
    cases: list[dict[str, Any]] = [
        {**codec, "topology": topology, "pull": pull, "group_elements": group, "warmup_steps": 4}
        for codec, topology, pull, group in (
            (COARSE, "server", "compressed", 1 << 18),
            (COARSE, "server", "compressed", 200),
            (COARSE, "server", "raw", 150),
            (COARSE, "all-reduce", "compressed", 200),
            # Encoded where they lie, raw tensors between them, as long as there is no loss scale.
            ({"codec": "two-bit"}, "server", "compressed", 200),
            ({"codec": "one-bit"}, "server", "raw", 150),
        )
    ]
    for options in cases:
        dtypes = [(torch.float32, 2e-6 if "bits" in options else 1e-5), (torch.bfloat16, 2e-2)]
        for dtype, tolerance in dtypes if options["group_elements"] > 200 else dtypes[:1]:
            driver = driver_of(SlimGC(**options), dtype)
            old = torch.zeros(flat(gradients_of(0, 0)).numel())
            kinds = set()
            for step in range(8):
                driver.loss_scale = 4.0 if step % 3 and "bits" in options else 1.0
                if step == 4:
                    driver.scheme._threshold = 1_000 if dtype == torch.float32 else 500
                if step == 6:
                    driver.bucket_sizes = [len(SHAPES)]  # as DDP rebuilds them
                gradients = gradients_of(rank, step, dtype)
                if step == 5:
                    gradients[0].zero_()  # unused: DDP throws its result away, so what was left out of it stays
                result = driver.reduce([gradient * driver.loss_scale for gradient in gradients])
                assert agree(flat(result)), (options, dtype, step)
                new = driver.state()
                is_compressed = bool(new.any())
                kinds.add(is_compressed)
                expected = mean_over_ranks(flat(gradients) + old)
                found = flat(result).double() / driver.loss_scale + mean_over_ranks(new)
                assert torch.allclose(found, expected, atol=tolerance, rtol=tolerance), (options, dtype, step)
                if step in (1, 3):
                    assert not is_compressed, "a raw step flushes every residual"
                if step == 5:
                    assert torch.equal(new[: 24 * 18], old[: 24 * 18])
                    assert not result[0].any()
                old = new
            assert kinds == ({True, False} if world_size > 1 else {False})


@on_ranks([2, 3])
def test_tables_are_shared(rank: int, world_size: int) -> None:
    """Ranks that measured different times end with one table, the slowest rank's."""

    def took(n_values: int, mode: int) -> tuple[float, float]:
        line = (1e-3, 1e-6) if mode else (1e-4, 4e-6)
        return line[0] + line[1] * n_values * (1 + 0.1 * rank), 1e-4 if mode else 0.0

    by_clock(took)
    driver = driver_of(SlimGC(**COARSE, warmup_steps=4, drift_every=5))
    for step in range(4):
        driver.reduce(gradients_of(rank, step))
    stats = driver.scheme.stats()
    assert [row["size_bytes"] for row in stats["threshold_table"]] == [4, 28, 200, 1200, 1320, 1728]
    worst = 1 + 0.1 * (world_size - 1)
    assert math.isclose(stats["threshold_table"][-1]["raw_s"], 1e-4 + 4e-6 * 432 * worst)
    # 1e-4 + 4e-6 n w = 1e-3 + 1e-6 n w at n = 300 / w values of 4 bytes.
    assert abs(stats["threshold_bytes"] - 1200 / worst) <= 8, stats["threshold_bytes"]
    assert agree(torch.tensor(stats["threshold_bytes"]))
    driver.reduce(gradients_of(rank, 4))
    stats = driver.scheme.stats()
    assert (stats["n_tensors_compressed"], stats["n_tensors_raw"]) == (3, 4)
    assert 0.9 < stats["share_compressed"] < 1
    # Any one rank's request makes all of them measure again, at the same step.
    driver.scheme._measuring.is_requested = rank == world_size - 1
    counts = []
    for step in range(5, 11):
        driver.reduce(gradients_of(rank, step))
        counts.append(driver.scheme.stats()["threshold_measured"])
    assert counts == [1, 1, 1, 1, 2, 2]
    # The network becomes slower: the first look after the table was made is what later ones are compared with. The
    # rank that waits least says how slow the network is, and here only that rank changes.
    seconds = [1.0 + rank]
    driver.scheme._clock.take_communicate_s = lambda: seconds[0]
    measured = []
    for step in range(11, 30):
        if step == 20:
            seconds[0] = 1.6 + rank
        driver.reduce(gradients_of(rank, step))
        measured.append(driver.scheme.stats()["threshold_measured"])
    assert measured == [2] * 13 + [3] * 6


@on_ranks([2, 3])
def test_non_finite_steps_change_nothing(rank: int, world_size: int) -> None:
    """Inf or NaN in a compressed or a raw tensor of one rank: NaN or Inf there on all of them, and no residual changes."""
    given: list[dict[str, Any]] = [{"codec": name} for name in codecs.names() if name != "gcomp"]
    given += [{"codec": "gcomp", "importance": "none"}, {**COARSE, "topology": "all-reduce"}]
    given += [{"codec": "qsgd", "topology": "all-reduce"}, {"codec": "one-bit", "pull": "raw"}]
    for options in given:
        for tensor, value in ((0, math.nan), (0, -math.inf), (1, math.nan)):
            driver = driver_of(SlimGC(**options, threshold_bytes=400))
            driver.reduce(gradients_of(rank, 0))
            before, n_messages = driver.state(), [bucket.record.n_messages for bucket in driver.last_buckets]
            gradients = gradients_of(rank, 1)
            if rank == world_size - 1:
                gradients[tensor].view(-1)[2] = value
            result = driver.reduce(gradients)
            assert agree(flat(result)), options
            assert not result[tensor].view(-1)[2].isfinite(), options
            assert flat(result[:tensor] + result[tensor + 1 :]).isfinite().all(), options
            assert torch.equal(driver.state(), before), options
            assert driver.scheme.stats()["n_steps_not_finite"] == 1
            assert [bucket.record.n_messages for bucket in driver.last_buckets] == n_messages, "nothing is sent again"
            assert flat(driver.reduce(gradients_of(rank, 2))).isfinite().all()


@on_ranks([2, 3])
def test_all_are_compressed_or_none(rank: int, world_size: int) -> None:
    """A threshold of 0 compresses all; NEVER nothing, which is the mean itself."""
    for threshold, n_compressed in ((0, 6), (NEVER, 0)):
        driver = driver_of(SlimGC(codec="raw", threshold_bytes=threshold))
        result = flat(driver.reduce(gradients_of(rank, 0)))
        expected = mean_over_ranks(flat(gradients_of(rank, 0))).float()
        assert torch.allclose(result, expected, atol=1e-6)
        assert driver.scheme.stats()["n_tensors_compressed"] == n_compressed
        assert not driver.state().any()


# ---- bad input, resumption, ranks that do not agree
def test_any_codec_or_codec_scheme_can_be_wrapped() -> None:
    assert SlimGC("two-bit", threshold=0.25).configuration["codec_options"]["threshold"] == 0.25
    assert SlimGC(codecs.by_name("raw")).codec.name == "raw"
    assert SlimGC(schemes.by_name("gcomp", importance="none")).codec.name == "gcomp"
    assert [SlimGC(*one).codec.name for one in ((), (schemes.by_name("two-bit"),))] == ["one-bit", "two-bit"]
    assert [SlimGC(name).error_feedback for name in ("one-bit", "qsgd", "ternary")] == [True, False, False]


def test_one_step_in_which_a_core_was_taken_does_not_decide() -> None:
    measured, compressed_s = SlimGC()._measuring, (1e-7, 1e-7, 1.0)  # by their mean it would never pay
    measured._times = {4 * n: [(1e-6 * n, None, None), *((None, n * s, 0.0) for s in compressed_s)] for n in (10, 1000)}
    assert measured._agree(mock.Mock()) <= 40


@on_ranks(2)
def test_a_resumed_run_goes_on_bit_by_bit(rank: int, world_size: int) -> None:
    """A run that stops after any step and goes on elsewhere ends with the same bits; tables and residuals included."""
    by_clock(like_any_network)
    for scheme_options in ({"codec": "one-bit"}, {"codec": "qsgd"}, {**COARSE, "topology": "all-reduce"}):
        make = functools.partial(SlimGC, **scheme_options, warmup_steps=4, drift_every=3, drift_factor=1e9)
        whole, parts = driver_of(make()), driver_of(make())
        for step in range(10):
            expected = flat(whole.reduce(gradients_of(rank, step)))
            found = flat(parts.reduce(gradients_of(rank, step)))
            assert torch.equal(found, expected), (scheme_options, step)
            stored = io.BytesIO()
            torch.save(parts.scheme.state_dict(), stored)
            stored.seek(0)
            parts = driver_of(make())
            parts.step = step + 1
            parts.scheme.load_state_dict(torch.load(stored, weights_only=True))
        assert whole.scheme.stats()["threshold_measured"] == 1
        assert 0 < whole.scheme.stats()["n_tensors_compressed"] < 7
        good = whole.scheme.state_dict()
        measuring = good["measuring"]
        bad: dict[str, list[Any]] = {
            "residuals": [None, {"p0": torch.zeros(3)}, {"elsewhere": torch.zeros(432)}],
            "threshold_bytes": [-1],
            "measuring": [{}, {**measuring, "table": [{"size_bytes": 3}]}, {**measuring, "times": 7}],
        }
        for state in ({}, *({**good, key: value} for key, values in bad.items() for value in values)):
            with pytest.raises(InvalidArgument):
                take(whole.scheme, state)
        assert torch.equal(whole.state(), parts.state())


SEVERAL = ["embedded-float:bits=8", "two-bit:levels=4,scale_values=64", "one-bit"]


@on_ranks([2, 3])
def test_each_tensor_gets_one_of_several_codecs_and_gradients_are_conserved(rank: int, world_size: int) -> Tensor:
    """By the clocks given here one-bit pays for the first bucket, and embedded-float, which starts sooner, for the second."""
    lines = [(0.1, 4e-3), (0.2, 2e-3), (2.0, 4e-3), (1.0, 1e-4)]
    by_clock(lambda n_values, mode: (lines[mode][0] + lines[mode][1] * n_values * (1 + 0.1 * rank), 0.0))
    driver = driver_of(SlimGC(SEVERAL, drift_every=0, plain_steps=11))
    old, results = driver.state(), []
    for step in range(16):
        driver.loss_scale = 2.0 ** (step % 3)
        gradients = gradients_of(rank, step)
        found = flat(driver.reduce([one * driver.loss_scale for one in gradients])) / driver.loss_scale
        new = driver.state()
        balance = mean_over_ranks(found + new) - mean_over_ranks(flat(gradients) + old)
        assert float(balance.abs().max()) < 1e-5, step
        assert bool(new.any()) == (step >= 11)
        old = new
        results.append(found)
    stats = driver.scheme.stats()
    state = driver.scheme.state_dict()
    assert stats["codecs"] == {"embedded-float": 3, "one-bit": 3}, stats
    assert stats["n_tensors_raw"] == 1  # the empty one
    resumed = driver_of(SlimGC(SEVERAL, drift_every=0, plain_steps=11))
    resumed.scheme.load_state_dict(state)
    resumed.step = 16
    results.append(flat(resumed.reduce(gradients_of(rank, 16))))
    assert resumed.scheme.stats()["codecs"] == stats["codecs"]
    return torch.stack(results)


@pytest.mark.parametrize("n_before", [0, 2])
@on_ranks(2, raises=RankMismatch, match="configuration")
def test_ranks_with_different_tables_are_told_before_gradients_meet(rank: int, world_size: int, n_before: int) -> None:
    training = Training(rank, SlimGC("one-bit"), timeout_s=100).after(range(n_before))
    state = training.attachment.state_dict()
    state["state"]["threshold_bytes"] = 1_000 + rank
    training.attachment.load_state_dict(state)
    training.take_steps(range(n_before, 4))


@on_ranks([2, 3])
def test_values_are_encoded_where_they_lie_with_the_same_bits(rank: int, world_size: int) -> None:
    """Encoding gradient and residual where they lie gives the bits of encoding their sum beside them, in every mode."""
    mean = FusedExchange.mean

    def of_sum(self: FusedExchange, wire: Wire, cut: Cut, values: Tensor, residual: Tensor | None, *args: Any) -> None:
        total = values.clone() if residual is None else values + residual
        mean(self, wire, cut, total, None, *args)

        def take() -> None:
            for group in itertools.chain(*cut.groups):
                at = group.start
                for size in group.sizes:
                    if size > 0:  # a negative one passes over raw tensors
                        values[at : at + size] = total[at : at + size]
                    at += abs(size)

        wire.communicator.defer(take)

    for options in (
        {"codec": "one-bit"},
        {"codec": "two-bit", "pull": "raw", "group_elements": 100},
        {"codec": "qsgd", "group_elements": 333},
        {"codec": "two-bit", "error_feedback": False},
        {"codec": "one-bit", "threshold_bytes": 100},
    ):
        runs = []
        for method in (mean, of_sum):
            with mock.patch.object(FusedExchange, "mean", method):
                driver = driver_of(SlimGC(**{"threshold_bytes": 0, **options}))
                results = []
                for step in range(5):
                    gradients = gradients_of(rank, step)
                    if step == 3 and rank == 0:
                        gradients[0].zero_()
                    results.append(flat(driver.reduce(gradients)))
                    assert agree(results[-1])
                    results.append(driver.state())
                runs.append(torch.cat(results))
        assert torch.equal(runs[0], runs[1]), options


# ---- buckets on the lane: the next one may begin while the last one's results travel
@on_ranks([2, 3])
def test_buckets_that_overlap_give_the_bits_of_one_after_the_other(rank: int, world_size: int) -> None:
    """Whichever ranks begin the next bucket while results travel: the same bits, and a step with a NaN changes nothing."""
    submit, bytes_ahead = Communicator.submit, exchange._PULL_BYTES_AHEAD

    def in_order(self: Communicator, task: Any, *args: Any, may_overtake: bool = False) -> Any:
        return submit(self, task, *args)

    def all_at_once(self: Communicator, task: Any, *args: Any, may_overtake: bool = False) -> Any:
        if may_overtake and args[0].index == 0:
            submit(self, time.sleep, 0.02)  # the other buckets are there before this one is begun
        return submit(self, task, *args, may_overtake=may_overtake)

    orders = (in_order, all_at_once, all_at_once if rank % 2 else in_order)
    for n_bytes, options in (
        (bytes_ahead, {"codec": "one-bit"}),
        (1, {"codec": "one-bit", "group_elements": 20}),
        (1, {"codec": "two-bit", "group_elements": 64, "pull": "raw"}),
        (bytes_ahead, {**COARSE, "group_elements": 50}),
        (bytes_ahead, {"codec": "one-bit", "topology": "all-reduce"}),
        (bytes_ahead, {"codec": "two-bit", "threshold_bytes": 100}),
    ):
        runs = []
        for order in orders:
            with (
                mock.patch.object(exchange, "_PULL_BYTES_AHEAD", n_bytes),
                mock.patch.object(Communicator, "submit", order),
            ):
                driver = driver_of(SlimGC(**{"threshold_bytes": 0, **options}), layout=[1, 1, 1, 2, 2])
                results = []
                for step in range(5):
                    gradients, before = gradients_of(rank, step), driver.state()
                    if step == 3 and rank == world_size - 1:
                        gradients[2].view(-1)[7] = math.inf
                    reduced = flat(driver.reduce(gradients))
                    assert agree(reduced)
                    results += [reduced.view(torch.int32), driver.state().view(torch.int32)]
                    assert torch.equal(driver.state(), before) == (step == 3)
                assert driver.scheme.stats()["n_steps_not_finite"] == 1
                runs.append(torch.cat(results))
        assert torch.equal(runs[0], runs[1]), options
        assert torch.equal(runs[0], runs[2]), options


@on_ranks(2)
def test_a_raw_bucket_that_is_finite_does_not_hide_a_nan_in_another(rank: int, world_size: int) -> None:
    """The look at a raw bucket's mean, on a thread of the backend's, lasts until the lane has found a NaN in the next one."""
    is_finite = Wire.all_finite

    def slow(self: Wire, values: torch.Tensor) -> bool:
        found = is_finite(self, values)
        if threading.current_thread().name != "gradwire-lane":
            time.sleep(0.2)
        return found

    Wire.all_finite = slow  # type: ignore[method-assign]
    shapes = (7, 300, 300)  # raw, compressed, compressed
    driver = Driver(SlimGC("two-bit", threshold_bytes=100), [torch.zeros(n) for n in shapes], [1, 1, 1])
    for step in range(3):
        gradients, before = [torch.full((n,), 0.1 + step) for n in shapes], driver.state()
        if step == 1:
            gradients[1][7] = math.inf
        driver.reduce(gradients)
        assert torch.equal(before, driver.state()) == (step == 1)
