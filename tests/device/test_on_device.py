"""Buckets reduced on the late device, by emulated kernels and the backend's collectives: the bits of the CPU; changed
messages, ranks that die or disagree, full memory, planted faults."""

import contextlib
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import test_ddp_on_device as staged
import torch
import torch.distributed as dist
from late import LikeNccl
from late_cases import CPU, Maker, Place, begin_with_kernels, sgd, still, train, train_on_both, training_at
from test_staging import complete_elsewhere
from torch import Tensor

import gradwire
from awkward_models import build_model
from gradwire import reducer, schemes
from gradwire.codecs.general import RawCodec
from gradwire.codecs.hadamard import Thc
from gradwire.exchange.ring import Ring
from gradwire.gpu import kernels
from gradwire.schemes import Scheme, selection
from gradwire.schemes.low_rank import LowRank
from gradwire.wire.communicator import Communicator
from gradwire.wire.device_wire import DeviceGroup, DeviceWire, Reading, ResidentBucket, check_not_captured
from gradwire.wire.wire import StepOutcome
from ranks import on_ranks, patience, run_ranks, try_ranks
from small_training import adamw


def by_name(name: str, **options: Any) -> Scheme:
    """As published, beside AdamW too."""
    return schemes.by_name(name, **schemes.as_published(name, options))


def sparing(name: str, **options: Any) -> Scheme:
    """The model's biases spared, which are more than a fiftieth of it."""
    selection._MAX_SPARED_SHARE = 0.05
    return by_name(name, exempt=None, **options)


