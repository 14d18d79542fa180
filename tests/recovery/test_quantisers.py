"""Quantisers against their definitions in numpy: every value of every message, and what error feedback keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import quantiser_oracles as oracle
from gradwire import InvalidArgument, _native, codecs
from gradwire.codecs.hadamard import Thc
from gradwire.codecs.quantised import describe
from gradwire.codecs.ternary import Ternary
from gradwire.errors import BufferTooSmall, Unsupported
from quantiser_oracles import DTYPES, LENGTHS, decode, encode, make_gradient

CPU = torch.device("cpu")
SEED, STEP = 0x1234_5678_9ABC_DEF0, (7 << 40) + 3
CODECS: list[tuple[str, dict[str, Any]]] = [
    ("one-bit", {}),
    ("one-bit", {"scale": "two-means"}),
    ("one-bit", {"scale": "fixed"}),
    ("two-bit", {}),
    ("two-bit", {"threshold": 0.004, "relative": False}),
    ("ternary", {"seed": SEED}),
    ("qsgd", {"seed": SEED}),
    ("qsgd", {"levels": 5, "block": 128, "seed": SEED}),
    ("qsgd", {"levels": 127, "block": 4096, "seed": SEED}),
]
# Rotated values cannot be compared one by one with what was given.
WITH_THC: list[tuple[str, dict[str, Any]]] = [*CODECS, ("thc", {"seed": SEED})]
BITS = {"one-bit": 1, "two-bit": 2, "ternary": 2, "qsgd": 4, "thc": 4}


def expect(name: str, options: dict[str, Any], x: np.ndarray, step: int = STEP) -> np.ndarray:
    if name == "one-bit":
        return oracle.one_bit(x, **{"scale": "mean", **options})
    if name == "two-bit":
        return oracle.two_bit(x, options.get("threshold", 1.25), options.get("relative", True))
    if name == "ternary":
        scale = oracle.ternary_scale(x, 2.5)
        return (oracle.ternary(x, scale, SEED, step) * scale).astype(np.float32)
    return oracle.qsgd(x, options.get("levels", 7), options.get("block", 512), SEED, step)


def agree(found: np.ndarray, expected: np.ndarray, share_of_ties: float) -> None:
    """Equal to rounding; where numpy sums in another order, a value at the very edge may fall to the other side."""
    wrong = ~np.isclose(found, expected, rtol=3e-6, atol=1e-12)
    assert wrong.sum() <= share_of_ties * found.size, np.flatnonzero(wrong)[:5]


def ids(case: Any) -> str:
    return str(case)


def test_random_numbers_are_philox() -> None:
    """The vectors published with Random123, and every place of our order."""
    for word, key, expected in (
        (0, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (0xFFFFFFFF, (1 << 64) - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ):
        assert oracle.philox(np.full((1, 4), word, np.uint32), key)[0].tolist() == expected
    pi = np.array([[0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]], np.uint32)
    assert oracle.philox(pi, 0x299F31D0_A4093822)[0].tolist() == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    out = torch.zeros(640, dtype=torch.uint32)
    _native.random_numbers(SEED, STEP, 0, out)
    np.testing.assert_array_equal(out.numpy(), oracle.numbers(SEED, STEP, 640))
    later = torch.zeros(64, dtype=torch.uint32)
    _native.random_numbers(SEED, STEP, 9, later)
    np.testing.assert_array_equal(later.numpy(), out[576:].numpy())
    with pytest.raises(InvalidArgument):
        _native.random_numbers(SEED, STEP, 0, out[:63])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "options"), CODECS, ids=ids)
def test_messages_decode_to_the_definition(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    codec = codecs.by_name(name, **options)
    for n in LENGTHS if dtype == torch.float32 else (0, 1, 77, 4_097):
        gradient = make_gradient(n, dtype)
        message = encode(codec, gradient, **({"step": STEP} if "seed" in options else {}))
        assert message.numel() == codec.max_encoded_bytes(n, dtype)
        found = decode(codec, message, n)
        agree(found.numpy(), expect(name, options, gradient.float().numpy()), 1e-4)
        assert torch.equal(decode(codec, message, n, dtype), found.to(dtype))  # rounded once, to nearest even
        said = describe(message)
        assert (said["codec"], said["n_elements"], said["is_finite"]) == (name, n, True)
    bits = 8 if options.get("levels") == 127 else BITS[name]
    assert (
        message.numel()
        <= 32 + (n * bits + 7) // 8 + (4 * -(-n // options.get("block", 512)) if name == "qsgd" else 0) + 64
    )


@pytest.mark.parametrize(("name", "options"), WITH_THC, ids=ids)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residual_and_message_add_up_to_what_was_given(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    codec = codecs.by_name(name, **options)
    for n in (0, 1, 63, 4_099, 70_001):
        gradient, residual = make_gradient(n, dtype), make_gradient(n, seed=1)
        for scale in (1.0, 1_024.0):
            out = torch.empty(codec.max_encoded_bytes(n, dtype), dtype=torch.uint8)
            corrected = gradient.float() + residual * scale
            kept = torch.full((n,), torch.nan)
            before = residual.clone()
            n_bytes = codec.encode_with_residual(gradient, residual, out, STEP, new_residual=kept, residual_scale=scale)
            assert torch.equal(residual, before)
            # The fused sweep writes the very message of the sum.
            assert torch.equal(out[:n_bytes], encode(codec, corrected, step=STEP))
            decoded = decode(codec, out[:n_bytes], n)
            assert torch.equal(kept, (corrected - decoded) * (1 / scale)), name
            codec.encode_with_residual(gradient, residual, out, STEP, residual_scale=scale)  # in place
            assert torch.equal(residual, kept)
            residual = before


@pytest.mark.parametrize(("name", "options"), WITH_THC, ids=ids)
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_nonfinite_gradient_decodes_to_nan_and_keeps_the_residual(
    name: str, options: dict[str, Any], bad: float
) -> None:
    codec = codecs.by_name(name, **options)
    for n, place in ((1, 0), (100, 99), (5_000, 4_096), (70_000, 3)):
        gradient, residual = make_gradient(n), make_gradient(n, seed=1)
        gradient[place] = bad
        message = encode(codec, gradient)
        assert message.numel() == oracle.HEADER_BYTES
        assert not describe(message)["is_finite"]
        assert decode(codec, message, n).isnan().all()
        out, kept = torch.empty(codec.max_encoded_bytes(n, torch.float32), dtype=torch.uint8), torch.zeros(n)
        before = residual.clone()
        assert codec.encode_with_residual(gradient, residual, out, new_residual=kept) == oracle.HEADER_BYTES
        assert torch.equal(kept, before)
        codec.encode_with_residual(gradient, residual, out)
        assert torch.equal(residual, before)


@pytest.mark.parametrize(("name", "options"), WITH_THC, ids=ids)
def test_extreme_magnitudes_stay_finite(name: str, options: dict[str, Any]) -> None:
    codec = codecs.by_name(name, **options)
    largest = torch.finfo(torch.float32).max
    for value in (0.0, -0.0, 1e-45, -1e-40, 2.0**-101, largest / 1_000, -largest):
        gradient = torch.full((300,), value)
        message = encode(codec, gradient)
        if message.numel() == oracle.HEADER_BYTES:
            assert name in ("qsgd", "thc")  # a norm beyond float32
            assert abs(value) == largest
            continue
        decoded = decode(codec, message, 300)
        assert decoded.isfinite().all()
        if value == 0.0 and options.get("scale") != "fixed":
            assert not decoded.any()


def test_error_feedback_sends_everything_in_the_end() -> None:
    """A constant gradient: what is missing from the sum of all messages stays bounded, so their mean goes to it."""
    n = 600
    gradient = make_gradient(n)
    for name, options in (("one-bit", {}), ("one-bit", {"scale": "two-means"}), ("two-bit", {})):
        codec = codecs.by_name(name, **options)
        out, residual = torch.empty(codec.max_encoded_bytes(n, torch.float32), dtype=torch.uint8), torch.zeros(n)
        sent, errors = torch.zeros(n), {}
        for step in range(1, 2_001):
            n_bytes = codec.encode_with_residual(gradient, residual, out)
            sent += decode(codec, out[:n_bytes], n)
            errors[step] = float((sent / step - gradient).abs().max())
        assert torch.allclose(sent + residual, 2_000 * gradient, atol=1e-3)
        assert errors[2_000] < 0.5 * errors[200] + 1e-6, name


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ternary", {"clip": 1e6}),
        ("qsgd", {}),
        ("qsgd", {"levels": 1, "block": 128}),
        ("qsgd", {"levels": 100}),
        ("thc", {"clip": 40.0}),
    ],
)
def test_stochastic_rounding_is_right_on_average(name: str, options: dict[str, Any]) -> None:
    """2,000 steps, against Bernstein's bound: a right codec stays within it in all but one of 10^9 values."""
    codec, n, n_steps = codecs.by_name(name, seed=11, **options), 512, 2_000
    gradient = make_gradient(n)
    sum_, squares = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for step in range(n_steps):
        decoded = decode(codec, encode(codec, gradient, step=step), n).double()
        sum_ += decoded
        squares += decoded.square()
    mean, magnitude = sum_ / n_steps, gradient.abs().double()
    if name == "thc":  # noise of all values of a block, mixed: as good as Gaussian
        variance, widest = squares / n_steps - mean.square(), 0.0
    else:  # one of two neighbours, `widest` apart
        parts = magnitude.view(-1, options.get("block", n))
        gap = magnitude.max() if name == "ternary" else parts.norm(dim=1).max() / options.get("levels", 7)
        variance, widest = torch.minimum(magnitude * gap, gap.square() / 4), float(gap)
    bound = (2 * variance * 21 / n_steps).sqrt() + 2 * widest * 21 / (3 * n_steps)
    assert (mean - gradient).abs().le(bound + 1e-9).all()
    assert bool((variance > 0).any())
    # A bias in one direction, however small, would add up over all values.
    aligned = float(((mean - gradient) * gradient.sign()).mean())
    assert abs(aligned) < 5 * float(variance.mean() / n_steps / n) ** 0.5
    # Neighbouring steps draw independently.
    first, second = (decode(codec, encode(codec, gradient, step=step), n) - gradient for step in (0, 1))
    assert abs(float(torch.nn.functional.cosine_similarity(first, second, dim=0))) < 0.2


