"""Kernels run on the host: the CPU codecs' bytes in every order of threads."""

import contextlib
from typing import Any

import pytest
import torch
from emulated import kernels
from kernel_checks import FAMILIES, FLOAT_EDGES, GCOMP_SIZES, ORDERS, SELECTED, WIDE_FLOATS, run

from gradwire.codecs import packed_values
from gradwire.codecs.hadamard import Thc
from gradwire.codecs.packed_values import HEAD_WORDS
from gradwire.codecs.ternary import Ternary
from gradwire.gpu.driver import CudaKernels
from gradwire.gpu.kernels import using

FORWARD, OTHERS, BY_CHANCE = (0,), ORDERS[1:], (7,)
GRADIENT: dict[str, Any] = {"content": ("gradient",)}
FLOAT32: dict[str, Any] = {"dtype": (torch.float32,)}
WIDE: dict[str, Any] = {"codec": WIDE_FLOATS, "content": ("gradient", "nan"), **FLOAT32}
SOME_QUANTISERS = (
    "one-bit", "two-bit", "one-bit two-means by group", "two-bit by group", "four levels by group", "qsgd",
)  # fmt: skip
SOME_FLOATS = ("truncated 3", "truncated 8", "truncated native 7 stochastic", "fp4-e2m1 4 stochastic", "embedded 7")
SOME_GCOMP = ("paper, few codes", "uniform")
EDGES: dict[str, Any] = {"codec": SOME_FLOATS, "content": ("nan",), **FLOAT32}
# Family, orders of threads, axes that are others than the family's own, and how many cases that makes.
RUNS: list[tuple[str, tuple[int, ...], dict[str, Any], int]] = [
    ("quantised", FORWARD, {"codec": SOME_QUANTISERS, **GRADIENT}, 6 * 6 * 14),
    ("quantised", OTHERS, {"n": (0, 33, 4097), **GRADIENT}, 6 * 3 * 12),
    ("quantised", BY_CHANCE, {"n": (65,)}, 6 * 12 * 8),
    # A payload of many pieces.
    ("quantised", FORWARD, {"codec": ["qsgd"], "n": [70_001], "residual": [False], **GRADIENT, **FLOAT32}, 1),
    ("products", ORDERS, {}, 28),
    ("orthogonal", ORDERS, {}, 7),
    ("signs", ORDERS, {}, 48),
    ("index", ORDERS, {}, 168),
    ("ternary", FORWARD, {}, 240),
    ("ternary", OTHERS, GRADIENT, 60),
    ("thc", FORWARD, {}, 120),
    ("thc", OTHERS, {"n": (63, 1025), **GRADIENT}, 12),
    ("floats", FORWARD, GRADIENT, 3 * 9 * 73),
    ("floats", FORWARD, WIDE, 2 * 9 * 15),
    ("floats", OTHERS, {"n": (33, 257), **GRADIENT}, 3 * 2 * 73),
    ("floats", OTHERS, {"n": (33, 257), **WIDE}, 2 * 2 * 15),
    ("floats", BY_CHANCE, {"n": (70,)}, 3 * 73 * 8),
    ("floats", FORWARD, {"n": FLOAT_EDGES, **EDGES}, 3 * 5),
    ("floats", OTHERS, {"n": (16_385,), **EDGES}, 5),
    ("gcomp", FORWARD, {"n": GCOMP_SIZES, **GRADIENT}, 3 * 10 * 7),
    ("gcomp", OTHERS, {"n": (0, 33), **GRADIENT}, 3 * 2 * 7),
    ("gcomp", BY_CHANCE, {"n": (65,)}, 3 * 7 * 8),
    ("gcomp", FORWARD, {"n": FLOAT_EDGES, "codec": SOME_GCOMP, **GRADIENT, **FLOAT32}, 3 * 2),
    ("gcomp", OTHERS, {"n": (16_385,), "codec": SOME_GCOMP[:1], **GRADIENT, **FLOAT32}, 1),
    *(("selection", FORWARD, {"n": (1, 33, 2049, 5_000), "content": [content]}, 3 * 4 * 3) for content in SELECTED),
    ("selection", FORWARD, {"n": (1, 33, 2049, 5_000), "content": ["nan"], "way": ["exact"]}, 3 * 4),
    # Of 20,000 the first thresholds select too many, or too few.
    ("selection", ORDERS, {"n": (33, 2047, 20_000), "content": ("gradient", "alike", "short"), "share": (0.002,)}, 27),
    # More pieces than a block adds up at once: 272, and the sums before them take two rounds of 256 threads.
    ("selection", FORWARD, {"n": [33 * 16_384 + 5], "content": ["short"], "share": [0.02], "way": ["exact"]}, 1),
    # And more tensors than that.
    ("selection", FORWARD, {"n": [900], "share": [0.4], "way": ["threes"], **GRADIENT}, 1),
]