PLAIN_NAMES = (
    "plain", "bf16", "truncated-float", "embedded-float", "one-bit", "two-bit", "qsgd", "terngrad", "sign-sgd", "thc",
)  # fmt: skip
SCHEMES: dict[str, Maker] = {
    **{name: lambda name=name: by_name(name) for name in PLAIN_NAMES},
    "truncated-float at random": lambda: by_name(
        "truncated-float", bits=6, rounding="stochastic", seed=7, partition=32, chunk_elements=300
    ),
    "truncated-float direct": lambda: by_name(
        "truncated-float", format="native", bits=12, rounding="stochastic", topology="direct", chunk_elements=400
    ),
    "gcomp": lambda: by_name("gcomp", refresh_every=3),
    "gcomp of ten bits": lambda: by_name("gcomp", importance="uniform", bits=10, topology="direct"),
    "gcomp direct": lambda: by_name("gcomp", importance="uniform", bits=5, topology="direct", refresh_every=0),
    "gcomp, nothing left out": lambda: by_name("gcomp", importance="none", refresh_every=0, chunk_elements=1_000),
    "embedded-float but for biases": lambda: sparing("embedded-float", bits=5),
    "embedded-float direct": lambda: by_name(
        "embedded-float", bits=13, partition=64, topology="direct", chunk_elements=500
    ),
    "one-bit in small messages": lambda: by_name("one-bit", scale="two-means", chunk_elements=500),
    "one-bit without feedback": lambda: by_name("one-bit", error_feedback=False),
    "one-bit after plain steps": lambda: by_name("one-bit", warmup_steps=2),
    "one-bit but for some": lambda: by_name("one-bit", exempt=["*0.weight", "*.bias"]),
    "one-bit by group": lambda: schemes.by_name("one-bit", warmup_steps=1),  # as beside AdamW
    "one-bit by group, two means": lambda: by_name("one-bit", scale="two-means", scale_values=64, chunk_elements=500),
    "one-bit but for biases": lambda: sparing("one-bit"),
    "terngrad but for biases": lambda: sparing("terngrad"),
    "thc but for biases": lambda: sparing("thc"),
    "two-bit by group": lambda: by_name("two-bit", scale_values=128, exempt=["*0.weight"]),
    "two-bit, four levels": lambda: schemes.by_name("two-bit", warmup_steps=1),  # as beside AdamW
    "one-bit, raw sums": lambda: by_name("one-bit", pull="raw", exempt=["*.bias"]),
    "two-bit by group, raw sums": lambda: by_name("two-bit", pull="raw", scale_values=64, chunk_elements=300),
    "qsgd, sums as coarse": lambda: by_name("qsgd", pull="compressed", chunk_elements=500),
    "qsgd, raw sums": lambda: by_name("qsgd", pull="raw"),
    "slimgc": lambda: by_name("slimgc", threshold_bytes=4_000),
    "slimgc of all, qsgd": lambda: by_name("slimgc", codec="qsgd", threshold_bytes=0, group_elements=500),
    "slimgc by group, of none": lambda: by_name("slimgc", scale_values=64, threshold_bytes=1 << 20),
    "slimgc that measures": lambda: by_name("slimgc", codec="two-bit", warmup_steps=4),
    "slimgc without feedback": lambda: by_name("slimgc", threshold_bytes=1_000, error_feedback=False),
    "one-bit-adam": lambda: by_name("one-bit-adam", freeze_step=2),
    "one-bit-adam, running": lambda: by_name(
        "one-bit-adam", codec="qsgd", scale_values=None, freeze_step=1, correction="running", chunk_elements=500
    ),
    "one-bit-adam but for some": lambda: by_name("one-bit-adam", codec="four-level", freeze_step=1, exempt=["*.bias"]),
    "one-bit-adam, raw sums": lambda: by_name("one-bit-adam", freeze_step=1, pull="raw"),
    "terngrad by bucket": lambda: by_name("terngrad", per="bucket", seed=3),
    "sign-sgd, ties are positive": lambda: by_name("sign-sgd", ties="positive"),
    "thc without feedback": lambda: by_name("thc", error_feedback=False, clip=1.5, seed=9),
    "acp-sgd": lambda: by_name("acp-sgd", rank=2, min_compression_rate=0, exempt=()),
    "acp-sgd at the end": lambda: by_name("acp-sgd", rank=2, min_compression_rate=0, overlap=False, start_step=1),
    "acp-sgd, drawn anew": lambda: by_name("acp-sgd", rank=1, reuse=False, buffer_mb=0.0, factor_dtype="bfloat16"),
    "power-sgd": lambda: by_name("power-sgd", rank=2, min_compression_rate=0),
    "homomorphic": lambda: by_name("homomorphic"),  # which is dense here, but for a tensor of its own
    "homomorphic, largest": lambda: by_name("homomorphic", sparsifier="top-k", density=0.05, index="bitmap"),
    "homomorphic, largest without feedback": lambda: by_name(
        "homomorphic", sparsifier="top-k", density=0.3, error_feedback=False
    ),
    "power-sgd-overlap": lambda: by_name("power-sgd-overlap", rank=3, min_compression_rate=0, error_feedback=False),
    "top-k": lambda: by_name("top-k", share=0.1),
    "top-k without feedback": lambda: by_name("top-k", share=0.02, error_feedback=False),
    "top-k after plain steps": lambda: by_name("top-k", share=0.05, warmup_steps=2),
    "dgc": lambda: by_name("dgc", share=0.1),
    "dgc by bucket": lambda: by_name("dgc", share=0.02, per="bucket", nesterov=True, weight_decay=0.01, seed=3),
    "dgc, clipped, in its warm-up": lambda: by_name("dgc", share=0.01, warmup_steps=3, max_norm=0.05, momentum=0.5),
}

SUMS_OF_FLOATS = ("acp-sgd", "power-sgd", "homomorphic")


# ---- bits


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize(("world_size", "latenesses_us"), [(1, [1_000]), (2, [0, 5_000]), (3, [1_000])])
@on_ranks(timeout_s=170)
def test_bits_are_the_cpus(
    rank: int, world_size: int, library: Path, latenesses_us: list[int], half: int
) -> dict[tuple[str, int], Tensor]:
    late, device = begin_with_kernels(library)
    makers = {name: SCHEMES[name] for name in list(SCHEMES)[half::2]}
    # Of more than two ranks the backends add floats each in its own order.
    near = tuple(name for name in makers if world_size > 2 and name.startswith(SUMS_OF_FLOATS))
    return train_on_both(rank, late, device, makers, latenesses_us, near)