def test_two_bit_default_is_near_the_least_error() -> None:
    generator = torch.Generator().manual_seed(3)
    uniform = torch.rand(200_000, generator=generator) - 0.5
    for values in (
        -uniform.sign() * (1 - 2 * uniform.abs()).clamp(min=1e-9).log(),
        torch.randn(200_000, generator=generator),
    ):
        errors = {}
        for threshold in (0.7, 1.1, 1.25, 1.4, 1.8, 2.5):
            codec = codecs.by_name("two-bit", threshold=threshold)
            errors[threshold] = float((decode(codec, encode(codec, values), 200_000) - values).square().mean())
        assert errors[1.25] < 1.03 * min(errors.values())


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 7, 8, 127])
def test_ternary_counts_sum_to_the_mean_of_what_each_rank_drew(n_ranks: int) -> None:
    codec = Ternary(seed=SEED)
    for n in (0, 1, 64, 1_003, 5_000):
        gradients = [make_gradient(n, seed=rank) for rank in range(n_ranks)]
        shares, own = codec.share(n, [(0, n)], CPU), torch.empty(n_ranks, 1)
        for gradient, scales in zip(gradients, own, strict=True):
            codec.write_scales(gradient, shares, scales)
            assert np.isclose(float(scales), oracle.ternary_scale(gradient.numpy(), 2.5), rtol=1e-6)
        scales = own.amax(0)
        sums = torch.zeros(codec.count_bytes(n, n_ranks), dtype=torch.uint8)
        expected = np.zeros(n)
        for rank, gradient in enumerate(gradients):
            counts = torch.full_like(sums, 0xEE)
            codec.write_counts(gradient, shares, scales, n_ranks, counts, rank)
            sums += counts
            expected += oracle.ternary(gradient.numpy(), np.float32(scales), SEED, rank)
        out = torch.empty(n)
        codec.read_counts(sums, shares, scales, n_ranks, out)
        np.testing.assert_allclose(out.numpy(), expected * float(scales) / n_ranks, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("one-bit", {"scale": "median"}, "fixed, mean, two-means"),
        ("one-bit", {"threshold": 0.5}, 'scale="fixed"'),
        ("one-bit", {"scale": "fixed", "threshold": 0.0}, "threshold"),
        ("one-bit", {"scale": "fixed", "threshold": float("nan")}, "threshold"),
        ("two-bit", {"threshold": -1}, "threshold"),
        ("two-bit", {"threshold": float("inf")}, "threshold"),
        ("ternary", {"clip": 0}, "clip"),
        ("ternary", {"seed": -1}, "seed"),
        ("ternary", {"seed": 1 << 64}, "seed"),
        ("qsgd", {"levels": 0}, "levels"),
        ("qsgd", {"levels": 128}, "levels"),
        ("qsgd", {"block": 100}, "block"),
        ("qsgd", {"seed": 0.5}, "seed"),
        ("qsgd", {"colour": 1}, "colour"),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidArgument, match=match):
        codecs.by_name(name, **options)


