"""Buckets reduced on the late device, by emulated kernels and the backend's collectives: the bits of the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import emulated
import pytest
import torch
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
from gradwire.codecs.hadamard import Thc
from gradwire.gpu import kernels
from gradwire.schemes import Scheme, selection
from ranks import assert_alike, on_ranks, run_ranks

Maker = Callable[[], Scheme]


def by_name(name: str, **options: Any) -> Scheme:
    """As published, beside AdamW too."""
    return schemes.by_name(name, **schemes.as_published(name, options))


def sparing(name: str, **options: Any) -> Scheme:
    """The model's biases spared, which are more than a fiftieth of it."""
    selection._MAX_SPARED_SHARE = 0.05
    return by_name(name, exempt=None, **options)


SCHEMES: dict[str, Maker] = {
    "plain": lambda: by_name("plain"),
    "bf16": lambda: by_name("bf16"),
    "truncated-float": lambda: by_name("truncated-float"),
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
    "embedded-float": lambda: by_name("embedded-float"),
    "embedded-float but for biases": lambda: sparing("embedded-float", bits=5),
    "embedded-float direct": lambda: by_name(
        "embedded-float", bits=13, partition=64, topology="direct", chunk_elements=500
    ),
    "one-bit": lambda: by_name("one-bit"),
    "one-bit in small messages": lambda: by_name("one-bit", scale="two-means", chunk_elements=500),
    "one-bit without feedback": lambda: by_name("one-bit", error_feedback=False),
    "one-bit after plain steps": lambda: by_name("one-bit", warmup_steps=2),
    "one-bit but for some": lambda: by_name("one-bit", exempt=["*0.weight", "*.bias"]),
    "one-bit by group": lambda: schemes.by_name("one-bit", warmup_steps=1),  # as beside AdamW
    "one-bit by group, two means": lambda: by_name("one-bit", scale="two-means", scale_values=64, chunk_elements=500),
    "two-bit": lambda: by_name("two-bit"),
    "one-bit but for biases": lambda: sparing("one-bit"),
    "terngrad but for biases": lambda: sparing("terngrad"),
    "thc but for biases": lambda: sparing("thc"),
    "two-bit by group": lambda: by_name("two-bit", scale_values=128, exempt=["*0.weight"]),
    "two-bit, four levels": lambda: schemes.by_name("two-bit", warmup_steps=1),  # as beside AdamW
    "qsgd": lambda: by_name("qsgd"),
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
    "terngrad": lambda: by_name("terngrad"),
    "terngrad by bucket": lambda: by_name("terngrad", per="bucket", seed=3),
    "sign-sgd": lambda: by_name("sign-sgd"),
    "sign-sgd, ties are positive": lambda: by_name("sign-sgd", ties="positive"),
    "thc": lambda: by_name("thc"),
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


def train_on_both(
    rank: int, world_size: int, library: Path, names: list[str], latenesses_us: list[int]
) -> dict[tuple[str, int], Tensor]:
    late, device = begin_with_kernels(library)
    trained = {}
    for name in names:
        late.set_lateness_us(0)
        expected = train(rank, Place(CPU), SCHEMES[name]())
        for lateness_us in latenesses_us:
            late.set_lateness_us(lateness_us)
            with counting_waits_of_hooks(late) as waits:
                found = train(rank, device, SCHEMES[name]())
            assert not any(waits), f"{name}: autograd's thread waited for the device"
            # Of more than two ranks the backends add floats each in its own order.
            most = 1e-5 if world_size > 2 and name.startswith(SUMS_OF_FLOATS) else 0.0
            off = float((found - expected).abs().max())
            assert off <= most, f"{name}, {lateness_us} us: off by {off}"
            trained[name, lateness_us] = found
    assert late.n_waits_with_gil() == 0, "a thread waited for the device and held up all others"
    return trained


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize(("world_size", "latenesses_us"), [(1, [1_000]), (2, [0, 5_000]), (3, [1_000])])
def test_bits_are_the_cpus(library: Path, world_size: int, latenesses_us: list[int], half: int) -> None:
    names = list(SCHEMES)[half::2]
    assert_alike(run_ranks(train_on_both, world_size, library, names, latenesses_us, timeout_s=170))


@on_ranks(2)
def test_sums_of_two_bytes_are_the_cpus(rank: int, world_size: int, library: Path) -> None:
    with mock.patch.object(Thc, "sums_are_wide", staticmethod(lambda n_ranks: True)):  # as past 8 ranks
        train_on_both(rank, world_size, library, ["thc"], [1_000])


# ---- DDP's features

SEVERAL: dict[Feature, list[str]] = {
    view_buckets: ["one-bit", "bf16", "power-sgd", "homomorphic, largest"],
    keep_graph_static: ["two-bit", "acp-sgd"],
    leave_parameters_unused: ["terngrad", "sign-sgd"],  # which keep no residuals
    mix_dtypes: [
        "two-bit",
        "plain",
        "one-bit by group, two means",
        "one-bit, raw sums",
        "terngrad",
        "thc",
        "sign-sgd",
        "top-k",
        "dgc",
        "acp-sgd",
        "homomorphic, largest",
    ],
    accumulate_and_clip: ["one-bit", "qsgd", "power-sgd-overlap"],
    scale_the_loss: [
        "one-bit",
        "one-bit but for some",
        "two-bit by group",
        "two-bit by group, raw sums",
        "qsgd",
        "terngrad",
        "sign-sgd",
        "thc",
        "plain",
        "acp-sgd",
        "power-sgd",
        "top-k",
        "dgc",
        "homomorphic, largest",
    ],
    meet_nan: ["plain", "acp-sgd", "power-sgd", "homomorphic, largest"],
    stop_and_resume: [
        "one-bit",
        "one-bit by group",
        "two-bit",
        "thc",
        "acp-sgd",
        "power-sgd",
        "top-k",
        "dgc by bucket",
        "homomorphic, largest",
    ],
}


def on_both(feature: Feature, rank: int, device: Place, name: str) -> tuple[Tensor, Tensor]:
    """What a feature comes to on the CPU, and on the device."""
    expected = feature(rank, Place(CPU), SCHEMES[name]())
    with mock.patch.object(gradwire, "attach", functools.partial(gradwire.attach, placement="device")):
        return expected, feature(rank, device, SCHEMES[name]())


def compare_features(rank: int, world_size: int, library: Path, features: dict[Feature, list[str]] = SEVERAL) -> None:
    late, device = begin_with_kernels(library)
    late.set_lateness_us(1_000)
    for feature, names in features.items():
        for name in names:
            expected, found = on_both(feature, rank, device, name)
            assert torch.equal(found, expected), f"{feature.__name__}, {name}: off by {(found - expected).abs().max()}"


def test_features_of_ddp_have_their_bits_of_the_cpu(library: Path) -> None:
    assert {*SEVERAL, join_with_uneven_inputs} == set(FEATURES), "a feature of the staged tests is not here"
    run_ranks(compare_features, 2, library, timeout_s=170)


@on_ranks(2)
def test_a_rank_that_has_run_out_of_input_sends_its_residual(rank: int, world_size: int, library: Path) -> Tensor:
    """A CPU rank keeps its residual then: a device does not look whether a gradient is all zeros. Both lose nothing."""
    _, device = begin_with_kernels(library)
    expected, found = on_both(join_with_uneven_inputs, rank, device, "one-bit")
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)
    return found


@pytest.mark.parametrize("name", ["one-bit", "sign-sgd", "acp-sgd", "thc", "top-k", "dgc"])
@on_ranks(2)
def test_a_message_with_a_nan_is_nan_altogether_as_on_the_cpu(
    rank: int, world_size: int, library: Path, name: str
) -> Tensor:
    _, device = begin_with_kernels(library)
    expected, found = on_both(meet_nan, rank, device, name)
    assert torch.equal(found, expected)
    assert bool((expected == 12345.0).any())
    return found


@on_ranks(1)
def test_what_needs_the_host_says_so(rank: int, world_size: int, library: Path) -> None:
    _, place = begin_with_kernels(library)
    ddp, on_cpu = place.model(build_model()), Place(CPU).model(build_model())
    unsure = place.model(build_model(), find_unused_parameters=True)
    for model, scheme, says in (
        (ddp, "zlib", "'zlib' works on host memory: leave placement out"),
        (ddp, schemes.by_name("embedded-float", bits=32), "bits=32 needs escapes"),
        (unsure, "two-bit", "find_unused_parameters=True"),
        (unsure, "thc", "find_unused_parameters=True"),
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