@on_ranks(2)
def test_sums_of_two_bytes_are_the_cpus(rank: int, world_size: int, library: Path) -> None:
    late, device = begin_with_kernels(library)
    with mock.patch.object(Thc, "sums_are_wide", staticmethod(lambda n_ranks: True)):  # as past 8 ranks
        train_on_both(rank, late, device, {"thc": SCHEMES["thc"]}, [1_000])


# ---- DDP's features

FEATURES: dict[str, list[str]] = {
    "view_buckets": ["one-bit", "bf16", "power-sgd", "homomorphic, largest", "embedded-float", "gcomp", "slimgc"],
    "keep_graph_static": ["two-bit", "acp-sgd", "truncated-float at random", "gcomp"],
    # terngrad and sign-sgd keep no residuals.
    "leave_parameters_unused": ["terngrad", "sign-sgd", "truncated-float at random", "gcomp"],
    "mix_dtypes": [
        "two-bit", "plain", "one-bit by group, two means", "one-bit, raw sums", "terngrad", "thc", "sign-sgd", "top-k",
        "dgc", "acp-sgd", "homomorphic, largest", "truncated-float at random", "embedded-float direct", "gcomp",
        "gcomp, nothing left out", "gcomp direct", "slimgc of all, qsgd",
    ],
    "accumulate_and_clip": ["one-bit", "qsgd", "power-sgd-overlap", "slimgc that measures"],
    "join_with_uneven_inputs": ["truncated-float", "gcomp of ten bits"],
    "scale_the_loss": [
        "one-bit", "one-bit but for some", "two-bit by group", "two-bit by group, raw sums", "qsgd", "terngrad",
        "sign-sgd", "thc", "plain", "acp-sgd", "power-sgd", "top-k", "dgc", "homomorphic, largest", "truncated-float",
        "gcomp", "slimgc",
    ],
    "meet_nan": [
        "plain", "acp-sgd", "power-sgd", "homomorphic, largest", "one-bit", "sign-sgd", "thc", "top-k", "dgc",
        "truncated-float", "embedded-float direct", "gcomp", "gcomp, nothing left out", "slimgc",
    ],
    "stop_and_resume": [
        "one-bit", "one-bit by group", "two-bit", "thc", "acp-sgd", "power-sgd", "top-k", "dgc by bucket",
        "homomorphic, largest", "truncated-float at random", "gcomp", "slimgc",
    ],
}  # fmt: skip


@pytest.mark.parametrize("feature", staged.FEATURES)
@on_ranks(2, timeout_s=170)
def test_features_of_ddp_have_their_bits_of_the_cpu(
    rank: int, world_size: int, library: Path, feature: str
) -> list[Tensor]:
    _, device = begin_with_kernels(library, 1_000)
    found = staged.compare_features(rank, device, SCHEMES, {feature: FEATURES[feature]})
    return found if feature == "meet_nan" else []  # which must be alike on all ranks


@on_ranks(2)
def test_a_rank_that_has_run_out_of_input_sends_its_residual(rank: int, world_size: int, library: Path) -> Tensor:
    """A CPU rank keeps its residual then: a device does not look whether a gradient is all zeros. Both lose nothing."""
    _, device = begin_with_kernels(library)
    expected, found = (staged.join_with_uneven_inputs(rank, one, by_name("one-bit")) for one in (Place(CPU), device))
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)
    return found


ON_HOSTS: list[tuple[str, dict[str, Any], str]] = [
    ("zlib", {}, "'zlib' works on host memory: leave placement out"),
    ("embedded-float", {"bits": 32}, "bits=32 needs escapes"),
    ("gcomp", {"format": 1}, "leave format=1 out"),
    ("slimgc", {"pull": "raw"}, 'pull="raw"'),
    ("slimgc", {"topology": "all-reduce"}, 'topology="all-reduce"'),
    ("slimgc", {"codec": "gcomp"}, "with one-bit, two-bit and qsgd, not with gcomp"),
    ("homomorphic", {"mode": "exact"}, "mode='exact' works on host memory.*mode=\"packed\""),
    ("homomorphic", {"mode": "sketch"}, 'mode="packed"'),
    ("homomorphic", {"mode": "lossy"}, 'mode="packed"'),
    ("homomorphic", {"index": "bloom"}, 'index="bitmap"'),
    ("homomorphic", {"aggregator": "switch"}, 'aggregator="process-group"'),
]