@pytest.mark.parametrize("name", BITS)
def test_buffers_that_do_not_fit_are_refused(name: str) -> None:
    codec, gradient = codecs.by_name(name), torch.randn(100)
    out = torch.empty(codec.max_encoded_bytes(100, torch.float32), dtype=torch.uint8)
    with pytest.raises(BufferTooSmall):
        codec.encode(gradient, out[:-1])
    refused: list[tuple[torch.Tensor, torch.Tensor]] = [
        (gradient.double(), out),
        (gradient.int(), out),
        (gradient.view(10, 10), out),
        (gradient[::2], out),
        (gradient, out.view(torch.int8)),
        (torch.empty(100, device="meta"), out),
    ]
    for bad, into in refused:
        with pytest.raises(InvalidArgument):
            codec.encode(bad, into)
    for residual in (torch.zeros(99), torch.zeros(100, dtype=torch.float16), torch.zeros(200)[::2]):
        with pytest.raises(InvalidArgument, match="residual"):
            codec.encode_with_residual(gradient, residual, out)
    for scale in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(InvalidArgument, match="residual_scale"):
            codec.encode_with_residual(gradient, torch.zeros(100), out, residual_scale=scale)
    for step in (-1, 1 << 64):
        with pytest.raises(InvalidArgument, match="step"):
            codec.encode(gradient, out, step=step)
    with pytest.raises(InvalidArgument):
        codec.max_encoded_bytes(-1, torch.float32)
    with pytest.raises(InvalidArgument):
        codec.max_encoded_bytes(1, torch.float64)
    with pytest.raises(InvalidArgument):
        codec.decode(out, torch.empty(100, dtype=torch.float64))


