"""What codecs and kernels compute has the same bytes for every thread count and instruction set, and where the process
flushes subnormals."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import quantiser_oracles
from float_messages import (
    DTYPES,
    LEVELS,
    assert_same_bytes_everywhere,
    at_level,
    decode,
    encode,
    finite_gradient,
    same_bits,
)
from gcomp_gradients import KINDS, make_gradient, make_importance
from gradwire import codecs
from gradwire.codecs.count_sketch import CountSketch, FixedPoint, index_words, write_index
from gradwire.codecs.embedded_float import EmbeddedFloat
from gradwire.codecs.gcomp import GCompCodec
from gradwire.codecs.hadamard import Thc
from gradwire.codecs.quantised import Quantised
from gradwire.codecs.selection import take_largest
from gradwire.codecs.signs import Signs
from gradwire.codecs.ternary import Ternary
from sketches import sparse_gradients

N_VALUES = 3 * 65_536 + 4_321  # several chunks and tasks, of every codec
SIZES = [*range(200), 255, 256, 257, 289, 511, 513, 1_023, 1_025, 4_095, 4_097]
Case = tuple[str, dict[str, Any]]
QUANTISERS: list[Case] = [
    ("one-bit", {}), ("one-bit", {"scale": "two-means"}), ("two-bit", {}), ("ternary", {"seed": 3}),
    ("qsgd", {"seed": 3}), ("qsgd", {"levels": 127, "block": 128, "seed": 3}), ("thc", {"seed": 3}),
]  # fmt: skip
GCOMP: list[Case] = [
    ("gcomp", {"importance": mode, "bits": bits, "format": format})
    for format, modes in (
        (1, [("none", None), ("paper", None), ("uniform", 5), ("truncate", 4)]),
        (2, [("none", None), ("paper", None), ("uniform", 5), ("truncate", 4), ("paper", 3)]),
    )
    for mode, bits in modes
]
FLOATS: list[Case] = [
    *(("embedded-float", {"bits": bits}) for bits in (2, 7, 8, 9, 16, 17, 24, 25, 31, 32)),
    ("embedded-float", {"bits": 8, "partition": 32}),
    *(("embedded-float", {"bits": bits, "format": 1}) for bits in (5, 25, 32)),
    *(("truncated-float", {"bits": bits, "format": "native"}) for bits in range(2, 17)),
    *(("truncated-float", {"bits": bits}) for bits in (2, 3, 4, 5, 6, 7, 8, 11, 16)),
    *(("truncated-float", {"bits": bits, "rounding": "truncate"}) for bits in (3, 5, 7, 12)),
    *(("truncated-float", {"bits": bits, "rounding": "stochastic"}) for bits in (2, 4, 6, 8, 9, 12)),
    *(
        ("truncated-float", {"bits": bits, "format": "native", "rounding": "stochastic", "seed": 9})
        for bits in (3, 5, 8, 9, 12)
    ),
    ("truncated-float", {"bits": 8, "format": "fp8-e5m2", "partition": 64}),
]
ONE_OF_EACH_KIND: list[Case] = [
    ("embedded-float", {"bits": 5}),
    ("embedded-float", {"bits": 32, "partition": 64}),
    ("truncated-float", {"bits": 7}),
    ("truncated-float", {"bits": 13, "format": "native", "rounding": "stochastic"}),
]


def computing(codec: Any, kind: str, n: int, dtype: torch.dtype) -> Callable[[], Iterator[Tensor]]:
    """A message and its values; of a quantiser also what the sweep with a residual makes."""
    if not isinstance(codec, Quantised):
        gradient = make_gradient(kind, n, dtype)
        options = {"importance": make_importance(n)} if codec.name == "gcomp" else {}
    else:
        gradient, options = quantiser_oracles.make_gradient(n, dtype), {"step": 5}
        residual = quantiser_oracles.make_gradient(n, seed=1)

    def compute() -> Iterator[Tensor]:
        message = encode(codec, gradient, **options)
        yield message
        yield decode(codec, message, n, dtype, **(options if codec.name == "gcomp" else {}))
        if isinstance(codec, Quantised):
            out, kept = torch.empty(codec.max_encoded_bytes(n, dtype), dtype=torch.uint8), torch.empty(n)
            n_bytes = codec.encode_with_residual(gradient, residual, out, 6, new_residual=kept, residual_scale=3.0)
            yield from (out[:n_bytes], kept)

    return compute


@pytest.mark.parametrize(("name", "options"), [*QUANTISERS, *GCOMP, *FLOATS], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_messages_values_and_residuals_have_the_same_bytes_everywhere(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    codec, first = codecs.by_name(name, **options), options.get("bits") or 0
    is_quantiser = isinstance(codec, Quantised)
    kinds = {"gcomp": KINDS}.get(name, (*KINDS, *KINDS)[first % 4 :][: 1 if is_quantiser else 2])
    for kind in kinds:
        n = N_VALUES if is_quantiser else N_VALUES // 3
        assert_same_bytes_everywhere(computing(codec, kind, n, dtype), (1, 2, 3) if name != "gcomp" else (1, 2, 3, 4))


@pytest.mark.parametrize(("name", "options"), [*QUANTISERS, *GCOMP, *ONE_OF_EACH_KIND], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_small_size_gives_the_same_bytes_everywhere(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    codec = codecs.by_name(name, **options)
    for n in SIZES:
        assert_same_bytes_everywhere(computing(codec, KINDS[n % 4], n, dtype), (1,))


def refinements() -> Iterator[Tensor]:
    codec = EmbeddedFloat()
    for dtype in DTYPES:
        gradient, receiver = make_gradient("special", 20_000, dtype), codec.receive(20_000, dtype)
        for first, last in ((0, 3), (3, 4), (4, 15), (15, 32)):
            out = torch.empty(codec.max_plane_bytes(20_000, dtype, first, last - first), dtype=torch.uint8)
            message = out[: codec.encode_planes(gradient, first, last - first, out)]
            receiver.add_planes(message)
            values = torch.empty_like(gradient)
            receiver.write(values)
            yield from (message, values)


def sums() -> Iterator[Tensor]:
    ternary, thc = Ternary(seed=1), Thc(seed=1)
    for n in (1, 63, 100, 1_500, N_VALUES):
        gradient = quantiser_oracles.make_gradient(n)
        for n_ranks in (2, 8):
            shares, scales = ternary.share(n, [(0, n)], gradient.device), torch.empty(1)
            ternary.write_scales(gradient, shares, scales)
            counts, out = torch.zeros(ternary.count_bytes(n, n_ranks), dtype=torch.uint8), torch.empty(n)
            ternary.write_counts(gradient, shares, scales, n_ranks, counts, 4)
            ternary.read_counts(counts, shares, scales, n_ranks, out)
            yield from (counts, out)
        norms = torch.empty(thc.n_norms(n))
        thc.write_norms(gradient, norms)
        yield norms
        for n_ranks in (5, 9):
            codes, out = torch.zeros(thc.code_bytes(n, n_ranks), dtype=torch.uint8), torch.empty(n)
            thc.write_codes(gradient, norms, codes, n_ranks=n_ranks, sign_step=1, step=2)
            thc.read_sums(codes, norms, n_ranks, out, sign_step=1)
            yield from (codes, out)


def test_zeros_leave_nothing_out_of_two_bits() -> None:
    """A threshold of zero stands for both zeros, so that their residual is +0.0, at the end of a block of words too."""
    codec, zeros = codecs.by_name("two-bit"), torch.tensor([0.0, -0.0]).repeat(20)
    out = torch.empty(codec.max_encoded_bytes(40, torch.float32), dtype=torch.uint8)
    for level in LEVELS:
        residual = torch.ones(40)
        with at_level(level):
            codec.encode_with_residual(zeros, None, out, new_residual=residual)
        assert residual.view(torch.int32).tolist() == [0] * 40, level


def counts_votes_and_selections() -> Iterator[Tensor]:
    histogram = torch.zeros(256, dtype=torch.int64)
    GCompCodec("none").histogram(make_gradient("special", 50_001, torch.float32), histogram)
    yield histogram
    values = torch.randn(100_003, generator=torch.Generator().manual_seed(5))
    values[::7] = 0.0
    values[::11] *= -0.0
    signs = Signs(ties_are_positive=False)
    for dtype in DTYPES:
        typed, words = values.to(dtype), torch.empty(3, 3_126, dtype=torch.int32)
        for message in range(3):
            signs.pack(typed.roll(message), words[message])
        for n_ranks in (1, 2, 3):
            votes = torch.empty_like(typed)
            signs.vote(words[:n_ranks], votes, 1.0)
            yield votes
    for k in (1, 100, 50_000):
        yield take_largest(values.clone(), k)[0]


@functools.cache
def sparse_gradient(n: int, density: float, dtype: torch.dtype) -> Tensor:
    return sparse_gradients(n, density, 1, dtype=dtype)[0]


def sketches() -> Iterator[Tensor]:
    """Indices, cells, and sums in whatever order they are peeled."""
    small = itertools.product(((1_000, 0.3), (100_003, 0.02), (400_000, 0.3)), (torch.float32, torch.bfloat16))
    for (n, density), dtype in [*small, ((4_000_000, 0.05), torch.float32)]:
        gradient, index = sparse_gradient(n, density, dtype), torch.empty(index_words(n), dtype=torch.int32)
        yield torch.tensor(write_index(gradient, index), dtype=torch.float64)
        yield index
        for fixed in (None, FixedPoint.fit(30, 3, torch.int32), FixedPoint.fit(30, 3, torch.int64)):
            sketch, mean = CountSketch(), torch.empty_like(gradient)
            cells = torch.empty(sketch.prepare(index, n, 1), dtype=torch.float32 if fixed is None else fixed.dtype)
            sketch.peel(index)
            sketch.add(gradient, index, cells, fixed)
            yield cells.clone()
            sketch.recover(cells, 0.3, mean, estimate=True)
            yield mean
    assert sketch._plan.n_blocks > 2, "nothing that threads could share"


@pytest.mark.parametrize("compute", [refinements, sums, counts_votes_and_selections, sketches])
def test_kernels_give_the_same_bytes_everywhere(compute: Callable[[], Iterator[Tensor]]) -> None:
    assert_same_bytes_everywhere(compute, (1, 2, 5))


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this machine cannot flush subnormals")
@pytest.mark.parametrize("level", ["portable", "avx2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_flushing_subnormals_changes_nothing(dtype: torch.dtype, level: str) -> None:
    gradients = [finite_gradient(3000, dtype), make_gradient("random bits", 3000, dtype)]
    if dtype != torch.float16:
        gradients.append(make_gradient("gaussian", 3000, dtype) * 1e-36)
    for name, options in FLOATS:
        codec = codecs.by_name(name, **options)
        for gradient in gradients:
            message = encode(codec, gradient)
            values = decode(codec, message, 3000, dtype)
            torch.set_flush_denormal(True)
            try:
                with at_level(level):
                    flushed = encode(codec, gradient), decode(codec, message, 3000, dtype)
            finally:
                torch.set_flush_denormal(False)
            assert torch.equal(flushed[0], message), (name, options)
            assert same_bits(flushed[1], values), (name, options)