@pytest.mark.parametrize(
    ("family", "order", "axes", "n_cases"),
    [(family, order, axes, n_cases) for family, orders, axes, n_cases in RUNS for order in orders],
)
def test_every_case_is_the_cpus(family: str, order: int, axes: dict[str, Any], n_cases: int) -> None:
    assert run(kernels(order), family, **axes) == n_cases


def test_ternary_spans_that_are_not_finite_are_nan_on_both() -> None:
    codec, values, cpu = Ternary(), torch.ones(80), torch.device("cpu")
    for used in (None, kernels()):
        with contextlib.nullcontext() if used is None else using(used):
            for spans in ([(0, 10), (10, 80)], [(0, 80)]):
                shares, n_bad = codec.share(80, spans, cpu), spans[-1][1] - spans[-1][0]
                scales, out = torch.zeros(len(spans)), torch.empty(80)
                for bad in (float("nan"), float("-inf")):
                    values[12] = bad
                    codec.write_scales(values, shares, scales)
                    assert scales.tolist() == [*[1.0] * (len(spans) - 1), float("inf")]
                counts = torch.empty(codec.count_bytes(80, 2), dtype=torch.uint8)
                codec.write_counts(values, shares, scales, 2, counts, 1)
                codec.read_counts(counts * 2, shares, scales, 2, out)
                assert out[:-n_bad].tolist() == [1.0] * (80 - n_bad)
                assert bool(out[-n_bad:].isnan().all())


def test_thc_blocks_that_are_not_finite_are_nan_on_both() -> None:
    codec, values = Thc(), torch.ones(1100)
    norms, codes = torch.zeros(2), torch.empty(codec.code_bytes(1100, 2), dtype=torch.uint8)
    for used in (None, kernels()):
        with contextlib.nullcontext() if used is None else using(used):
            for bad in (float("nan"), float("-inf"), 3e38):  # the sum of the last one's squares is beyond float32
                values[1050:1060] = bad
                codec.write_norms(values, norms)
                assert norms.tolist() == [32.0, float("inf")]
            out = torch.empty(1100)
            codec.write_codes(values, norms, codes, n_ranks=2, sign_step=1, step=2)
            codec.read_sums(codes * 2, norms, 2, out, sign_step=1)
            assert not bool(out[:1024].isnan().any())
            assert bool(out[1024:].isnan().all())


def test_no_more_values_are_packed_than_there_is_room_for() -> None:
    values, message = torch.ones(70), torch.empty(HEAD_WORDS + 3, dtype=torch.int32)
    head, index = message.split([HEAD_WORDS, 3])
    packed = torch.full((30,), 7.0)  # where ranks were to hold different counts
    with using(kernels()):
        packed_values.write_index(values, message, 5)
        ends = packed_values.count(index, 70, head)
        packed_values.pack(values, index, packed[:20], ends)
        packed_values.unpack(packed[:20], index, values, ends)
    assert packed.tolist() == [1.0] * 20 + [7.0] * 10
    assert values.tolist() == [1.0] * 20 + [0.0] * 50


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_case_is_the_cpus_on_a_gpu(family: str) -> None:
    on_gpu = CudaKernels(torch.device("cuda"))
    assert run(on_gpu, family) > 0
    if family in ("quantised", "gcomp", "floats"):
        some = {"quantised": ("one-bit", "two-bit", "qsgd"), "gcomp": ("uniform", "paper"), "floats": ("truncated 8",)}
        assert run(on_gpu, family, codec=some[family], n=((1 << 20) + 1, 1 << 24), content=("gradient",)) > 0