def test_ternary_sums_refuse_what_would_overflow() -> None:
    codec = Ternary()
    with pytest.raises(Unsupported, match="127"):
        codec.count_bytes(10, 128)
    shares, counts = codec.share(65, [(0, 65)], CPU), torch.empty(32, dtype=torch.uint8)
    with pytest.raises(InvalidArgument):
        codec.write_counts(torch.ones(65), shares, torch.ones(1), 2, counts, 0)
    with pytest.raises(InvalidArgument):
        codec.read_counts(counts, shares, torch.ones(1), 2, torch.empty(65))


@pytest.mark.parametrize("n_ranks", [1, 8, 9])
def test_thc_sums_are_rotated_back_to_the_mean_of_what_each_rank_rounded(n_ranks: int) -> None:
    codec = Thc(seed=SEED)
    for n in (0, 1, 700, 1_024, 1_100):
        gradients = [make_gradient(n, seed=rank) for rank in range(n_ranks)]
        norms = torch.zeros(codec.n_norms(n))
        for gradient in gradients:
            own = torch.empty_like(norms)
            codec.write_norms(gradient, own)
            np.testing.assert_allclose(own.numpy(), oracle.thc_norms(gradient.numpy()), rtol=1e-6)
            norms = torch.maximum(norms, own)
        wide = codec.sums_are_wide(n_ranks)
        assert wide == (n_ranks > 8)
        sums, expected = torch.zeros(codec.code_bytes(n, n_ranks), dtype=torch.uint8), np.zeros(codec.n_codes(n))
        for rank, gradient in enumerate(gradients):
            codes = torch.full_like(sums, 0xEE)
            codec.write_codes(gradient, norms, codes, n_ranks=n_ranks, sign_step=STEP, step=rank)
            codec.summable(sums, n_ranks).add_(codec.summable(codes, n_ranks))
            codes = codes.view(torch.int16) if wide else codes
            wanted = oracle.thc_codes(gradient.numpy(), norms.numpy(), 2.15, SEED, STEP, rank)
            assert (codes.numpy() != wanted).sum() <= 1e-3 * n + 1  # float32 against float64 at the very edge
            expected += codes.numpy()
        out = torch.empty(n)
        codec.read_sums(sums, norms, n_ranks, out, sign_step=STEP)
        mean = oracle.thc_mean(expected, n, n_ranks, norms.numpy().astype(np.float64), 2.15, SEED, STEP)
        np.testing.assert_allclose(out.numpy(), mean, atol=1e-7, rtol=1e-4)


