"""What codecs and kernels compute has the same bytes for every thread count and instruction set, and where the process
flushes subnormals; native kernels also those of their definitions."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import quantiser_oracles
from float_messages import DTYPES, LEVELS, assert_same_bytes_everywhere, at_level, decode, encode, finite_gradient
from gcomp_gradients import KINDS, make_gradient, make_importance
from gcomp_oracle import CRC_TABLE
from gradwire import _native, codecs
from gradwire.codecs.count_sketch import CountSketch, FixedPoint, index_words, write_index
from gradwire.codecs.embedded_float import EmbeddedFloat
from gradwire.codecs.gcomp import GCompCodec
from gradwire.codecs.hadamard import Thc
from gradwire.codecs.quantised import Quantised
from gradwire.codecs.selection import take_largest
from gradwire.codecs.signs import Signs
from gradwire.codecs.ternary import Ternary
from gradwire.errors import InvalidArgument
from ranks import bits_of
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
            n_bytes = codec.encode(gradient, out, step=6, residual=residual, new_residual=kept, residual_scale=3.0)
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
def test_every_small_size_has_the_same_bytes_everywhere(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
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
            codec.encode(zeros, out, new_residual=residual)
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
            assert bits_of(flushed[1]) == bits_of(values), (name, options)


# ---- CRC32C: lengths, offsets, joined pieces

# Folding begins at 512 bytes and goes on in steps of 256, three lanes side by side at 3,072.
EDGES = (512, 768, 1024, 3072, 6144)
LENGTHS = [*range(301), *(edge + near for edge in EDGES for near in (-17, -8, -1, 0, 1, 7, 16, 255)), 100_003]


def prefixes(data: bytes, crc: int) -> list[int]:
    """The checksum of each prefix of `data`, from none of it on."""
    state = crc ^ 0xFFFFFFFF
    found = [crc]
    for byte in data:
        state = state >> 8 ^ CRC_TABLE[(state ^ byte) & 0xFF]
        found.append(state ^ 0xFFFFFFFF)
    return found


@pytest.mark.parametrize("level", LEVELS)
def test_checksum_is_the_table_s_at_all_lengths_and_offsets(level: str) -> None:
    data = torch.randint(0, 256, (101_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    with at_level(level):
        assert _native.crc32c(b"123456789") == 0xE3069283  # RFC 3720
        for offset in (0, 1, 2, 3, 5, 7, 8, 13, 31, 33, 63):
            length = LENGTHS[-1] if offset in (0, 13) else 7_000
            for crc in (0, 0xDEADBEEF):
                expected = prefixes(data[offset : offset + length].numpy().tobytes(), crc)
                for n in LENGTHS:
                    if n < len(expected):
                        assert _native.crc32c(data[offset : offset + n], crc) == expected[n], (offset, n)


# ---- importance: the formula's bytes

N_ELEMENTS = 3 * 65536 + 45  # several tiles, a last one that is no multiple of a vector

# Zeros, subnormals, the ends of the byte's range, Inf and NaN.
SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 1.17e-38, 2.0**-40, 2.0**-41, 2.0**24, 3.4e38, -1.0, np.inf, -np.inf, np.nan]


def importance(parameter: Tensor, second: Tensor | None, first: Tensor | None, *terms: float) -> Tensor:
    out = torch.full((parameter.numel(),), 99, dtype=torch.uint8)
    _native.importance(parameter, second, first, *(terms or (3.0, -0.25, -9.0)), out)
    return out


def any_floats(n_elements: int, seed: int) -> Tensor:
    """Every bit pattern alike, and the special values in every place of a vector."""
    random = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (n_elements,), generator=random).to(torch.int32)
    values = bits.view(torch.float32).clone()
    chosen = torch.randint(0, len(SPECIAL), (n_elements,), generator=random)
    return torch.where(bits % 5 == 0, torch.tensor(SPECIAL)[chosen], values)


def moderate_floats(n_elements: int, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(n_elements, generator=random) * 2 ** (torch.randn(n_elements, generator=random) * 8)


@pytest.mark.parametrize("floats", [any_floats, moderate_floats])
@pytest.mark.parametrize("has_second", [False, True])
@pytest.mark.parametrize("has_first", [False, True])
def test_bytes_do_not_depend_on_threads_or_instruction_set(floats, has_second: bool, has_first: bool) -> None:  # type: ignore[no-untyped-def]
    parameter = floats(N_ELEMENTS, 1)
    second = floats(N_ELEMENTS, 2) if has_second else None
    first = floats(N_ELEMENTS, 3) if has_first else None
    (found,) = assert_same_bytes_everywhere(lambda: [importance(parameter, second, first)], (1, 2, 5))
    assert len(torch.unique(found)) > 10


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("has_second", "has_first"), list(itertools.product((True, False), repeat=2)))
@pytest.mark.parametrize("n_elements", [0, 1, 7, 8, 31, 32, 33, 65535, 65536, 65537])
def test_bytes_are_the_formula_in_float32_rounded_operation_by_operation(
    level: str, has_second: bool, has_first: bool, n_elements: int
) -> None:
    """0 for a NaN, and where the second moment is not positive."""
    parameter, second, first = (any_floats(n_elements, seed) for seed in (4, 5, 6))
    a, b, c = terms = np.array([0.7, 1e-3, -9], np.float32)
    with np.errstate(all="ignore"):
        scale = parameter.numpy() * (a * np.sqrt(second.numpy()) + b if has_second else b)
        scale = scale + c * first.numpy() if has_first else scale
    magnitude = (scale.view(np.uint32) & 0x7FFFFFFF).astype(np.int64)
    expected = np.clip((magnitude >> 21) - 348, 0, 255)
    expected[np.isnan(scale) | (has_second & ~(second > 0).numpy())] = 0
    with at_level(level):
        found = importance(parameter, second if has_second else None, first if has_first else None, *terms.tolist())
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("level", LEVELS)
def test_the_byte_spans_2_to_the_minus_40_to_2_to_the_24_in_quarter_octaves(level: str) -> None:
    quarters = torch.tensor([2.0**octave * (1 + quarter / 4) for octave in range(-45, 30) for quarter in range(4)])
    expected = torch.arange(4 * (-45 + 40), 4 * (30 + 40)).clamp(0, 255).to(torch.uint8)
    with at_level(level):
        for sign in (1, -1):
            assert torch.equal(importance(sign * quarters, None, None, 0.0, 1.0, 0.0), expected)


@pytest.mark.parametrize("lengths", [(8, 7, 8, 8), (8, 8, 0, 8), (8, 8, 8, 9), (0, 8, 8, 8)])
def test_operands_of_unequal_length_are_refused(lengths: tuple[int, int, int, int]) -> None:
    parameter, second, first = (torch.ones(n) for n in lengths[:3])
    with pytest.raises(InvalidArgument, match="elements"):
        _native.importance(parameter, second, first, 1.0, 1.0, 1.0, torch.zeros(lengths[3], dtype=torch.uint8))


# ---- low-rank products and orthogonal factors

SHAPES = [(1, 1, 1), (1, 1, 9), (1, 7, 1), (2, 3, 5), (4, 64, 16), (5, 67, 33), (32, 300, 129), (40, 40, 41)]


def product(left: Tensor, right: Tensor, start: Tensor | None = None) -> Tensor:
    matrix = torch.empty(left.shape[1], right.shape[1]) if start is None else start.clone()
    _native.multiply_factors(left.view(-1), right.view(-1), left.shape[0], start is not None, matrix.view(-1))
    return matrix


def orthogonal(factors: Tensor) -> Tensor:
    result = factors.clone()
    _native.orthogonalise_factors(result.view(-1), factors.shape[0], factors.shape[1])
    return result


@pytest.mark.parametrize(("rank", "n_rows", "n_columns"), SHAPES)
def test_product_is_summed_in_ascending_order_bit_by_bit(rank: int, n_rows: int, n_columns: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    left = torch.randn(rank, n_rows, generator=generator)
    right = torch.randn(rank, n_columns, generator=generator)
    start = torch.randn(n_rows, n_columns, generator=generator)
    expected = torch.zeros(n_rows, n_columns)
    for component in range(rank):
        expected += left[component][:, None] * right[component][None, :]
    (plain, less) = assert_same_bytes_everywhere(lambda: [product(left, right), product(left, right, start)], (1, 3))
    assert torch.equal(plain, expected)
    assert torch.equal(less, start - expected)


@pytest.mark.parametrize(("rank", "n"), [(1, 1), (1, 50), (3, 3), (4, 4), (5, 77), (32, 768), (33, 200)])
@pytest.mark.parametrize("magnitude", [1.0, 1e-30, 1e30, 1e-41])
def test_rows_become_orthonormal_and_keep_their_span(rank: int, n: int, magnitude: float) -> None:
    factors = torch.randn(3, rank, n, generator=torch.Generator().manual_seed(n)) * magnitude
    (first,) = assert_same_bytes_everywhere(lambda: [orthogonal(factors)], (1, 3))
    gram = first.double() @ first.double().mT
    assert torch.allclose(gram, torch.eye(rank, dtype=torch.float64).expand_as(gram), atol=2e-6)
    exact = factors.double() / factors.double().norm()
    residue = exact - exact @ first.double().mT @ first.double()
    assert residue.norm() < (2e-6 if magnitude > 1e-40 else 1e-2)  # subnormals have few bits to begin with


def test_factor_that_is_zero_or_short_of_rank_gives_orthonormal_rows_without_nan() -> None:
    zero = torch.zeros(1, 4, 9)
    assert torch.equal(orthogonal(zero)[0], torch.eye(4, 9))
    row = torch.randn(9, generator=torch.Generator().manual_seed(1))
    for result in (orthogonal(row.expand(1, 4, 9).contiguous()), orthogonal(torch.eye(9)[None, :1].repeat(1, 4, 1))):
        gram = result[0].double() @ result[0].double().T
        assert torch.allclose(gram, torch.eye(4, dtype=torch.float64), atol=1e-6)
