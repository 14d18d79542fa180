"""Buckets on the late device: changed messages, ranks that die or disagree, full memory, planted faults."""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from late import LikeNccl
from late_cases import Place, assert_the_dead_is_named, begin_with_kernels, die_in_step_2, still, train, training_at
from test_on_device import SCHEMES
from test_staging import complete_elsewhere
from torch import Tensor

import gradwire
from gradwire import reducer
from gradwire.schemes.low_rank import LowRank
from gradwire.wire.communicator import Communicator
from gradwire.wire.device_wire import DeviceGroup, DeviceWire, Reading, ResidentBucket, check_not_captured
from gradwire.wire.wire import StepOutcome
from ranks import on_ranks, patience, run_ranks, try_ranks

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
    training.attachment.close()


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
    training.attachment.close()


PLACEMENTS = ["device", "staged"]


def die(rank: int, world_size: int, library: Path, name: str, placement: str, waits: bool) -> tuple[str, float]:
    _, place = begin_with_kernels(library, 1_000)
    return die_in_step_2(training_at(rank, place._replace(placement=placement), SCHEMES[name]()), waits)


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
    assert_the_dead_is_named(*try_ranks(die, 2, library, name, placement, waits))


@pytest.mark.parametrize("placement", PLACEMENTS)
@on_ranks(2)
def test_ranks_that_disagree(rank: int, world_size: int, library: Path, placement: str) -> None:
    """On the scheme, or in options alone, while layouts are the same."""
    _, place = begin_with_kernels(library)
    for words, names in (("scheme", ("one-bit", "two-bit")), ("config", ("homomorphic", "homomorphic, largest"))):
        training = training_at(rank, place._replace(placement=placement), SCHEMES[names[rank]]())
        with pytest.raises(gradwire.RankMismatch, match=words):
            training.backward(0)
        training.attachment.close()


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
    expected = train(rank, Place(torch.device("cpu")), SCHEMES["one-bit"](), 2)
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
    training.attachment.close()