def test_thc_message_is_one_rank_s_codes_with_its_own_norms() -> None:
    codec = Thc(seed=SEED)
    for n in (1, 64, 65, 1_000, 1_025, 9_000):
        gradient = make_gradient(n)
        found = decode(codec, encode(codec, gradient, step=STEP), n)
        norms, codes, expected = (
            torch.empty(codec.n_norms(n)),
            torch.empty(codec.n_codes(n), dtype=torch.uint8),
            torch.empty(n),
        )
        codec.write_norms(gradient, norms)
        codec.write_codes(gradient, norms, codes, n_ranks=1, sign_step=STEP, step=STEP)
        codec.read_sums(codes, norms, 1, expected, sign_step=STEP)
        assert torch.equal(found, expected)
        # 16 levels of a Gaussian: the published error is about 2 % of the values' energy; 4 % with a block of few values.
        if n >= 1_000:
            assert float((found - gradient).square().sum()) < 0.04 * float(gradient.square().sum())


def test_thc_refuses_what_does_not_fit() -> None:
    codec, gradient = Thc(), torch.ones(100)
    norms, codes = torch.empty(codec.n_norms(100)), torch.empty(codec.n_codes(100), dtype=torch.uint8)
    codec.write_norms(gradient, norms)
    with pytest.raises(InvalidArgument):
        codec.write_norms(gradient, torch.empty(2))
    with pytest.raises(InvalidArgument):
        codec.write_codes(gradient, norms, codes[:-1], n_ranks=2, sign_step=0, step=0)
    with pytest.raises(InvalidArgument):
        codec.write_codes(gradient, torch.empty(2), codes, n_ranks=2, sign_step=0, step=0)
    with pytest.raises(InvalidArgument):
        codec.read_sums(codes, norms, 9, gradient, sign_step=0)  # sums of nine ranks have two bytes
    with pytest.raises(InvalidArgument):
        codec.read_sums(codes[:-1], norms, 2, gradient, sign_step=0)
    with pytest.raises(Unsupported, match="1000"):
        codec.sums_are_wide(1_001)
    for clip in (0.0, -1.0, float("inf")):
        with pytest.raises(InvalidArgument, match="clip"):
            Thc(clip=clip)
