"""GComp writes and reads exactly what docs/format.md says, for every kind of value."""

import numpy as np
import pytest
import torch

import gcomp_oracle as oracle
from float_messages import DTYPES, LEVELS, at_level, decode, encode, there_and_back
from gcomp_gradients import KINDS, NAMES, fitted_table, make_gradient, make_importance, words_of
from gradwire.codecs.gcomp import GCompCodec, HuffmanTable, describe

MODES = (("none", None), ("paper", None), ("uniform", 0), ("uniform", 5), ("truncate", 0), ("truncate", 4))
SIZES = [*range(0, 71), 511, 513]
CHUNK = oracle.CHUNK
each_format = pytest.mark.parametrize("format", [1, 2])
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def exponents_of(gradient: torch.Tensor) -> np.ndarray:
    name = NAMES[gradient.dtype]
    return words_of(gradient) >> oracle.MANTISSA_BITS[name] & (2 ** oracle.EXPONENT_BITS[name] - 1)


def check_against_oracle(
    gradient: torch.Tensor,
    mode: str,
    bits: int | None,
    format: int,
    table: HuffmanTable | None = None,
    rounding: str = "nearest",
    least_bits: int = 0,
) -> None:
    n, name, importance = gradient.numel(), NAMES[gradient.dtype], make_importance(gradient.numel())
    n_mantissa = oracle.MANTISSA_BITS[name]
    kept = n_mantissa if bits is None else n_mantissa - bits if mode == "truncate" else min(bits, n_mantissa)
    kept += 32 * least_bits
    codec = GCompCodec(mode, bits=bits, table=table, rounding=rounding, format=format, least_bits=least_bits)
    lengths = codec.table_in_use(gradient.dtype).lengths
    expected, values = oracle.encode(
        words_of(gradient), name, mode, kept, importance.numpy(), lengths, rounding, format
    )
    message = encode(codec, gradient, importance=importance)
    assert message.numpy().tobytes() == expected
    np.testing.assert_array_equal(words_of(decode(codec, message, n, gradient.dtype, importance=importance)), values)


@pytest.mark.parametrize(
    ("mode", "bits", "format"), [*((*mode, format) for mode in MODES for format in (1, 2)), ("paper", 4, 2)]
)
@each_dtype
def test_messages_of_every_small_size_equal_those_of_the_oracle(
    dtype: torch.dtype, mode: str, bits: int | None, format: int
) -> None:
    for n in SIZES:
        for kind in ("special", KINDS[n % 4]):
            check_against_oracle(make_gradient(kind, n, dtype), mode, bits, format)
        if mode == "paper":
            least_bits = n % 8 if format == 2 else 0
            check_against_oracle(make_gradient("special", n, dtype), mode, bits, format, rounding="truncate")
            check_against_oracle(make_gradient(KINDS[n % 4], n, dtype), mode, bits, format, least_bits=least_bits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "mode", "bits"), [(torch.float32, "paper", None), (torch.float16, "uniform", 3)])
@pytest.mark.parametrize("n", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 77])
@each_format
def test_messages_around_chunk_borders_equal_those_of_the_oracle(
    format: int, dtype: torch.dtype, mode: str, bits: int | None, kind: str, n: int
) -> None:
    gradient = make_gradient(kind, n, dtype)
    check_against_oracle(gradient, mode, bits, format, fitted_table(gradient, format))


@pytest.mark.parametrize("kind", KINDS)
@each_format
@each_dtype
def test_mode_none_keeps_every_bit_but_those_of_zeros_and_subnormals(
    dtype: torch.dtype, format: int, kind: str
) -> None:
    """At every loss scale. In format 2, float16's subnormals have codes of their own: only the sign of zero is lost."""
    for scale in (2.0**-10, 1.0, 2.0**10) if kind == "gaussian" else (1.0,):
        gradient = make_gradient(kind, 20_000, dtype) * scale
        codec = GCompCodec("none", table=fitted_table(gradient, format), format=format)
        words = words_of(gradient)
        is_kept = words != 0x8000 if (dtype, format) == (torch.float16, 2) else exponents_of(gradient) != 0
        found = there_and_back(codec, gradient, importance=make_importance(20_000))
        np.testing.assert_array_equal(words_of(found), np.where(is_kept, words, 0))


@each_format
@pytest.mark.parametrize(("mode", "bits"), [("none", None), ("paper", None), ("uniform", 3), ("truncate", 7)])
@each_dtype
def test_infinities_and_nans_keep_every_bit_in_every_mode_and_are_told_of(
    dtype: torch.dtype, mode: str, bits: int | None, format: int
) -> None:
    gradient, importance = make_gradient("special", 5000, dtype), torch.full((5000,), 255).byte()
    codec = GCompCodec(mode, bits=bits, format=format)
    decoded, nonfinite = there_and_back(codec, gradient, importance=importance), ~gradient.isfinite()
    assert nonfinite.any()
    np.testing.assert_array_equal(words_of(decoded)[nonfinite], words_of(gradient)[nonfinite])
    assert decoded[~nonfinite].isfinite().all()  # rounding never makes an infinity
    assert describe(encode(codec, gradient, importance=importance))["holds_nonfinite"]
    finite = make_gradient("gaussian", 5000, dtype)
    assert not describe(encode(codec, finite, importance=importance))["holds_nonfinite"]


