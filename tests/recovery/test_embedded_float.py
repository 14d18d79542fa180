"""Embedded floats: any first bits decode to the midpoint they stand for, any further bits refine, all bits are exact."""

import math

import numpy as np
import pytest
import torch

from float_messages import (
    DTYPES,
    clamped,
    decode,
    every_16_bit_value,
    finite_gradient,
    planes,
    same_bits,
    there_and_back,
)
from gradwire.codecs.embedded_float import EmbeddedFloat, EmbeddedValues, describe

SIZES = (0, 1, 2, 31, 32, 33, 255, 256, 257, 1000, 16384, 16385, 40_007)
FORMATS = (1, 2)


def root(y: np.ndarray) -> np.ndarray:
    """Of [0, 1): 1 / 2^k of 1 / 4^k, and straight lines between these and the powers of two between them."""
    mantissa, exponent = np.frexp(y)  # [1/2, 1)
    halved = (exponent + 1) // 2
    return np.where(y > 0, np.ldexp(np.where(exponent % 2 == 0, mantissa + 1, mantissa + 0.5) / 2, halved), 0)


def square(r: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(r)
    return np.ldexp(np.where(mantissa >= 0.75, 2 * mantissa - 1, mantissa - 0.25), 2 * exponent)


def oracle(gradient: torch.Tensor, n_bits: int, partition: int, format: int = 2) -> torch.Tensor:
    """In float64, value by value as docs/format.md says; n_bits below 32."""
    values = gradient.to(torch.float64).numpy()
    result = np.empty(values.size, np.float32)
    for start in range(0, values.size, partition):
        part = values[start : start + partition]
        largest = np.abs(part).max()
        exponent = max(-96, int(np.floor(np.log2(largest)))) if largest > 0 else -96
        if format == 2:
            cells = 2.0 ** (n_bits - 1)
            cell = np.floor(root(np.ldexp(np.abs(part), -exponent - 1)) * cells)
            mantissa, power = np.frexp(np.ldexp(np.where(cell > 0, square((cell + 0.5) / cells), 0), exponent + 1))
            cut = np.where(power < -125, 0, np.ldexp(np.floor(np.ldexp(mantissa, 24)), power - 24))
            result[start : start + partition] = np.copysign(cut.astype(np.float32), part)
            continue
        unit, n_unknown = 2.0 ** (exponent - 30), 32 - n_bits
        known = np.floor(np.abs(part) / unit / 2.0**n_unknown) * 2.0**n_unknown
        centred = np.where(known > 0, known + 2.0 ** (n_unknown - 1) - 1, 0)
        result[start : start + partition] = np.copysign(np.float32(np.minimum(centred, 2.0**31 - 128) * unit), part)
    return clamped(torch.from_numpy(result), gradient.dtype)


def refine(codec: EmbeddedFloat, receiver: EmbeddedValues, gradient: torch.Tensor, cuts: tuple[int, ...]) -> None:
    n, dtype = gradient.numel(), gradient.dtype
    before, sums = 0, torch.linspace(-1, 1, n)
    for cut in cuts:
        assert receiver.add_planes(planes(codec, gradient, before, cut - before)) == cut == receiver.n_bits
        before = cut
        found, own = torch.empty_like(gradient), torch.empty_like(gradient)
        receiver.write(found)
        codec.quantise(gradient, cut, own)
        assert same_bits(found, own)
        assert cut < 2 or same_bits(found, decode(codec, planes(codec, gradient, 0, cut), n, dtype))
    if dtype == torch.float32:
        total = sums.clone()
        receiver.add_to(total)
        assert same_bits(total, sums + found)
    assert before < 32 or same_bits(found, gradient)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_bits_decodes_to_what_the_format_says(dtype: torch.dtype, format: int) -> None:
    for n, partition in [*((n, 256) for n in SIZES), (3000, 32), (3000, 64), (3000, 512), (3000, 1024)]:
        gradient = finite_gradient(n, dtype)
        for bits in range(2, 32) if n in (257, 3000) else (2, 8, 13, 24):
            found = there_and_back(EmbeddedFloat(bits, partition, format), gradient)
            assert same_bits(found, oracle(gradient, bits, partition, format)), (n, partition, bits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_comes_back_exactly_and_finite_ones_within_the_bound(dtype: torch.dtype) -> None:
    everything = every_16_bit_value(dtype)
    assert same_bits(there_and_back(EmbeddedFloat(32), everything), everything)
    finite = everything[everything.isfinite()]
    finite = finite[finite.abs().to(torch.float32).argsort()]  # partitions of like values
    for bits in (2, 5, 9, 16):
        assert same_bits(there_and_back(EmbeddedFloat(bits), finite), oracle(finite, bits, 256))


@pytest.mark.parametrize("format", FORMATS)
def test_no_value_is_further_off_than_the_bound(format: int) -> None:
    gradient = finite_gradient(40_000, torch.float32)[: 78 * 256].double().view(-1, 256)
    exponent = torch.floor(torch.log2(gradient.abs().amax(1, keepdim=True))).clamp(min=-96)
    finer = torch.floor((exponent - torch.floor(torch.log2(gradient.abs()))) / 2) if format == 2 else torch.tensor(0.0)
    for bits in range(2, 32):
        codec = EmbeddedFloat(bits, format=format)
        off = (there_and_back(codec, gradient.float().view(-1)).double().view(-1, 256) - gradient).abs()
        assert (off <= torch.exp2(exponent - finer + 2 - bits)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cuts", [(32,), (8, 32), (2, 5, 6, 20, 32), tuple(range(1, 33)), (9, 31, 32), (4, 12)])
def test_any_sequence_of_messages_refines_to_what_one_message_gives(dtype: torch.dtype, cuts: tuple[int, ...]) -> None:
    for n, format in [(0, 2), (1, 2), (33, 2), (700, 1), (700, 2), (16384 + 300, 2)]:
        codec = EmbeddedFloat(format=format)
        receiver = codec.receive(n, dtype)
        for seed in range(2):
            refine(codec, receiver, finite_gradient(n, dtype, seed), cuts)
            receiver.reset()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_a_non_finite_value_is_flagged_and_makes_its_partition_nan_until_all_bits_are_known(
    dtype: torch.dtype, value: float
) -> None:
    gradient = finite_gradient(2000, dtype)[:1000]
    gradient[300] = value
    codec = EmbeddedFloat(12)
    message = planes(codec, gradient, 0, 12)
    assert describe(message)["holds_nonfinite"]
    assert not describe(planes(codec, gradient[512:], 0, 12))["holds_nonfinite"]
    found = decode(codec, message, 1000, dtype)
    assert found[256:512].isnan().all()
    assert found[:256].isfinite().all()
    assert found[512:].isfinite().all()
    receiver, sums = codec.receive(1000, dtype), torch.zeros(1000)
    receiver.add_planes(message)
    receiver.add_to(sums)
    assert torch.equal(sums.isnan(), found.isnan())
    receiver.add_planes(planes(codec, gradient, 12, 20))
    receiver.write(found)
    assert same_bits(found, gradient)


def test_a_message_costs_its_bits_a_byte_a_partition_and_headers() -> None:
    codec, n = EmbeddedFloat(8), 1_000_000
    assert codec.max_encoded_bytes(n, torch.float32) == n + -(-n // 256) + 40 + 8 * -(-n // 16384)
    assert codec.max_plane_bytes(n, torch.float32, 8, 3) == 3 * n // 8 + 40 + 8 * -(-n // 16384)


def test_more_bits_are_nearer_and_roots_nearer_than_magnitudes_with_every_number_of_bits() -> None:
    gradient = torch.randn(50_000, generator=torch.Generator().manual_seed(3)) ** 3 * 1e-3  # tails as gradients have
    before = [math.inf, math.inf]
    for bits in range(2, 24):
        off = [(there_and_back(EmbeddedFloat(bits, format=format), gradient) - gradient).norm() for format in FORMATS]
        assert off[1] < 0.85 * off[0]
        assert all(now < then for now, then in zip(off, before, strict=True))
        before = off
