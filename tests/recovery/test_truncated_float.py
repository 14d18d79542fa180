"""Truncated floats keep exactly the first bits; compact formats are those that torch knows; rounding is unbiased."""

import itertools

import numpy as np
import pytest
import torch

from float_messages import (
    DTYPES,
    clamped,
    decode,
    encode,
    every_16_bit_value,
    finite_gradient,
    same_bits,
    there_and_back,
)
from gcomp_gradients import tensor_of, words_of
from gradwire.codecs.truncated_float import TruncatedFloat, describe, draw_after, first_draw

ROUNDINGS = ("truncate", "nearest", "stochastic")
SIZES = (0, 1, 2, 31, 33, 255, 256, 257, 1000, 16384, 16385, 40_007)
# width, exponent bits, bias, largest magnitude
LAYOUTS = {
    "fp16": (16, 5, 15, 0x7BFF),
    "fp8-e4m3": (8, 4, 7, 0x7E),
    "fp8-e5m2": (8, 5, 15, 0x7B),
    "fp4-e2m1": (4, 2, 1, 0x7),
    "fp6-e3m2": (6, 3, 3, 0x1F),
}


def magnitudes_of(format_name: str) -> np.ndarray:
    """The numbers of all magnitudes up to the largest, float64."""
    width, exponent_bits, bias, largest = LAYOUTS[format_name]
    n_mantissa = width - 1 - exponent_bits
    code = np.arange(largest + 1)
    field, mantissa = code >> n_mantissa, code & ((1 << n_mantissa) - 1)
    fraction = mantissa / (1 << n_mantissa)
    return np.where(field == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (field - bias))


def scale_of(largest: float, top: float, format_name: str) -> float:
    if largest < 2.0**-126:
        return 2.0**-100
    quotient = float(np.float32(np.float32(largest) / np.float32(top)))
    if format_name == "fp4-e2m1":
        word = int(np.float32(quotient).view(np.uint32))
        quotient = float(np.uint32((word + 0xFFFF) & 0xFFFF0000).view(np.float32))
        return max(quotient, 2.0**-100)
    return max(2.0 ** np.ceil(np.log2(quotient)), 2.0**-100)


def oracle(gradient: torch.Tensor, bits: int, format_name: str, partition: int, rounding: str) -> torch.Tensor:
    """In float64, by search: the nearest of all numbers, ties to the even code, then the last bits cut off; or, rounding to
    nearest, the nearest of those that `bits` bits can tell."""
    numbers, width = magnitudes_of(format_name), LAYOUTS[format_name][0]
    kept = (np.arange(numbers.size) >> (width - bits)) << (width - bits)
    told = np.unique(kept) if rounding == "nearest" else np.arange(numbers.size)
    ties_go_down = rounding == "nearest" and bits <= LAYOUTS[format_name][1]  # no mantissa bit is left
    values = gradient.to(torch.float32).numpy()
    result = np.empty(values.size, np.float32)
    for start in range(0, values.size, partition):
        part = np.where(np.abs(values[start : start + partition]) < 2.0**-126, 0, values[start : start + partition])
        scale = scale_of(float(np.abs(part).max()), numbers[kept[-1]], format_name)
        # The quotient is a float32, as in the codec.
        scaled = np.abs((part / np.float32(scale)).astype(np.float32)).astype(np.float64)
        above = np.searchsorted(numbers[told], scaled).clip(1, told.size - 1)
        to_below, to_above = scaled - numbers[told[above - 1]], numbers[told[above]] - scaled
        is_below = (to_below < to_above) | ((to_below == to_above) & ((above % 2 == 1) | ties_go_down))
        code = kept[told[np.where(is_below, above - 1, above)]]
        decoded = np.minimum(numbers[code] * scale, np.finfo(np.float32).max).astype(np.float32)
        result[start : start + partition] = np.copysign(decoded, values[start : start + partition])
    return clamped(torch.from_numpy(result), gradient.dtype)


