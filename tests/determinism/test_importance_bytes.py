"""The importance kernel: the formula's bytes, for every thread count and instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from float_messages import LEVELS, assert_same_bytes_everywhere, at_level
from gradwire import _native
from gradwire.errors import InvalidArgument

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
@pytest.mark.parametrize("n_elements", [0, 1, 7, 8, 31, 32, 33, 65535, 65536, 65537])
def test_bytes_are_the_formula_in_float32_rounded_operation_by_operation(level: str, n_elements: int) -> None:
    parameter, second, first = (any_floats(n_elements, seed).numpy() for seed in (4, 5, 6))
    a, b, c = np.float32(0.7), np.float32(1e-3), np.float32(-9)
    with np.errstate(all="ignore"):
        scale = parameter * (a * np.sqrt(second) + b) + c * first
    magnitude = (scale.view(np.uint32) & 0x7FFFFFFF).astype(np.int64)
    expected = np.clip((magnitude >> 21) - 348, 0, 255)
    expected[np.isnan(scale) | ~(second > 0)] = 0
    with at_level(level):
        found = importance(*map(torch.from_numpy, (parameter, second, first)), (float(a), float(b), float(c)))
    np.testing.assert_array_equal(found.numpy(), expected)


@pytest.mark.parametrize("level", LEVELS)
def test_the_byte_spans_2_to_the_minus_40_to_2_to_the_24_in_quarter_octaves(level: str) -> None:
    quarters = torch.tensor([2.0**octave * (1 + quarter / 4) for octave in range(-45, 30) for quarter in range(4)])
    expected = torch.arange(4 * (-45 + 40), 4 * (30 + 40)).clamp(0, 255).to(torch.uint8)
    with at_level(level):
        for sign in (1, -1):
            assert torch.equal(importance(sign * quarters, None, None, (0.0, 1.0, 0.0)), expected)


@pytest.mark.parametrize("level", LEVELS)
def test_nan_and_a_second_moment_that_is_not_positive_give_zero(level: str) -> None:
    ones = torch.ones(64)
    with at_level(level):
        assert not importance(torch.full((64,), torch.nan), ones, None, (1.0, 1.0, 0.0)).any()
        for second in (0.0, -0.0, -1.0, torch.nan):
            assert not importance(ones, torch.full((64,), second), ones, (1.0, 1.0, 1.0)).any()
        assert importance(ones, torch.full((64,), 1e-45), None, (0.0, 1.0, 0.0)).all()


@pytest.mark.parametrize("lengths", [(8, 7, 8, 8), (8, 8, 0, 8), (8, 8, 8, 9), (0, 8, 8, 8)])
def test_operands_of_unequal_length_are_refused(lengths: tuple[int, int, int, int]) -> None:
    parameter, second, first = (torch.ones(n) for n in lengths[:3])
    with pytest.raises(InvalidArgument, match="elements"):
        _native.importance(parameter, second, first, 1.0, 1.0, 1.0, torch.zeros(lengths[3], dtype=torch.uint8))
