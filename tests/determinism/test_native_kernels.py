"""Native kernels against their definitions: the same bits for every thread count and instruction set."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from float_messages import LEVELS, assert_same_bytes_everywhere, at_level
from gcomp_oracle import CRC_TABLE
from gradwire import _native
from gradwire.errors import InvalidArgument

# ---- CRC32C: lengths, offsets, joined pieces

# Folding begins at 512 bytes and goes on in steps of 256, three lanes side by side at 3,072.
LENGTHS = [
    *range(301),
    *(edge + near for edge in (512, 768, 1024, 3072, 6144) for near in (-17, -8, -1, 0, 1, 7, 16, 255)),
    100_003,
]


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


def importance(
    parameter: Tensor,
    second: Tensor | None,
    first: Tensor | None,
    terms: tuple[float, float, float] = (3.0, -0.25, -9.0),
) -> Tensor:
    out = torch.full((parameter.numel(),), 99, dtype=torch.uint8)
    _native.importance(parameter, second, first, *terms, out)
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
    a, b, c = np.float32(0.7), np.float32(1e-3), np.float32(-9)
    with np.errstate(all="ignore"):
        scale = parameter.numpy() * (a * np.sqrt(second.numpy()) + b if has_second else b)
        scale = scale + c * first.numpy() if has_first else scale
    magnitude = (scale.view(np.uint32) & 0x7FFFFFFF).astype(np.int64)
    expected = np.clip((magnitude >> 21) - 348, 0, 255)
    expected[np.isnan(scale) | (has_second & ~(second > 0).numpy())] = 0
    terms = float(a), float(b), float(c)
    with at_level(level):
        found = importance(parameter, second if has_second else None, first if has_first else None, terms)
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("level", LEVELS)
def test_the_byte_spans_2_to_the_minus_40_to_2_to_the_24_in_quarter_octaves(level: str) -> None:
    quarters = torch.tensor([2.0**octave * (1 + quarter / 4) for octave in range(-45, 30) for quarter in range(4)])
    expected = torch.arange(4 * (-45 + 40), 4 * (30 + 40)).clamp(0, 255).to(torch.uint8)
    with at_level(level):
        for sign in (1, -1):
            assert torch.equal(importance(sign * quarters, None, None, (0.0, 1.0, 0.0)), expected)


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


def expected_product(left: Tensor, right: Tensor) -> Tensor:
    """Component by component in float32, as the kernel promises."""
    total = torch.zeros(left.shape[1], right.shape[1])
    for component in range(left.shape[0]):
        total += left[component][:, None] * right[component][None, :]
    return total


@pytest.mark.parametrize(("rank", "n_rows", "n_columns"), SHAPES)
def test_product_is_summed_in_ascending_order_bit_by_bit(rank: int, n_rows: int, n_columns: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    left = torch.randn(rank, n_rows, generator=generator)
    right = torch.randn(rank, n_columns, generator=generator)
    start = torch.randn(n_rows, n_columns, generator=generator)
    expected = expected_product(left, right)
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