@on_ranks(1)
def test_what_needs_the_host_says_so(rank: int, world_size: int, library: Path) -> None:
    _, place = begin_with_kernels(library)
    ddp, on_cpu = place.model(build_model()), Place(CPU).model(build_model())
    unsure = place.model(build_model(), find_unused_parameters=True)

    def attach(model: Any, scheme: Any, placement: str = "device") -> Any:
        return gradwire.attach(model, sgd(model.parameters()), scheme, placement=placement)

    for scheme, options, says in ON_HOSTS:
        with pytest.raises(gradwire.Unsupported, match=says):
            attach(ddp, schemes.by_name(scheme, **options))
    for model, scheme, says in (
        *((unsure, one, "find_unused_parameters=True") for one in ("two-bit", "thc", "homomorphic:sparsifier=top-k")),
        (on_cpu, "one-bit", "this one is on cpu"),
        (build_model(), "one-bit", "is for DDP models"),
    ):
        with pytest.raises(gradwire.Unsupported, match=says):
            attach(model, scheme)
    attach(unsure, "homomorphic").close()
    optimizer = adamw(unsure.parameters())
    with pytest.raises(gradwire.Unsupported, match="find_unused_parameters=True"):
        gradwire.attach(unsure, optimizer, by_name("one-bit-adam", freeze_step=2), placement="device")
    assert not optimizer._optimizer_step_pre_hooks, "the optimizer is not as it was"
    with pytest.raises(gradwire.InvalidArgument, match="placement is one of staged, device"):
        attach(ddp, "plain", placement="gpu")
    with pytest.raises(gradwire.Unsupported, match="codec 'raw' works on host memory"):
        Ring(RawCodec()).bind(DeviceWire.__new__(DeviceWire))
    kernels._made.clear()
    with (
        mock.patch.dict(kernels.MAKERS, clear=True),
        pytest.raises(gradwire.Unsupported, match="there are kernels for"),
    ):
        attach(ddp, "one-bit")


# ---- bad input

SUM, COUNT = 0, 2  # words of a message of elements: the sum of the others; of dgc's, how many elements there are


def change_last_byte(received: Any) -> None:
    received[0][-1] ^= 1


def change_word(gathered: Tensor, word: int, bits: int, is_sealed: bool = False) -> None:
    """Of what rank 0 sent, if these are elements; sealed, the sum of the others is right."""
    if gathered.dtype == torch.int32:
        message = gathered.view(2, -1)[0]
        message[word : word + 1].bitwise_xor_(bits)
        if is_sealed:
            message[SUM : SUM + 1].copy_(message[1:].sum())


OF_ELEMENTS = "_allgather_base"
CHANGED = [
    *((name, "alltoall_base", change_last_byte, "checksum") for name in ("one-bit", "one-bit, raw sums")),
    *(
        (name, "alltoall", change_last_byte, "checksum")
        for name in ("embedded-float", "embedded-float direct", "gcomp", "gcomp direct")
    ),
    *(
        (name, OF_ELEMENTS, functools.partial(change_word, word=word, bits=bits), "checksum")
        for name, word, bits in (("top-k", 5, 1 << 22), ("top-k", SUM, 1), ("dgc", 9, 1 << 22))
    ),
    *(
        (name, OF_ELEMENTS, functools.partial(change_word, word=word, bits=bits, is_sealed=True), "outside")
        for name, word, bits in (("top-k", 3, 1 << 30), ("top-k", 3, -(1 << 31)), ("dgc", COUNT, 1 << 20))
    ),
]


