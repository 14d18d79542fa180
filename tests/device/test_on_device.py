"""Buckets reduced on the late device, by emulated kernels and the backend's collectives: the bits of the CPU."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import emulated
import pytest
import torch
from late import LikeNccl
from late_cases import CPU, N_STEPS, Place, adamw, attach, batch, begin, bits_of, build_model
from test_ddp_on_device import (
    FEATURES,
    Feature,
    accumulate_and_clip,
    join_with_uneven_inputs,
    keep_graph_static,
    leave_parameters_unused,
    meet_nan,
    mix_dtypes,
    scale_the_loss,
    stop_and_resume,
    view_buckets,
)
from test_staged_schemes import counting_waits_of_hooks
from torch import Tensor

import gradwire
from gradwire import schemes
from gradwire.core.site import DeviceSite, ResidentBucket
from gradwire.gpu import kernels
from gradwire.schemes import Scheme
from gradwire.wire.communicator import Communicator
from ranks import run_ranks, try_ranks

Maker = Callable[[], Scheme]


def by_name(name: str, **options: Any) -> Scheme:
    """As published, beside AdamW too."""
    return schemes.by_name(name, **schemes.as_published(name, options))


SCHEMES: dict[str, Maker] = {
    "plain": lambda: by_name("plain"),
    "bf16": lambda: by_name("bf16"),
    "one-bit": lambda: by_name("one-bit"),
    "one-bit in small messages": lambda: by_name("one-bit", scale="two-means", chunk_elements=500),
    "one-bit without feedback": lambda: by_name("one-bit", error_feedback=False),
    "one-bit after plain steps": lambda: by_name("one-bit", warmup_steps=2),
    "one-bit but for some": lambda: by_name("one-bit", exempt=["*0.weight", "*.bias"]),
    "one-bit by group": lambda: schemes.by_name("one-bit", warmup_steps=1),  # as beside AdamW
    "one-bit by group, two means": lambda: by_name("one-bit", scale="two-means", scale_values=64, chunk_elements=500),
    "two-bit": lambda: by_name("two-bit"),
    "two-bit by group": lambda: by_name("two-bit", scale_values=128, exempt=["*0.weight"]),
    "qsgd": lambda: by_name("qsgd"),
    "terngrad": lambda: by_name("terngrad"),
    "terngrad by bucket": lambda: by_name("terngrad", per="bucket", seed=3),
}


def begin_with_kernels(library: Path) -> tuple[Any, Place]:
    late, place = begin(library)
    kernels.MAKERS["late"] = functools.partial(emulated.LateKernels, emulated.build(), late)
    kernels._made.clear()
    return late, place


def train(rank: int, place: Place, scheme: Scheme, n_steps: int = N_STEPS) -> Tensor:
    ddp = place.model(build_model())
    optimizer = adamw(ddp)
    attachment = attach(ddp, optimizer, scheme, **placement_on(place))
    for step in range(n_steps):
        optimizer.zero_grad()
        (ddp(batch(rank, step, place)) - 1.0).square().mean().backward()
        optimizer.step()
    attachment.close()
    return bits_of(ddp)


def placement_on(place: Place) -> dict[str, str]:
    return {} if place.device == CPU else {"placement": "device"}


# ---- bits


def train_on_both(rank: int, world_size: int, library: Path, names: list[str], latenesses_us: list[int]) -> None:
    late, device = begin_with_kernels(library)
    for name in names:
        late.set_lateness_us(0)
        expected = train(rank, Place(CPU), SCHEMES[name]())
        for lateness_us in latenesses_us:
            late.set_lateness_us(lateness_us)
            with counting_waits_of_hooks(late) as waits:
                found = train(rank, device, SCHEMES[name]())
            assert not any(waits), f"{name}: autograd's thread waited for the device"
            assert torch.equal(found, expected), f"{name}, {lateness_us} us: off by {(found - expected).abs().max()}"
    assert late.n_waits_with_gil() == 0, "a thread waited for the device and held up all others"


@pytest.mark.parametrize(("world_size", "latenesses_us"), [(1, [1_000]), (2, [0, 5_000]), (3, [1_000])])
def test_bits_are_the_cpus(library: Path, world_size: int, latenesses_us: list[int]) -> None:
    run_ranks(train_on_both, world_size, library, list(SCHEMES), latenesses_us, timeout_s=170)


# ---- DDP's features

SEVERAL: dict[Feature, list[str]] = {
    view_buckets: ["one-bit", "bf16"],
    keep_graph_static: ["two-bit"],
    mix_dtypes: ["two-bit", "plain", "one-bit by group, two means", "terngrad"],
    accumulate_and_clip: ["one-bit", "qsgd"],
    scale_the_loss: ["one-bit", "one-bit but for some", "two-bit by group", "qsgd", "terngrad", "plain"],
    meet_nan: ["plain"],
    stop_and_resume: ["one-bit", "one-bit by group", "two-bit"],
}


def compare_features(rank: int, world_size: int, library: Path) -> None:
    late, device = begin_with_kernels(library)
    late.set_lateness_us(1_000)
    for feature, names in SEVERAL.items():
        for name in names:
            expected = feature(rank, Place(CPU), SCHEMES[name]())
            with mock.patch.object(gradwire, "attach", functools.partial(gradwire.attach, placement="device")):
                found = feature(rank, device, SCHEMES[name]())
            assert torch.equal(found, expected), f"{feature.__name__}, {name}: off by {(found - expected).abs().max()}"


def test_features_of_ddp_have_their_bits_of_the_cpu(library: Path) -> None:
    elsewhere = {leave_parameters_unused, join_with_uneven_inputs}
    assert set(SEVERAL) | elsewhere == set(FEATURES), "a feature of the staged tests is not here"
    run_ranks(compare_features, 2, library, timeout_s=170)


def join(rank: int, world_size: int, library: Path) -> tuple[Tensor, Tensor]:
    _, device = begin_with_kernels(library)
    expected = join_with_uneven_inputs(rank, Place(CPU), SCHEMES["one-bit"]())
    with mock.patch.object(gradwire, "attach", functools.partial(gradwire.attach, placement="device")):
        return expected, join_with_uneven_inputs(rank, device, SCHEMES["one-bit"]())


def test_a_rank_that_has_run_out_of_input_sends_its_residual(library: Path) -> None:
    """A CPU rank keeps its residual then: a device does not look whether a gradient is all zeros. Both lose nothing."""
    (expected, first), (_, second) = run_ranks(join, 2, library)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected, atol=2e-3, rtol=0)


def compare_nans(rank: int, world_size: int, library: Path) -> tuple[Tensor, Tensor]:
    _, device = begin_with_kernels(library)
    expected = meet_nan(rank, Place(CPU), SCHEMES["one-bit"]())
    with mock.patch.object(gradwire, "attach", functools.partial(gradwire.attach, placement="device")):
        return expected, meet_nan(rank, device, SCHEMES["one-bit"]())


def test_a_message_with_a_nan_is_nan_altogether(library: Path) -> None:
    """On a CPU, where the bucket is sent again plainly, only the values are that are NaN in their sum."""
    (expected, first), (_, second) = run_ranks(compare_nans, 2, library)
    assert torch.equal(first, second)
    was_nan, is_nan = expected == 12345.0, first == 12345.0
    assert bool(was_nan.any())
    assert bool((was_nan <= is_nan).all())
    assert torch.equal(first[~is_nan], expected[~is_nan])


def refuse(rank: int, world_size: int, library: Path) -> None:
    _, place = begin_with_kernels(library)
    ddp, on_cpu = place.model(build_model()), Place(CPU).model(build_model())
    unsure = place.model(build_model(), find_unused_parameters=True)
    for model, scheme, says in (
        (ddp, "gcomp", "'gcomp' works on host memory: leave placement out"),
        (ddp, "auto", "'auto' works on host memory"),
        (ddp, schemes.by_name("one-bit", pull="raw"), 'pull="raw"'),
        (unsure, "two-bit", "find_unused_parameters=True"),
        (on_cpu, "one-bit", "this one is on cpu"),
        (build_model(), "one-bit", "is for DDP models"),
    ):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(gradwire.Unsupported, match=says):
            gradwire.attach(model, optimizer, scheme, placement="device")
    with pytest.raises(gradwire.InvalidArgument, match="placement is one of staged, device"):
        gradwire.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), "plain", placement="gpu")
    kernels._made.clear()
    with (
        mock.patch.dict(kernels.MAKERS, clear=True),
        pytest.raises(gradwire.Unsupported, match="there are kernels for"),
    ):
        gradwire.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), "one-bit", placement="device")


def test_what_needs_the_host_says_so(library: Path) -> None:
    run_ranks(refuse, 1, library)


# ---- what the backend is asked for


def count_collectives(rank: int, world_size: int, library: Path) -> None:
    late, place = begin_with_kernels(library)
    twice = ("one-bit", "one-bit in small messages", "one-bit by group, two means", "qsgd", "terngrad")
    for name, per_bucket in (*((name, 2) for name in twice), ("plain", 1)):
        n_groups = len(LikeNccl.made)
        train(rank, place, SCHEMES[name](), n_steps=0)
        (own,) = LikeNccl.made[n_groups:]
        assert own.n_started == 0
        with counting_waits_of_hooks(late) as waits:
            train(rank, place, SCHEMES[name]())
        assert LikeNccl.made[-1].n_started == per_bucket * len(waits)


def test_two_collectives_a_bucket(library: Path) -> None:
    run_ranks(count_collectives, 2, library)


# ---- bad input


def meet_a_changed_message(rank: int, world_size: int, library: Path) -> None:
    """Rank 1 gets a changed byte of what rank 0 pushed: NaN on all ranks in this step, an error on all in the next one."""
    _, place = begin_with_kernels(library)
    ddp = place.model(build_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0)
    attachment = attach(ddp, optimizer, SCHEMES["one-bit"](), placement="device")

    def backward(step: int) -> bool:
        optimizer.zero_grad()
        ddp(batch(rank, step, place)).square().mean().backward()
        return bool(torch.cat([p.grad.view(-1).cpu() for p in ddp.parameters() if p.grad is not None]).isnan().any())

    assert not backward(0)
    alltoall = LikeNccl.alltoall_base

    def change(group: LikeNccl, output: Tensor, tensor: Tensor, *sizes: Any) -> Any:
        work = alltoall(group, output, tensor, *sizes)
        work.wait()
        if rank == 1:
            output[0, 40] ^= 1
        return work

    with mock.patch.object(LikeNccl, "alltoall_base", change):
        assert backward(1), "a mean without what rank 0 sent was handed out"

    def go_on() -> None:
        for step in range(2, 4):  # the other ranks hear of it in the same step, or in the next
            backward(step)

    with pytest.raises(gradwire.CorruptMessage, match="checksum"):
        go_on()
    attachment.close()


def test_a_message_that_is_changed_on_its_way(library: Path) -> None:
    run_ranks(meet_a_changed_message, 2, library)


def die(rank: int, world_size: int, library: Path) -> tuple[str, float]:
    late, place = begin_with_kernels(library)
    late.set_lateness_us(1_000)
    ddp = place.model(build_model())
    optimizer = adamw(ddp)
    attach(ddp, optimizer, SCHEMES["one-bit"](), placement="device")
    started = time.monotonic()
    try:
        for step in range(6):
            if (rank, step) == (1, 2):
                os._exit(7)
            started = time.monotonic()
            optimizer.zero_grad()
            loss = ddp(batch(rank, step, place)).square().mean()
            loss.backward()
            optimizer.step()
            float(loss)
    except gradwire.PeerLost as error:
        return str(error), time.monotonic() - started
    return "not noticed", 0.0


def test_a_rank_that_dies_is_named(library: Path) -> None:
    survivor, dead = try_ranks(die, 2, library)
    assert survivor.error is None, survivor.traceback
    said, after_s = survivor.result
    assert "lost its peers" in said
    assert after_s < 20
    assert dead.exit_code == 7


def disagree(rank: int, world_size: int, library: Path) -> None:
    """On the scheme, and on where it works."""
    _, place = begin_with_kernels(library)
    ddp = place.model(build_model())
    attachment = attach(ddp, adamw(ddp), SCHEMES["two-bit" if rank else "one-bit"](), placement="device")
    with pytest.raises(gradwire.RankMismatch, match="scheme"):
        ddp(batch(rank, 0, place)).square().mean().backward()
    attachment.close()


def test_ranks_that_disagree(library: Path) -> None:
    run_ranks(disagree, 2, library)


def run_out_of_memory(rank: int, world_size: int, library: Path) -> None:
    late, place = begin_with_kernels(library)
    late.set_limits(1 << 40, 1 << 40)
    alone, ddp = place.model(build_model()), place.model(build_model())
    optimizer_alone, optimizer = adamw(alone), adamw(ddp)
    attachment = attach(ddp, optimizer, SCHEMES["one-bit"](), placement="device")

    scratch = DeviceSite.scratch

    def ask_for_too_much(self: DeviceSite, name: str, n_elements: int, dtype: torch.dtype) -> Tensor:
        return scratch(self, name, 1 << 41, dtype)

    loss = ddp(batch(rank, 0, place)).square().mean()
    with (
        mock.patch.object(DeviceSite, "scratch", ask_for_too_much),
        pytest.raises(gradwire.errors.OutOfMemory, match="leave placement"),
    ):
        loss.backward()
    attachment.close()
    optimizer.zero_grad()
    for step in range(2):
        for model, steps in ((alone, optimizer_alone), (ddp, optimizer)):
            steps.zero_grad()
            model(batch(rank, step, place)).square().mean().backward()
            steps.step()
    assert torch.equal(bits_of(ddp), bits_of(alone))


def test_full_memory_is_said_and_ddp_goes_on(library: Path) -> None:
    run_ranks(run_out_of_memory, 2, library)


# ---- planted faults


def _do_nothing(*arguments: Any) -> None:
    pass


@contextlib.contextmanager
def _on_any_stream(self: ResidentBucket) -> Any:
    self._follow()
    with torch.Stream(device=self.on_device.device):
        yield self._site


def _complete_elsewhere(self: ResidentBucket, reduced: torch.futures.Future) -> None:
    reduced.set_result(self.on_device)


FAULTS = {
    "missing wait": lambda: mock.patch.object(ResidentBucket, "_follow", _do_nothing),
    "wrong stream": lambda: mock.patch.object(ResidentBucket, "at_work", _on_any_stream),
    "completed elsewhere": lambda: mock.patch.object(ResidentBucket, "complete", _complete_elsewhere),
}


def plant(rank: int, world_size: int, library: Path) -> dict[str, bool]:
    """Which faults made a difference."""
    late, place = begin_with_kernels(library)
    expected = train(rank, Place(CPU), SCHEMES["one-bit"](), 2)
    seen = {}
    for names, all_us, autograds_us in (
        (["wrong stream", "completed elsewhere"], 5_000, 5_000),
        (["missing wait"], 0, 20_000),
    ):
        late.set_lateness_us(all_us)
        late.set_stream_lateness_us(0, 0, autograds_us)
        assert torch.equal(train(rank, place, SCHEMES["one-bit"](), 2), expected)
        for name in names:
            with FAULTS[name]():
                seen[name] = not torch.equal(train(rank, place, SCHEMES["one-bit"](), 2), expected)
    site = DeviceSite(Communicator(), [place.device])
    late.set_lateness_us(30_000)
    for name, arrival in (("none", None), ("verdict read too soon", mock.Mock())):
        site.begin_step()
        with site.stream:
            site.flags.fill_(3)
        site.end_step()
        site._arrival = arrival or site._arrival
        seen[name] = site.found() != (3, False)
        assert site.found() is None
        site._on_host.zero_()
    assert not seen.pop("none")
    return seen


def test_each_planted_fault_is_seen(library: Path) -> None:
    by_rank = run_ranks(plant, 2, library)
    assert {name for seen in by_rank for name, is_seen in seen.items() if is_seen} == {*FAULTS, "verdict read too soon"}