@each_format
@each_dtype
def test_messages_never_exceed_max_encoded_bytes(dtype: torch.dtype, format: int) -> None:
    """Random bits under a table made for one exponent alone: the worst there is."""
    codec = GCompCodec("paper", format=format)
    histogram = torch.zeros(2 ** codec.exponent_bits(dtype), dtype=torch.int64)
    histogram[3] = 1
    codec.use_table(HuffmanTable.from_histogram(histogram))
    for n in (0, 1, 7, 1000, CHUNK + 5):
        importance = torch.zeros(n, dtype=torch.uint8)
        message = encode(codec, make_gradient("random bits", n, dtype), importance=importance)
        decode(codec, message, n, dtype, importance=importance)
        assert n < 1000 or describe(message)["n_raw_chunks"] > 0


@each_format
def test_exponents_come_within_two_percent_of_their_entropy_and_messages_within_one_of_their_bound(format: int) -> None:
    rng = np.random.default_rng(1)
    gradient = torch.from_numpy((rng.normal(size=400_000) * 2.0 ** rng.normal(-14, 1.5, 400_000)).astype(np.float32))
    codec = GCompCodec("paper", table=fitted_table(gradient), format=format)
    parts = describe(encode(codec, gradient, importance=make_importance(400_000)))
    share = np.bincount(exponents_of(gradient)) / 400_000
    entropy = -(share[share > 0] * np.log2(share[share > 0])).sum()
    assert parts["exponent_bits"] <= 1.02 * entropy
    assert parts["message_bits"] <= 1.01 * (entropy + parts["level_bits"] + parts["mantissa_bits"])


@each_format
@each_dtype
def test_histogram_counts_exponents_and_adds_up(dtype: torch.dtype, format: int) -> None:
    """In format 2 those of the float32 that each value equals."""
    gradient = make_gradient("special", 40_001, dtype)
    exponents = exponents_of(gradient)
    if format == 2:
        exponents = oracle.widen(words_of(gradient), NAMES[dtype]) >> 23 & 255
    codec = GCompCodec("none", format=format)
    histogram = torch.zeros(2 ** codec.exponent_bits(dtype), dtype=torch.int64)
    codec.histogram(gradient, histogram)
    codec.histogram(gradient[:5], histogram)
    expected = np.bincount([*exponents, *exponents[:5]], minlength=histogram.numel())
    np.testing.assert_array_equal(histogram.numpy(), expected)


@each_format
@each_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_adding_and_dividing_while_decoding_equal_torchs_own(kind: str, dtype: torch.dtype, format: int) -> None:
    """Of every kind of value; where the result is a NaN, it is one."""
    gradient, own = make_gradient(kind, 40_000, dtype), make_gradient(kind, 40_000, dtype, seed=1)
    codec, importance = GCompCodec("paper", format=format), make_importance(40_000)
    message = encode(codec, gradient, importance=importance)
    plain = decode(codec, message, 40_000, dtype, importance=importance)
    for level in LEVELS:
        with at_level(level):
            added = own.clone()
            codec.decode(message, added, importance, adds=True)
            pairs = [(added, plain + own)]
            for divisor in (2, 3, 4, 7):
                divided = decode(codec, message, 40_000, dtype, importance=importance, divisor=divisor)
                pairs.append((divided, plain / divisor))
        for found, expected in pairs:
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@each_dtype
def test_what_format_2_drops_is_below_the_guarantee(dtype: torch.dtype) -> None:
    """|error| <= 2^-(mantissa bits + 1) x S for S = 2^(importance / 4 - 41), the power of two below what the byte says."""
    gradient, importance = make_gradient("gaussian", 50_000, dtype), make_importance(50_000)
    decoded = there_and_back(GCompCodec("paper"), gradient, importance=importance)
    error, known = (decoded.double() - gradient.double()).abs(), importance > 0
    # A value so small that no mantissa bit counts keeps its exponent: it is off by at most a third of itself.
    bound = 2.0 ** (importance // 4 - 40).double() * 2.0 ** -(oracle.MANTISSA_BITS[NAMES[dtype]] + 1)
    assert (error[known] <= bound[known]).all()
    assert (error[known] > 0.4 * bound[known]).any()
    assert torch.equal(decoded[~known], torch.where(gradient == 0, 0, gradient)[~known])


def test_zeros_cost_their_huffman_code_alone() -> None:
    gradient = torch.zeros(10 * CHUNK)
    gradient[::100] = 1e-3
    codec = GCompCodec("paper", table=fitted_table(gradient), format=1)
    parts = describe(encode(codec, gradient, importance=make_importance(gradient.numel())))
    assert parts["level_bytes"] <= 2 * gradient.numel() / 100 / 8 + 10
    assert parts["mantissa_bytes"] <= 24 * gradient.numel() / 100 / 8 + 10
    assert parts["exponent_bits"] < 1.1


@each_format
@each_dtype
def test_rounding_to_nearest_halves_the_error_of_truncation_and_has_no_bias(dtype: torch.dtype, format: int) -> None:
    gradient, importance, errors = make_gradient("gaussian", 50_000, dtype), make_importance(50_000), {}
    for rounding in ("nearest", "truncate"):
        codec = GCompCodec("paper", rounding=rounding, format=format)
        found = there_and_back(codec, gradient, importance=importance)
        errors[rounding] = found.double() - gradient.double()
    nearest, truncated = errors["nearest"], errors["truncate"]
    assert nearest.abs().mean() <= 0.6 * truncated.abs().mean()
    assert abs((nearest * gradient.sign()).mean()) < 0.15 * abs((truncated * gradient.sign()).mean())
