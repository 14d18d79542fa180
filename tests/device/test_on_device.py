"""Buckets reduced on the late device, by emulated kernels and the backend's collectives: the bits of the CPU."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import test_ddp_on_device as staged
import torch
from late_cases import CPU, Maker, Place, begin_with_kernels, sgd, train_on_both
from torch import Tensor

import gradwire
from awkward_models import build_model
from gradwire import schemes
from gradwire.codecs.general import RawCodec
from gradwire.codecs.hadamard import Thc
from gradwire.exchange.ring import Ring
from gradwire.gpu import kernels
from gradwire.schemes import Scheme, selection
from gradwire.wire.device_wire import DeviceWire
from ranks import on_ranks


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

FEATURES: dict[staged.Feature, list[str]] = {
    staged.view_buckets: [
        "one-bit", "bf16", "power-sgd", "homomorphic, largest", "embedded-float", "gcomp", "slimgc",
    ],
    staged.keep_graph_static: ["two-bit", "acp-sgd", "truncated-float at random", "gcomp"],
    # terngrad and sign-sgd keep no residuals.
    staged.leave_parameters_unused: ["terngrad", "sign-sgd", "truncated-float at random", "gcomp"],
    staged.mix_dtypes: [
        "two-bit", "plain", "one-bit by group, two means", "one-bit, raw sums", "terngrad", "thc", "sign-sgd", "top-k",
        "dgc", "acp-sgd", "homomorphic, largest", "truncated-float at random", "embedded-float direct", "gcomp",
        "gcomp, nothing left out", "gcomp direct", "slimgc of all, qsgd",
    ],
    staged.accumulate_and_clip: ["one-bit", "qsgd", "power-sgd-overlap", "slimgc that measures"],
    staged.join_with_uneven_inputs: ["truncated-float", "gcomp of ten bits"],
    staged.scale_the_loss: [
        "one-bit", "one-bit but for some", "two-bit by group", "two-bit by group, raw sums", "qsgd", "terngrad",
        "sign-sgd", "thc", "plain", "acp-sgd", "power-sgd", "top-k", "dgc", "homomorphic, largest", "truncated-float",
        "gcomp", "slimgc",
    ],
    staged.meet_nan: [
        "plain", "acp-sgd", "power-sgd", "homomorphic, largest", "one-bit", "sign-sgd", "thc", "top-k", "dgc",
        "truncated-float", "embedded-float direct", "gcomp", "gcomp, nothing left out", "slimgc",
    ],
    staged.stop_and_resume: [
        "one-bit", "one-bit by group", "two-bit", "thc", "acp-sgd", "power-sgd", "top-k", "dgc by bucket",
        "homomorphic, largest", "truncated-float at random", "gcomp", "slimgc",
    ],
}  # fmt: skip


@pytest.mark.parametrize("feature", staged.FEATURES)
@on_ranks(2, timeout_s=170)
def test_features_of_ddp_have_their_bits_of_the_cpu(
    rank: int, world_size: int, library: Path, feature: staged.Feature
) -> list[Tensor]:
    _, device = begin_with_kernels(library, 1_000)
    found = staged.compare_features(rank, device, SCHEMES, {feature: FEATURES[feature]})
    return found if feature is staged.meet_nan else []  # which must be alike on all ranks


@on_ranks(2)
def test_a_rank_that_has_run_out_of_input_sends_its_residual(rank: int, world_size: int, library: Path) -> Tensor:
    """A CPU rank keeps its residual then: a device does not look whether a gradient is all zeros. Both lose nothing."""
    _, device = begin_with_kernels(library)
    expected, found = (
        staged.join_with_uneven_inputs(rank, place, by_name("one-bit")) for place in (Place(CPU), device)
    )
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

    def attach(model: Any, scheme: str, options: dict[str, Any] | None = None, placement: str = "device") -> Any:
        return gradwire.attach(
            model, sgd(model.parameters()), schemes.by_name(scheme, **(options or {})), placement=placement
        )

    for scheme, options, says in ON_HOSTS:
        with pytest.raises(gradwire.Unsupported, match=says):
            attach(ddp, scheme, options)
    for model, scheme, says in (
        *((unsure, scheme, "find_unused_parameters=True") for scheme in ("two-bit", "thc")),
        (on_cpu, "one-bit", "this one is on cpu"),
        (build_model(), "one-bit", "is for DDP models"),
    ):
        with pytest.raises(gradwire.Unsupported, match=says):
            attach(model, scheme)
    with pytest.raises(gradwire.Unsupported, match="find_unused_parameters=True"):
        attach(unsure, "homomorphic", {"sparsifier": "top-k"})
    attach(unsure, "homomorphic").close()
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