@pytest.mark.parametrize(("name", "collective", "change", "says"), CHANGED)
@on_ranks(2)
def test_a_message_that_is_changed_on_its_way(
    rank: int, world_size: int, library: Path, name: str, collective: str, change: Callable[[Any], None], says: str
) -> None:
    """Rank 1 gets something else than rank 0 sent: no mean of it in this step, and an error on all in the next one."""
    _, place = begin_with_kernels(library)
    training = training_at(rank, place, SCHEMES[name](), still)

    def has_nan_mean(step: int) -> bool:
        training.backward(step)
        return bool(training.gradient().isnan().any())

    assert not has_nan_mean(0)
    exchange = getattr(LikeNccl, collective)

    def exchange_and_change(group: LikeNccl, received: Any, *others: Any) -> Any:
        work = exchange(group, received, *others)
        work.wait()
        if rank == 1:
            change(received)
        return work

    with mock.patch.object(LikeNccl, collective, exchange_and_change):
        # Every rank reads all elements by itself; what is pushed to a part's owner is missing from everybody's mean.
        assert has_nan_mean(1) == (rank == 1 or collective != OF_ELEMENTS), "a mean without it was handed out"
    with pytest.raises(gradwire.CorruptMessage, match=says):  # noqa: PT012
        for step in range(2, 4):  # the other ranks hear of it in the same step, or in the next
            training.backward(step)


@on_ranks(2)
def test_the_group_like_nccl_refuses_a_message_of_another_length(rank: int, world_size: int, library: Path) -> None:
    _, place = begin_with_kernels(library)
    group = DeviceGroup(Communicator(), place.device)
    for n_awaited, is_right in ((5, True), (4, False), (6, False)):
        sent, received = (torch.full((n,), rank, dtype=torch.uint8, device=place.device) for n in (5, n_awaited))
        nothing = sent[:0]
        group.exchange([nothing, received] if rank == 0 else [received, nothing], [nothing, sent][:: 1 - 2 * rank])
        assert bool((received.cpu() == 1 - rank).all()) == is_right


@on_ranks(2)
def test_other_factors_are_told(rank: int, world_size: int, library: Path) -> None:
    """Rank 1 comes to hold other factors than it should: all ranks are told a step later."""
    _, place = begin_with_kernels(library)
    scheme = SCHEMES["acp-sgd"]()
    training = training_at(rank, place, scheme, still)
    for step in range(2):  # DDP makes its buckets anew after the first
        training.backward(step)
    training.attachment.stats()  # which waits until the step is settled
    assert isinstance(scheme, LowRank)
    for plan in scheme.plans._plans.values() if rank else ():
        plan.checksum ^= 1
    training.backward(2)
    with pytest.raises(gradwire.RankMismatch, match=r"different factors before bucket . of step 2"):
        training.backward(3)


PLACEMENTS = ["device", "staged"]


def die(rank: int, world_size: int, library: Path, name: str, placement: str, waits: bool) -> tuple[str, float]:
    """In rank 1, in step 2; and what the other is told within how many seconds. `waits`: for the device, in each step."""
    _, place = begin_with_kernels(library, 1_000)
    training = training_at(rank, place._replace(placement=placement), SCHEMES[name]())
    started = time.monotonic()
    try:
        for step in range(6):
            if (rank, step) == (1, 2):
                os._exit(7)
            started = time.monotonic()
            loss = training.backward(step)
            training.optimizer.step()
            if waits:
                float(loss)
    except gradwire.PeerLost as error:
        return str(error), time.monotonic() - started
    return "not noticed", 0.0


@pytest.mark.parametrize(
    ("name", "placement", "waits"),
    [
        ("one-bit", "device", True),
        ("gcomp", "device", True),
        # While the other rank's lane waits for the device, and so for it.
        ("homomorphic, largest", "device", False),
        ("gcomp", "staged", False),
    ],
)
def test_a_rank_that_dies_is_named(library: Path, name: str, placement: str, waits: bool) -> None:
    survivor, dead = try_ranks(die, 2, library, name, placement, waits)
    assert survivor.error is None, survivor.traceback
    said, after_s = survivor.result
    assert "lost rank 1, which" in said
    assert after_s < 20 * patience()
    assert dead.exit_code == 7


@pytest.mark.parametrize("placement", PLACEMENTS)
@on_ranks(2)
def test_ranks_that_disagree(rank: int, world_size: int, library: Path, placement: str) -> None:
    """On the scheme, or in options alone, while layouts are the same."""
    _, place = begin_with_kernels(library)
    for words, names in (("scheme", ("one-bit", "two-bit")), ("config", ("homomorphic", "homomorphic, largest"))):
        training = training_at(rank, place._replace(placement=placement), SCHEMES[names[rank]]())
        with pytest.raises(gradwire.RankMismatch, match=words):
            training.backward(0)


