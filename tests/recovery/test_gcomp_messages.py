"""GComp writes and reads exactly what docs/format.md says, for every kind of value."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gcomp_oracle as oracle
from gcomp_gradients import KINDS, NAMES, make_gradient, make_importance, words_of
from gradwire.codecs.gcomp import GComp, HuffmanTable, describe, message_holds_nonfinite

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MODES = (("none", None), ("paper", None), ("uniform", 0), ("uniform", 5), ("truncate", 0), ("truncate", 4))
SIZES = [*range(0, 71), 511, 513]
CHUNK = oracle.CHUNK


def encode(codec: GComp, gradient: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    out = torch.full((codec.max_encoded_bytes(gradient.numel(), gradient.dtype),), 0xA5, dtype=torch.uint8)
    return out[: codec.encode(gradient, out, importance)].clone()


def kept_bits(mode: str, bits: int | None, dtype: torch.dtype) -> int:
    n_mantissa = oracle.MANTISSA_BITS[NAMES[dtype]]
    if bits is None:
        return n_mantissa
    return bits if mode == "uniform" else n_mantissa - bits


def fitted_table(gradient: torch.Tensor) -> HuffmanTable:
    n_counts = 2 ** oracle.EXPONENT_BITS[NAMES[gradient.dtype]]
    histogram = torch.zeros(n_counts, dtype=torch.int64)
    GComp("none").histogram(gradient, histogram)
    return HuffmanTable.from_histogram(histogram) if histogram.any() else HuffmanTable.prior(gradient.dtype)


def check_against_oracle(
    gradient: torch.Tensor, mode: str, bits: int | None, table: HuffmanTable, rounding: str = "nearest"
) -> None:
    name, importance = NAMES[gradient.dtype], make_importance(gradient.numel())
    codec = GComp(mode, bits=bits, table=table, rounding=rounding)
    message = encode(codec, gradient, importance)
    expected = oracle.encode(
        words_of(gradient),
        name,
        mode,
        kept_bits(mode, bits, gradient.dtype),
        importance.numpy(),
        table.lengths,
        rounding,
    )
    assert message.numpy().tobytes() == expected
    decoded = torch.full_like(gradient, 7.0)
    codec.decode(message, decoded)
    np.testing.assert_array_equal(words_of(decoded), oracle.decode(expected, table.lengths))


@pytest.mark.parametrize(("mode", "bits"), MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_messages_of_every_small_size_equal_those_of_the_oracle(
    dtype: torch.dtype, mode: str, bits: int | None
) -> None:
    for n in SIZES:
        for kind in ("special", KINDS[n % 4]):
            check_against_oracle(make_gradient(kind, n, dtype), mode, bits, HuffmanTable.prior(dtype))
        if mode == "paper":
            check_against_oracle(make_gradient("special", n, dtype), mode, bits, HuffmanTable.prior(dtype), "truncate")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "mode", "bits"), [(torch.float32, "paper", None), (torch.float16, "uniform", 3)])
@pytest.mark.parametrize("n", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 77])
def test_messages_around_chunk_borders_equal_those_of_the_oracle(
    dtype: torch.dtype, mode: str, bits: int | None, kind: str, n: int
) -> None:
    gradient = make_gradient(kind, n, dtype)
    check_against_oracle(gradient, mode, bits, fitted_table(gradient))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_mode_none_keeps_every_bit_but_those_of_zeros_and_subnormals(dtype: torch.dtype, kind: str) -> None:
    gradient = make_gradient(kind, 20000, dtype)
    decoded = torch.empty_like(gradient)
    codec = GComp("none", table=fitted_table(gradient))
    codec.decode(encode(codec, gradient, make_importance(20000)), decoded)
    words = words_of(gradient)
    n_mantissa = oracle.MANTISSA_BITS[NAMES[dtype]]
    has_exponent = (words >> n_mantissa & (2 ** oracle.EXPONENT_BITS[NAMES[dtype]] - 1)) != 0
    np.testing.assert_array_equal(words_of(decoded), np.where(has_exponent, words, 0))


@pytest.mark.parametrize("mode_bits", [("none", None), ("paper", None), ("uniform", 3), ("truncate", 7)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nans_keep_every_bit_in_every_mode(
    dtype: torch.dtype, mode_bits: tuple[str, int | None]
) -> None:
    gradient = make_gradient("special", 5000, dtype)
    codec = GComp(mode_bits[0], bits=mode_bits[1])
    message, decoded = encode(codec, gradient, torch.full((5000,), 255, dtype=torch.uint8)), torch.empty_like(gradient)
    codec.decode(message, decoded)
    nonfinite = ~torch.isfinite(gradient).numpy()
    assert nonfinite.any()
    np.testing.assert_array_equal(words_of(decoded)[nonfinite], words_of(gradient)[nonfinite])
    assert np.isfinite(decoded.float().numpy()[~nonfinite]).all()  # rounding never makes an infinity
    assert message_holds_nonfinite(message)


def test_message_without_infinities_says_so_in_its_header() -> None:
    gradient = make_gradient("gaussian", 1000, torch.float32)
    assert not message_holds_nonfinite(encode(GComp("none"), gradient, make_importance(1000)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_messages_never_exceed_max_encoded_bytes(dtype: torch.dtype) -> None:
    """Random bits under a table made for one exponent alone: the worst there is."""
    histogram = torch.zeros(2 ** oracle.EXPONENT_BITS[NAMES[dtype]], dtype=torch.int64)
    histogram[3] = 1
    codec = GComp("paper", table=HuffmanTable.from_histogram(histogram))
    for n in (0, 1, 7, 1000, CHUNK + 5):
        gradient = make_gradient("random bits", n, dtype)
        message = encode(codec, gradient, torch.zeros(n, dtype=torch.uint8))
        decoded = torch.empty_like(gradient)
        codec.decode(message, decoded)
        assert message.numel() <= codec.max_encoded_bytes(n, dtype)
        assert n < 1000 or describe(message)["n_raw_chunks"] > 0


def test_encoding_leaves_bytes_beyond_out_alone() -> None:
    gradient = make_gradient("special", 3 * CHUNK + 11, torch.float32)
    codec = GComp("paper")
    n_max = codec.max_encoded_bytes(gradient.numel(), gradient.dtype)
    buffer = torch.full((n_max + 4096,), 0x5A, dtype=torch.uint8)
    codec.encode(gradient, buffer[:n_max], make_importance(gradient.numel()))
    assert (buffer[n_max:] == 0x5A).all()


def test_exponents_come_within_two_percent_of_their_entropy_and_messages_within_one_of_their_bound() -> None:
    rng = np.random.default_rng(1)
    gradient = torch.from_numpy((rng.normal(size=400_000) * 2.0 ** rng.normal(-14, 1.5, 400_000)).astype(np.float32))
    codec = GComp("paper", table=fitted_table(gradient))
    parts = describe(encode(codec, gradient, make_importance(400_000)))
    share = np.bincount(words_of(gradient) >> 23 & 0xFF) / 400_000
    entropy = -(share[share > 0] * np.log2(share[share > 0])).sum()
    assert parts["exponent_bits"] <= 1.02 * entropy
    assert parts["message_bits"] <= 1.01 * (entropy + parts["level_bits"] + parts["mantissa_bits"])


def test_zeros_cost_their_huffman_code_alone() -> None:
    gradient = torch.zeros(10 * CHUNK)
    gradient[::100] = 1e-3
    parts = describe(encode(GComp("paper", table=fitted_table(gradient)), gradient, make_importance(gradient.numel())))
    assert parts["level_bytes"] <= 2 * gradient.numel() / 100 / 8 + 10
    assert parts["mantissa_bytes"] <= 24 * gradient.numel() / 100 / 8 + 10
    assert parts["exponent_bits"] < 1.1


@pytest.mark.parametrize("dtype", DTYPES)
def test_histogram_counts_exponent_fields_and_adds_up(dtype: torch.dtype) -> None:
    gradient = make_gradient("special", 40_001, dtype)
    n_counts = 2 ** oracle.EXPONENT_BITS[NAMES[dtype]]
    expected = np.bincount(
        words_of(gradient) >> oracle.MANTISSA_BITS[NAMES[dtype]] & (n_counts - 1), minlength=n_counts
    )
    histogram = torch.zeros(n_counts, dtype=torch.int64)
    GComp("none").histogram(gradient, histogram)
    GComp("none").histogram(gradient[:5], histogram)
    expected += np.bincount(
        words_of(gradient[:5]) >> oracle.MANTISSA_BITS[NAMES[dtype]] & (n_counts - 1), minlength=n_counts
    )
    np.testing.assert_array_equal(histogram.numpy(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_to_nearest_halves_the_largest_error_of_truncation_and_has_no_bias(dtype: torch.dtype) -> None:
    gradient, importance = make_gradient("gaussian", 50_000, dtype), make_importance(50_000)
    errors = {}
    for rounding in ("nearest", "truncate"):
        codec, decoded = GComp("paper", rounding=rounding), torch.empty_like(gradient)
        codec.decode(encode(codec, gradient, importance), decoded)
        errors[rounding] = (decoded.double() - gradient.double()).numpy()
    assert np.abs(errors["nearest"]).max() <= 0.51 * np.abs(errors["truncate"]).max()
    towards_zero = (errors["truncate"] * np.sign(gradient.double().numpy())).mean()
    assert abs((errors["nearest"] * np.sign(gradient.double().numpy())).mean()) < 0.1 * abs(towards_zero)
