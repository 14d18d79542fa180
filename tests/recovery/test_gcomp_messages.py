"""GComp writes and reads exactly what docs/format.md says, for every kind of value."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gcomp_oracle as oracle
import gcomp_oracle_2 as oracle_2
from gcomp_gradients import KINDS, NAMES, make_gradient, make_importance, words_of
from gradwire import _native
from gradwire.codecs.gcomp import GCompCodec, HuffmanTable, describe, message_holds_nonfinite

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FORMATS = (1, 2)
MODES = (("none", None), ("paper", None), ("uniform", 0), ("uniform", 5), ("truncate", 0), ("truncate", 4))
SIZES = [*range(0, 71), 511, 513]
CHUNK = oracle.CHUNK


def encode(codec: GCompCodec, gradient: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    out = torch.full((codec.max_encoded_bytes(gradient.numel(), gradient.dtype),), 0xA5, dtype=torch.uint8)
    return out[: codec.encode(gradient, out, importance)].clone()


def kept_bits(mode: str, bits: int | None, dtype: torch.dtype) -> int:
    n_mantissa = oracle.MANTISSA_BITS[NAMES[dtype]]
    if bits is None:
        return n_mantissa
    if mode == "paper":
        return min(bits, n_mantissa)
    return bits if mode == "uniform" else n_mantissa - bits


def prior_table(dtype: torch.dtype, format: int) -> HuffmanTable:
    return GCompCodec("none", format=format).table_in_use(dtype)


def fitted_table(gradient: torch.Tensor, format: int = 2) -> HuffmanTable:
    codec = GCompCodec("none", format=format)
    histogram = torch.zeros(2 ** codec.exponent_bits(gradient.dtype), dtype=torch.int64)
    codec.histogram(gradient, histogram)
    return HuffmanTable.from_histogram(histogram) if histogram.any() else prior_table(gradient.dtype, format)


def check_against_oracle(
    gradient: torch.Tensor, mode: str, bits: int | None, table: HuffmanTable, format: int, rounding: str = "nearest"
) -> None:
    name, importance = NAMES[gradient.dtype], make_importance(gradient.numel())
    codec = GCompCodec(mode, bits=bits, table=table, rounding=rounding, format=format)
    message = encode(codec, gradient, importance)
    expected = (oracle if format == 1 else oracle_2).encode(
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
    codec.decode(message, decoded, importance)
    if format == 1:
        expected_values = oracle.decode(expected, table.lengths)
    else:
        expected_values = oracle_2.decode(expected, importance.numpy(), table.lengths)
    np.testing.assert_array_equal(words_of(decoded), expected_values)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("mode", "bits"), [*MODES, ("paper", 4)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_messages_of_every_small_size_equal_those_of_the_oracle(
    dtype: torch.dtype, mode: str, bits: int | None, format: int
) -> None:
    if (mode, bits, format) == ("paper", 4, 1):
        pytest.skip("a cap is of format 2")
    table = prior_table(dtype, format)
    for n in SIZES:
        for kind in ("special", KINDS[n % 4]):
            check_against_oracle(make_gradient(kind, n, dtype), mode, bits, table, format)
        if mode == "paper":
            check_against_oracle(make_gradient("special", n, dtype), mode, bits, table, format, "truncate")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "mode", "bits"), [(torch.float32, "paper", None), (torch.float16, "uniform", 3)])
@pytest.mark.parametrize("n", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 77])
@pytest.mark.parametrize("format", FORMATS)
def test_messages_around_chunk_borders_equal_those_of_the_oracle(
    format: int, dtype: torch.dtype, mode: str, bits: int | None, kind: str, n: int
) -> None:
    gradient = make_gradient(kind, n, dtype)
    check_against_oracle(gradient, mode, bits, fitted_table(gradient, format), format)


@pytest.mark.parametrize("kind", KINDS)
def test_mode_none_keeps_every_float16_at_every_loss_scale(kind: str) -> None:
    """Every bit but the sign of zero: subnormals have codes of their own in format 2."""
    gradient = make_gradient(kind, 20000, torch.float16)
    for scale in (2.0**-10, 1.0, 2.0**10):
        scaled = gradient * scale if kind == "gaussian" else gradient
        codec, decoded = GCompCodec("none"), torch.empty_like(gradient)
        codec.decode(encode(codec, scaled, make_importance(20000)), decoded)
        words = words_of(scaled)
        np.testing.assert_array_equal(words_of(decoded), np.where(words == 0x8000, 0, words))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "format"), [*((dtype, 1) for dtype in DTYPES), (torch.float32, 2), (torch.bfloat16, 2)]
)
def test_mode_none_keeps_every_bit_but_those_of_zeros_and_subnormals(
    dtype: torch.dtype, format: int, kind: str
) -> None:
    gradient = make_gradient(kind, 20000, dtype)
    decoded = torch.empty_like(gradient)
    codec = GCompCodec("none", table=fitted_table(gradient, format), format=format)
    codec.decode(encode(codec, gradient, make_importance(20000)), decoded)
    words = words_of(gradient)
    n_mantissa = oracle.MANTISSA_BITS[NAMES[dtype]]
    has_exponent = (words >> n_mantissa & (2 ** oracle.EXPONENT_BITS[NAMES[dtype]] - 1)) != 0
    np.testing.assert_array_equal(words_of(decoded), np.where(has_exponent, words, 0))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("mode_bits", [("none", None), ("paper", None), ("uniform", 3), ("truncate", 7)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_and_nans_keep_every_bit_in_every_mode(
    dtype: torch.dtype, mode_bits: tuple[str, int | None], format: int
) -> None:
    gradient = make_gradient("special", 5000, dtype)
    codec, importance = GCompCodec(mode_bits[0], bits=mode_bits[1], format=format), torch.full((5000,), 255).byte()
    message, decoded = encode(codec, gradient, importance), torch.empty_like(gradient)
    codec.decode(message, decoded, importance)
    nonfinite = ~torch.isfinite(gradient).numpy()
    assert nonfinite.any()
    np.testing.assert_array_equal(words_of(decoded)[nonfinite], words_of(gradient)[nonfinite])
    assert np.isfinite(decoded.float().numpy()[~nonfinite]).all()  # rounding never makes an infinity
    assert message_holds_nonfinite(message)


def test_message_without_infinities_says_so_in_its_header() -> None:
    gradient = make_gradient("gaussian", 1000, torch.float32)
    assert not message_holds_nonfinite(encode(GCompCodec("none"), gradient, make_importance(1000)))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_messages_never_exceed_max_encoded_bytes(dtype: torch.dtype, format: int) -> None:
    """Random bits under a table made for one exponent alone: the worst there is."""
    codec = GCompCodec("paper", format=format)
    histogram = torch.zeros(2 ** codec.exponent_bits(dtype), dtype=torch.int64)
    histogram[3] = 1
    codec.use_table(HuffmanTable.from_histogram(histogram))
    for n in (0, 1, 7, 1000, CHUNK + 5):
        gradient = make_gradient("random bits", n, dtype)
        message = encode(codec, gradient, torch.zeros(n, dtype=torch.uint8))
        codec.decode(message, torch.empty_like(gradient), torch.zeros(n, dtype=torch.uint8))
        assert message.numel() <= codec.max_encoded_bytes(n, dtype)
        assert n < 1000 or describe(message)["n_raw_chunks"] > 0


@pytest.mark.parametrize("format", FORMATS)
def test_encoding_leaves_bytes_beyond_out_alone(format: int) -> None:
    gradient = make_gradient("special", 3 * CHUNK + 11, torch.float32)
    codec = GCompCodec("paper", format=format)
    n_max = codec.max_encoded_bytes(gradient.numel(), gradient.dtype)
    buffer = torch.full((n_max + 4096,), 0x5A, dtype=torch.uint8)
    codec.encode(gradient, buffer[:n_max], make_importance(gradient.numel()))
    assert (buffer[n_max:] == 0x5A).all()


@pytest.mark.parametrize("format", FORMATS)
def test_exponents_come_within_two_percent_of_their_entropy_and_messages_within_one_of_their_bound(format: int) -> None:
    rng = np.random.default_rng(1)
    gradient = torch.from_numpy((rng.normal(size=400_000) * 2.0 ** rng.normal(-14, 1.5, 400_000)).astype(np.float32))
    codec = GCompCodec("paper", table=fitted_table(gradient), format=format)
    parts = describe(encode(codec, gradient, make_importance(400_000)))
    share = np.bincount(words_of(gradient) >> 23 & 0xFF) / 400_000
    entropy = -(share[share > 0] * np.log2(share[share > 0])).sum()
    assert parts["exponent_bits"] <= 1.02 * entropy
    assert parts["message_bits"] <= 1.01 * (entropy + parts["level_bits"] + parts["mantissa_bits"])


def test_zeros_cost_their_huffman_code_alone() -> None:
    gradient = torch.zeros(10 * CHUNK)
    gradient[::100] = 1e-3
    codec = GCompCodec("paper", table=fitted_table(gradient), format=1)
    parts = describe(encode(codec, gradient, make_importance(gradient.numel())))
    assert parts["level_bytes"] <= 2 * gradient.numel() / 100 / 8 + 10
    assert parts["mantissa_bytes"] <= 24 * gradient.numel() / 100 / 8 + 10
    assert parts["exponent_bits"] < 1.1


@pytest.mark.parametrize("dtype", DTYPES)
def test_histogram_of_format_1_counts_exponent_fields_and_adds_up(dtype: torch.dtype) -> None:
    gradient = make_gradient("special", 40_001, dtype)
    n_counts = 2 ** oracle.EXPONENT_BITS[NAMES[dtype]]
    expected = np.bincount(
        words_of(gradient) >> oracle.MANTISSA_BITS[NAMES[dtype]] & (n_counts - 1), minlength=n_counts
    )
    histogram = torch.zeros(n_counts, dtype=torch.int64)
    GCompCodec("none", format=1).histogram(gradient, histogram)
    GCompCodec("none", format=1).histogram(gradient[:5], histogram)
    expected += np.bincount(
        words_of(gradient[:5]) >> oracle.MANTISSA_BITS[NAMES[dtype]] & (n_counts - 1), minlength=n_counts
    )
    np.testing.assert_array_equal(histogram.numpy(), expected)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_to_nearest_halves_the_error_of_truncation_and_has_no_bias(dtype: torch.dtype, format: int) -> None:
    gradient, importance = make_gradient("gaussian", 50_000, dtype), make_importance(50_000)
    errors = {}
    for rounding in ("nearest", "truncate"):
        codec, decoded = GCompCodec("paper", rounding=rounding, format=format), torch.empty_like(gradient)
        codec.decode(encode(codec, gradient, importance), decoded, importance)
        errors[rounding] = (decoded.double() - gradient.double()).numpy()
    assert np.abs(errors["nearest"]).mean() <= 0.6 * np.abs(errors["truncate"]).mean()
    towards_zero = (errors["truncate"] * np.sign(gradient.double().numpy())).mean()
    assert abs((errors["nearest"] * np.sign(gradient.double().numpy())).mean()) < 0.15 * abs(towards_zero)


def test_histogram_of_format_2_counts_the_exponents_of_equal_float32_values() -> None:
    gradient = make_gradient("special", 40_001, torch.float16)
    histogram = torch.zeros(256, dtype=torch.int64)
    GCompCodec("none").histogram(gradient, histogram)
    expected = np.bincount(oracle_2.widen(words_of(gradient), "float16") >> 23 & 255, minlength=256)
    np.testing.assert_array_equal(histogram.numpy(), expected)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_adding_and_dividing_while_decoding_equal_torchs_own(dtype: torch.dtype, format: int) -> None:
    """Of every kind of value; where the result is a NaN, it is one."""
    importance = make_importance(40_000)
    for kind in KINDS:
        gradient, own = make_gradient(kind, 40_000, dtype), make_gradient(kind, 40_000, dtype, seed=1)
        codec = GCompCodec("paper", format=format)
        message, plain = encode(codec, gradient, importance), torch.empty_like(gradient)
        codec.decode(message, plain, importance)
        for level in ((False, False), (True, False), (True, True)):
            _native.limit_simd_level(*level)
            try:
                total, mean = torch.empty_like(gradient), torch.empty_like(gradient)
                codec.decode(message, total, importance, addend=own)
                torch.testing.assert_close(total, plain + own, rtol=0, atol=0, equal_nan=True)
                in_place = own.clone()
                codec.decode(message, in_place, importance, addend=in_place)
                torch.testing.assert_close(in_place, total, rtol=0, atol=0, equal_nan=True)
                for divisor in (2, 3, 4, 7):
                    codec.decode(message, mean, importance, divisor=divisor)
                    torch.testing.assert_close(mean, plain / divisor, rtol=0, atol=0, equal_nan=True)
            finally:
                _native.limit_simd_level(True, True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_format_2_drops_is_below_the_guarantee(dtype: torch.dtype) -> None:
    """|error| <= 2^-(mantissa bits + 1) x S for S = 2^(importance / 4 - 41), the power of two below what the byte says."""
    gradient, importance = make_gradient("gaussian", 50_000, dtype), make_importance(50_000)
    codec, decoded = GCompCodec("paper"), torch.empty_like(gradient)
    codec.decode(encode(codec, gradient, importance), decoded, importance)
    error = (decoded.double() - gradient.double()).abs()
    known = importance > 0
    scale = 2.0 ** (importance // 4 - 40).double()
    n_mantissa = oracle.MANTISSA_BITS[NAMES[dtype]]
    # A value so small that no mantissa bit counts keeps its exponent: it is off by at most a third of itself.
    bound = torch.maximum(scale * 2.0 ** -(n_mantissa + 1), torch.zeros(1).double())
    assert (error[known] <= bound[known]).all()
    assert (error[known] > 0.4 * bound[known]).any()
    assert torch.equal(decoded[~known], torch.where(gradient == 0, 0, gradient)[~known])