@on_ranks(2)
def test_full_memory_is_said_and_ddp_goes_on(rank: int, world_size: int, library: Path) -> None:
    late, place = begin_with_kernels(library)
    late.set_limits(1 << 40, 1 << 40)
    alone, training = training_at(rank, place, None), training_at(rank, place, SCHEMES["one-bit"]())
    scratch = DeviceWire.scratch

    def ask_for_too_much(self: DeviceWire, name: str, n_elements: int, dtype: torch.dtype) -> Tensor:
        return scratch(self, name, 1 << 41, dtype)

    with (
        mock.patch.object(DeviceWire, "scratch", ask_for_too_much),
        pytest.raises(gradwire.errors.OutOfMemory, match="leave placement"),
    ):
        training.backward(0)
    training.attachment.close()
    for one in (alone, training):
        one.take_steps(range(2))
    assert torch.equal(training.flat(), alone.flat())


# ---- planted faults


@contextlib.contextmanager
def _on_any_stream(self: ResidentBucket) -> Any:
    self._wire.stream.wait_event(self._written)
    with torch.Stream(device=self.on_device.device):
        yield


@contextlib.contextmanager
def _without_waiting(self: ResidentBucket) -> Any:
    with self._wire.at_work():
        yield


FAULTS = {
    "missing wait": lambda: mock.patch.object(ResidentBucket, "at_work", _without_waiting),
    "wrong stream": lambda: mock.patch.object(ResidentBucket, "at_work", _on_any_stream),
    "completed elsewhere": lambda: mock.patch.object(ResidentBucket, "complete", complete_elsewhere),
}


def plant(rank: int, world_size: int, library: Path) -> dict[str, bool]:
    """Which faults made a difference."""
    late, place = begin_with_kernels(library)
    expected = train(rank, Place(CPU), SCHEMES["one-bit"](), 2)
    seen = {}
    late_us = int(50_000 * patience())  # a host that is held up for as long reads what it should have waited for
    for names, all_us, autograds_us in (
        (["wrong stream", "completed elsewhere"], 5_000, 5_000),
        (["missing wait"], 0, late_us),
    ):
        late.set_lateness_us(all_us)
        late.set_stream_lateness_us(0, 0, autograds_us)
        assert torch.equal(train(rank, place, SCHEMES["one-bit"](), 2), expected)
        for name in names:
            with FAULTS[name]():
                seen[name] = not torch.equal(train(rank, place, SCHEMES["one-bit"](), 2), expected)
    site = DeviceWire(Communicator(), [place.device])
    late.set_lateness_us(30_000)
    for name, wait in (("none", Reading.wait), ("verdict read too soon", lambda reading: reading.on_host)):
        site.begin_step()
        with site.stream:
            site.flags.fill_(3)
        site.end_step()
        with mock.patch.object(Reading, "wait", wait):
            seen[name] = site.outcome() != StepOutcome(is_finite=False, error=3)
            assert site.outcome() is None
        site.stream.synchronize()
        site._step.pinned.zero_()
    assert not seen.pop("none")
    dist.barrier()  # rank 0 serves the store, in which rank 1 may still look for a group's addresses
    return seen


def test_each_planted_fault_is_seen(library: Path) -> None:
    by_rank = run_ranks(plant, 2, library)
    assert {name for seen in by_rank for name, is_seen in seen.items() if is_seen} == {*FAULTS, "verdict read too soon"}


@pytest.mark.parametrize("placement", PLACEMENTS)
@on_ranks(1)
def test_a_captured_backward_pass_is_refused(rank: int, world_size: int, library: Path, placement: str) -> None:
    _, place = begin_with_kernels(library)
    training = training_at(rank, place._replace(placement=placement), "one-bit", still)

    def check(device: torch.device) -> None:
        assert device.type == "late"
        check_not_captured(torch.device("cuda"))

    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        mock.patch.object(reducer, "check_not_captured", check),
        pytest.raises(gradwire.Unsupported, match="CUDA graph"),
    ):
        training.backward(0)