def first_bits(gradient: torch.Tensor, bits: int) -> torch.Tensor:
    """The values with all but the first bits of their words zero."""
    words, width = words_of(gradient), 8 * gradient.element_size()
    return tensor_of(words & words.dtype.type(~((1 << (width - bits)) - 1) & ((1 << width) - 1)), gradient.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_native_keeps_the_first_bits_of_the_word(dtype: torch.dtype) -> None:
    every_number = range(2, 8 * dtype.itemsize + 1)
    cases = [(finite_gradient(n, dtype), every_number if n in (257, 1000) else (2, 9, 15)) for n in SIZES]
    if dtype.itemsize == 2:
        everything = every_16_bit_value(dtype)
        cases.append((everything[everything.isfinite()], every_number))
    for gradient, numbers in cases:
        for bits in numbers:
            found = there_and_back(TruncatedFloat(bits, "native", "truncate"), gradient)
            assert same_bits(found, first_bits(gradient, bits)), (gradient.numel(), bits)


@pytest.mark.parametrize("rounding", ["truncate", "nearest"])
@pytest.mark.parametrize("format_name", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_compact_formats_are_the_nearest_number_with_its_last_bits_cut(
    dtype: torch.dtype, format_name: str, rounding: str
) -> None:
    for n, partition in ((257, 256), (5000, 256), (2000, 32), (3000, 1024)):
        gradient = finite_gradient(n, dtype)
        for bits in range(2, LAYOUTS[format_name][0] + 1):
            found = there_and_back(TruncatedFloat(bits, format_name, rounding, partition=partition), gradient)
            assert same_bits(found, oracle(gradient, bits, format_name, partition, rounding)), (n, partition, bits)


@pytest.mark.parametrize(
    ("format_name", "other"),
    [("fp16", torch.float16), ("fp8-e4m3", torch.float8_e4m3fn), ("fp8-e5m2", torch.float8_e5m2)],
)
def test_whole_compact_words_are_those_of_torch(format_name: str, other: torch.dtype) -> None:
    """Every float16 value the format holds, and float32 values between them; the largest in each partition: scale 1."""
    largest = torch.finfo(other).max
    values = every_16_bit_value(torch.float16).float()
    values = values[values.abs() <= largest]
    values = torch.cat([values, values * 1.0003, values[values.abs() < 1] * 2.0**-9])
    values = values[values.abs() <= largest]
    partitions = values[: values.numel() // 255 * 255].view(-1, 255)
    gradient = torch.cat([partitions, torch.full((partitions.shape[0], 1), largest)], 1).flatten()
    found = there_and_back(TruncatedFloat(LAYOUTS[format_name][0], format_name), gradient)
    assert same_bits(found, gradient.to(other).float())


def test_auto_takes_the_smallest_format_that_has_as_many_bits() -> None:
    expected = {2: "fp4-e2m1", 4: "fp4-e2m1", 5: "fp6-e3m2", 6: "fp6-e3m2", 7: "fp8-e4m3", 8: "fp8-e4m3", 9: "fp16",
                16: "fp16", 17: "fp16", 18: "fp16", 19: "native"}  # fmt: skip
    for bits, format_name in expected.items():
        assert TruncatedFloat(bits).format_for(torch.float32) == format_name
        assert describe(encode(TruncatedFloat(bits), torch.ones(3)))["format"] == format_name
    assert TruncatedFloat(16).format_for(torch.bfloat16) == "native"


@pytest.mark.parametrize("dtype", DTYPES)
def test_native_rounds_to_the_nearest_number_of_as_many_bits(dtype: torch.dtype) -> None:
    """By search among both neighbours, in float64; a tie goes to the even word, the largest number stays finite."""
    width, gradient = 8 * dtype.itemsize, finite_gradient(4000, dtype)
    for bits in range(6 if dtype == torch.float16 else 9, width):
        unit, below = 1 << (width - bits), first_bits(gradient, bits)
        down = words_of(below)
        above = tensor_of((down.astype(np.int64) + unit).astype(down.dtype), dtype)
        to_above, to_below = (above.double() - gradient.double()).abs(), (gradient.double() - below.double()).abs()
        is_up = (to_above < to_below) | ((to_above == to_below) & torch.from_numpy(down // unit % 2 == 1))
        expected = torch.where(is_up & above.isfinite(), above, below)
        assert same_bits(there_and_back(TruncatedFloat(bits, "native"), gradient), expected), bits


@pytest.mark.parametrize("bits", [4, 8])
def test_tiny_gradients_do_not_underflow_in_compact_formats(bits: int) -> None:
    gradient = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    plain, tiny = (there_and_back(TruncatedFloat(bits), gradient * scale) for scale in (1.0, 2.0**-30))
    assert same_bits(tiny, plain * 2.0**-30)
    assert (plain - gradient).norm() / gradient.norm() < 0.2


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_non_finite_value_is_flagged_and_its_partition_nan(dtype: torch.dtype, rounding: str, value: float) -> None:
    gradient = finite_gradient(40_000, dtype)[:20_000]
    gradient[17_000] = value
    for bits, format_name in ((4, "auto"), (8, "auto"), (8, "native"), (15, "native"), (12, "auto")):
        codec = TruncatedFloat(bits, format_name, rounding)
        message = encode(codec, gradient)
        assert describe(message)["holds_nonfinite"]
        assert not describe(encode(codec, gradient[:16000]))["holds_nonfinite"]
        found = decode(codec, message, 20_000, dtype)
        assert found[66 * 256 : 67 * 256].isnan().all()
        assert found.isfinite().sum() == 20_000 - 256


DRAWN = {"fp4-e2m1": (2, 3, 4), "fp8-e4m3": (4, 6), "fp8-e5m2": (5,), "fp16": (9, 12), "native": (8, 9, 12)}


@pytest.mark.parametrize(
    ("bits", "format_name", "dtype"),
    [
        *((bits, name, torch.float32) for name, widths in DRAWN.items() for bits in widths),
        (8, "fp8-e4m3", torch.bfloat16),
        (8, "fp8-e5m2", torch.float16),
        (10, "native", torch.bfloat16),
        (5, "native", torch.float16),
        (9, "native", torch.float16),
    ],
)
def test_stochastic_rounding_goes_to_a_neighbour_and_is_unbiased(
    bits: int, format_name: str, dtype: torch.dtype
) -> None:
    """Values of a few binades, each 4,096 times: the mean's standard error is 1/128 of the gap or less."""
    n_copies = 4096
    distinct = (torch.rand(24, generator=torch.Generator().manual_seed(bits)) * 3 + 0.02).to(dtype).float()
    distinct[::2] *= -1
    codec = TruncatedFloat(bits, format_name, "stochastic", seed=7)
    gradient = torch.cat([distinct.repeat(n_copies), torch.tensor([3.1])]).to(dtype)
    found = there_and_back(codec, gradient).double()[:-1].view(n_copies, -1)
    for column, value in zip(found.T, distinct.double(), strict=True):
        levels = column.unique()
        assert levels.numel() <= 2, (value, levels)
        if levels.numel() == 1:
            assert (levels[0] - value).abs() <= 0.01 * value.abs()
            continue
        assert levels[0] < value < levels[1] or value in levels
        share = (column == levels[1]).double().mean()
        expected = (value - levels[0]) / (levels[1] - levels[0])
        assert (share - expected).abs() < 5 * (expected * (1 - expected) / n_copies).sqrt() + 1e-3


def test_values_on_the_grid_stay_where_they_are() -> None:
    """FP4 apart, whose scale is no power of two: after truncation another one fits."""
    for bits, format_name in ((8, "fp8-e4m3"), (8, "fp8-e5m2"), (12, "fp16"), (12, "native"), (5, "native")):
        on_grid = there_and_back(TruncatedFloat(bits, format_name), finite_gradient(4096, torch.float32)[:2000])
        again = there_and_back(TruncatedFloat(bits, format_name, "stochastic"), on_grid)
        assert same_bits(again, on_grid), (bits, format_name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("format_name", ["native", "auto"])
def test_a_carry_never_leaves_the_finite_numbers(format_name: str, rounding: str, dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    gradient = torch.tensor([limit, -limit] * 512, dtype=dtype)
    for bits in range(2, 8 * dtype.itemsize):
        assert there_and_back(TruncatedFloat(bits, format_name, rounding), gradient).isfinite().all(), bits


def test_seed_and_step_choose_the_numbers_and_nothing_else_does() -> None:
    gradient = finite_gradient(5000, torch.float32)

    def message(seed: int, step: int) -> torch.Tensor:
        return encode(TruncatedFloat(10, "native", "stochastic", seed), gradient, step=step)

    assert torch.equal(message(1, 2), message(1, 2))
    assert not torch.equal(message(1, 2), message(1, 3))
    assert not torch.equal(message(1, 2), message(2, 2))
    codec = TruncatedFloat(10, "native", "stochastic", 1)
    assert same_bits(there_and_back(codec, gradient)[:700], there_and_back(codec, gradient[:700]))
    first, second = (encode(codec, gradient, step=draw_after(first_draw(3, 1, 4), n)) for n in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(encode(codec, gradient, step=first_draw(3, 1, 4)), first)
    assert not torch.equal(encode(codec, gradient, step=first_draw(3, 1, 5)), first)
    assert draw_after((1 << 64) - 1, 1) == 0


@pytest.mark.parametrize("kind", ["normal", "uniform", "laplace", "of two sizes", "cubes"])
def test_more_bits_are_never_worse(kind: str) -> None:
    """Relative error against float64, over every number of bits, in native where it keeps its exponent and in auto."""
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(1 << 16, generator=generator)
    uniform = torch.rand(1 << 16, generator=generator) * 2 - 1
    gradient = {
        "normal": normal * 1e-3,
        "uniform": uniform,
        "laplace": uniform.sign() * -(1 - uniform.abs()).log(),
        "of two sizes": normal * torch.where(torch.arange(1 << 16) % 7 == 0, 1.0, 0.03),
        "cubes": normal**3,
    }[kind]

    def errors(allowed: range, format_name: str, rounding: str = "nearest") -> list[float]:
        codecs = [TruncatedFloat(bits, format_name, rounding) for bits in allowed]
        found = (there_and_back(codec, gradient).double() for codec in codecs)
        return [float((values - gradient).norm() / gradient.double().norm()) for values in found]

    for found in (errors(range(2, 33), "auto"), errors(range(9, 33), "native"), errors(range(4, 9), "fp8-e4m3")):
        assert all(finer <= coarser for coarser, finer in itertools.pairwise(found)), found
    for found, cut in zip(errors(range(5, 7), "auto"), errors(range(5, 7), "fp8-e4m3", "truncate"), strict=True):
        assert found < 0.5 * cut, (found, cut)
