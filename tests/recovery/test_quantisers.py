"""Quantisers against their definitions in numpy: every value of every message, and what error feedback keeps."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import quantiser_oracles as oracle
from float_messages import DTYPES, decode, encode, there_and_back
from gradwire import InvalidArgument, _native, codecs
from gradwire.codecs.hadamard import Thc
from gradwire.codecs.quantised import describe
from gradwire.codecs.ternary import Ternary
from quantiser_oracles import LENGTHS, make_gradient

CPU = torch.device("cpu")
SEED, STEP, HEADER_BYTES = 0x1234_5678_9ABC_DEF0, (7 << 40) + 3, 32
Case = tuple[str, dict[str, Any]]
CODECS: list[Case] = [
    ("one-bit", {}), ("one-bit", {"scale": "two-means"}), ("one-bit", {"scale": "fixed"}), ("two-bit", {}),
    ("two-bit", {"threshold": 0.004, "relative": False}), ("ternary", {"seed": SEED}), ("qsgd", {"seed": SEED}),
    ("qsgd", {"levels": 5, "block": 128, "seed": SEED}), ("qsgd", {"levels": 127, "block": 4096, "seed": SEED}),
]  # fmt: skip
# A scale for every group of values, and none for two tensors.
GROUPED: list[Case] = [
    ("one-bit", {"scale_values": 512}),
    ("one-bit", {"scale_values": 64, "scale": "two-means"}),
    ("two-bit", {"scale_values": 128}),
    ("two-bit", {"scale_values": 4096, "threshold": 0.8}),
    ("two-bit", {"scale_values": 64, "levels": 4}),
    ("two-bit", {"scale_values": 1024, "levels": 4}),
]
# Rotated values cannot be compared one by one with what was given.
ALL: list[Case] = [*CODECS, *GROUPED, ("thc", {"seed": SEED})]
every_codec = pytest.mark.parametrize(("name", "options"), ALL, ids=str)
LAYOUTS: list[tuple[int, list[int]]] = [
    (0, []), (1, []), (63, [1]), (64, []), (65, [64]), (1_000, [10, 11, 700]), (4_097, [4_096]),
    (140_001, [5, 4_100, 70_000, 140_000]), (1_200_003, [3, 1_000_000]),
]  # fmt: skip


def of_tensors(n: int, cuts: list[int], seed: int = 0) -> torch.Tensor:
    """Tensors whose values differ a hundredfold from one to the next."""
    values = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
    for place, (start, end) in enumerate(zip([0, *cuts], [*cuts, n], strict=True)):
        values[start:end] *= np.float32(100.0 ** (place % 2 - 1))
    values[::97] = 0
    return torch.from_numpy(values)


def cut_in_two(options: dict[str, Any], n: int) -> dict[str, list[int]]:
    return {"cuts": [n // 3, n // 2 + 1]} if "scale_values" in options and n > 10 else {}


def encode_with_residual(codec: Any, gradient: torch.Tensor, residual: torch.Tensor, **more: Any) -> torch.Tensor:
    out = torch.empty(2 * codec.max_encoded_bytes(gradient.numel(), gradient.dtype), dtype=torch.uint8)
    return out[: codec.encode(gradient, out, step=STEP, residual=residual, **more)]


def test_random_numbers_are_philox() -> None:
    """The vectors published with Random123, and every place of our order."""
    for word, key, expected in (
        (0, 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (0xFFFFFFFF, (1 << 64) - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    ):
        assert oracle.philox(np.full((1, 4), word, np.uint32), key)[0].tolist() == expected
    pi = np.array([[0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]], np.uint32)
    assert oracle.philox(pi, 0x299F31D0_A4093822)[0].tolist() == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    out, later = torch.zeros(640, dtype=torch.uint32), torch.zeros(64, dtype=torch.uint32)
    _native.random_numbers(SEED, STEP, 0, out)
    np.testing.assert_array_equal(out.numpy(), oracle.numbers(SEED, STEP, 640))
    _native.random_numbers(SEED, STEP, 9, later)
    np.testing.assert_array_equal(later.numpy(), out[576:].numpy())
    with pytest.raises(InvalidArgument):
        _native.random_numbers(SEED, STEP, 0, out[:63])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "options"), CODECS, ids=str)
def test_messages_decode_to_the_definition(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    codec = codecs.by_name(name, **options)
    for n in LENGTHS if dtype == torch.float32 else (0, 1, 77, 4_097):
        gradient = make_gradient(n, dtype)
        message = encode(codec, gradient, **({"step": STEP} if "seed" in options else {}))
        assert message.numel() == codec.max_encoded_bytes(n, dtype)
        found = decode(codec, message, n)
        # Where numpy sums in another order, a value at the very edge may fall to the other side.
        expected = oracle.decoded(name, options, gradient.float().numpy(), STEP)
        assert (~np.isclose(found.numpy(), expected, rtol=3e-6, atol=1e-12)).sum() <= 1e-4 * n
        assert torch.equal(decode(codec, message, n, dtype), found.to(dtype))  # rounded once, to nearest even
        said = describe(message)
        assert (said["codec"], said["n_elements"], said["is_finite"]) == (name, n, True)
    bits = 8 if options.get("levels") == 127 else {"one-bit": 1, "two-bit": 2, "ternary": 2, "qsgd": 4}[name]
    n_norms = -(-n // options.get("block", 512)) if name == "qsgd" else 0
    assert message.numel() <= HEADER_BYTES + (n * bits + 7) // 8 + 4 * n_norms + 64


@pytest.mark.parametrize(("n", "cuts"), LAYOUTS)
@pytest.mark.parametrize(("name", "options"), GROUPED, ids=str)
def test_every_group_has_a_scale_of_its_own(name: str, options: dict[str, Any], n: int, cuts: list[int]) -> None:
    gradient = of_tensors(n, cuts)
    message = encode(codecs.by_name(name, **options), gradient, cuts=cuts)
    found = decode(codecs.by_name(name), message, n).numpy()  # read without the options
    expected = oracle.decoded(name, options, gradient.numpy(), 0, cuts)
    # A mean is summed in another order than numpy's: a scale may fall to the neighbouring bfloat16, once in a long while.
    assert (~np.isclose(found, expected, rtol=1e-6, atol=0)).sum() <= 2 * options["scale_values"] * (n > 100_000)
    np.testing.assert_allclose(found, expected, rtol=2.0**-7)
    per = 2 if options.get("scale") == "two-means" or options.get("levels") == 4 else 1
    told = describe(message)
    assert (told["format_version"], told["block"], told["levels"]) == (2, options["scale_values"], per)
    if n >= 100_000:
        expected_bits = {"one-bit": 1, "two-bit": 2}[name] + per * 16 / options["scale_values"]
        assert 8 * message.numel() / n == pytest.approx(expected_bits, rel=0.01)


def test_codecs_whose_messages_differ_have_configurations_that_differ() -> None:
    made = [(name, codecs.by_name(name, **options)) for name, options in ALL]
    for (name, one), (other_name, other) in itertools.combinations(made, 2):
        assert name != other_name or one.configuration != other.configuration, (one.configuration, name)
    two, three = (codecs.by_name("two-bit", scale_values=64, levels=n).configuration for n in (4, 3))
    assert two != three


@pytest.mark.parametrize(("name", "options"), GROUPED, ids=str)
def test_a_tensor_does_not_feel_its_neighbour(name: str, options: dict[str, Any]) -> None:
    codec, gradient = codecs.by_name(name, **options), of_tensors(2_500, [1_000])
    louder = gradient.clone()
    louder[1_000:] *= 1e6
    alone = there_and_back(codec, gradient[:1_000].clone())
    for values in (gradient, louder):
        assert torch.equal(decode(codec, encode(codec, values, cuts=[1_000]), 2_500)[:1_000], alone)


@every_codec
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residual_and_message_add_up_to_what_was_given(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    codec = codecs.by_name(name, **options)
    for n in (0, 1, 63, 4_099, 70_001):
        gradient, residual, more = make_gradient(n, dtype), make_gradient(n, seed=1), cut_in_two(options, n)
        for scale in (1.0, 1_024.0):
            corrected, before = gradient.float() + residual * scale, residual.clone()
            kept, more["residual_scale"] = torch.full((n,), torch.nan), scale
            message = encode_with_residual(codec, gradient, residual, new_residual=kept, **more)
            assert torch.equal(residual, before)
            # The fused sweep writes the very message of the sum.
            assert torch.equal(message, encode(codec, corrected, step=STEP, **cut_in_two(options, n)))
            assert torch.equal(kept, (corrected - decode(codec, message, n)) * (1 / scale))
            assert torch.equal(encode_with_residual(codec, gradient, residual, **more), message)  # in place
            assert torch.equal(residual, kept)
            residual = before


@every_codec
@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_nonfinite_gradient_decodes_to_nan_and_keeps_the_residual(
    name: str, options: dict[str, Any], bad: float
) -> None:
    codec = codecs.by_name(name, **options)
    for n, place in ((1, 0), (100, 99), (5_000, 4_096), (70_000, 3)):
        gradient, residual, kept = make_gradient(n), make_gradient(n, seed=1), torch.zeros(n)
        gradient[place] = bad
        before, cuts = residual.clone(), cut_in_two(options, n)
        for message in (
            encode(codec, gradient, **cuts),
            encode_with_residual(codec, gradient, residual, new_residual=kept, **cuts),
            encode_with_residual(codec, gradient, residual, **cuts),
        ):
            assert message.numel() == HEADER_BYTES
            assert not describe(message)["is_finite"]
            assert decode(codec, message, n).isnan().all()
        assert torch.equal(kept, before)
        assert torch.equal(residual, before)


@every_codec
def test_extreme_magnitudes_stay_finite(name: str, options: dict[str, Any]) -> None:
    codec, largest = codecs.by_name(name, **options), torch.finfo(torch.float32).max
    for value in (0.0, -0.0, 1e-45, -1e-40, 2.0**-101, largest / 1_000, -largest):
        message = encode(codec, torch.full((300,), value))
        if message.numel() == HEADER_BYTES:
            assert name in ("qsgd", "thc")  # a norm beyond float32
            assert abs(value) == largest
            continue
        decoded = decode(codec, message, 300)
        assert decoded.isfinite().all()
        if value == 0.0 and options.get("scale") != "fixed":
            assert not decoded.any()


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
    drawn = torch.stack([decode(codec, encode(codec, gradient, step=step), n) for step in range(n_steps)]).double()
    mean, magnitude = drawn.mean(0), gradient.abs().double()
    if name == "thc":  # noise of all values of a block, mixed: as good as Gaussian
        variance, widest = drawn.var(0, correction=0), 0.0
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
    first, second = drawn[:2] - gradient
    assert abs(float(torch.nn.functional.cosine_similarity(first, second, dim=0))) < 0.2


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
        sums, expected = torch.zeros(codec.code_bytes(n, n_ranks), dtype=torch.uint8), np.zeros(codec.code_bytes(n, 1))
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


@pytest.mark.parametrize("n", [1, 64, 65, 1_000, 1_025, 9_000])
def test_thc_message_is_one_rank_s_codes_with_its_own_norms(n: int) -> None:
    codec, gradient, expected = Thc(seed=SEED), make_gradient(n), torch.empty(n)
    found = decode(codec, encode(codec, gradient, step=STEP), n)
    norms, codes = torch.empty(codec.n_norms(n)), torch.empty(codec.code_bytes(n, 1), dtype=torch.uint8)
    codec.write_norms(gradient, norms)
    codec.write_codes(gradient, norms, codes, n_ranks=1, sign_step=STEP, step=STEP)
    codec.read_sums(codes, norms, 1, expected, sign_step=STEP)
    assert torch.equal(found, expected)
    # 16 levels of a Gaussian: the published error is about 2 % of the values' energy; 4 % with a block of few values.
    if n >= 1_000:
        assert float((found - gradient).square().sum()) < 0.04 * float(gradient.square().sum())


@pytest.mark.parametrize(
    ("name", "options"), [("one-bit", {}), ("one-bit", {"scale": "two-means"}), ("two-bit", {})], ids=str
)
def test_error_feedback_sends_everything_in_the_end(name: str, options: dict[str, Any]) -> None:
    """A constant gradient: what is missing from the sum of all messages stays bounded, so their mean goes to it."""
    codec, gradient = codecs.by_name(name, **options), make_gradient(600)
    sent, residual, errors = torch.zeros(600), torch.zeros(600), {}
    for step in range(1, 2_001):
        sent += decode(codec, encode_with_residual(codec, gradient, residual), 600)
        errors[step] = float((sent / step - gradient).abs().max())
    assert torch.allclose(sent + residual, 2_000 * gradient, atol=1e-3)
    assert errors[2_000] < 0.5 * errors[200] + 1e-6


def test_four_levels_leave_least_of_normal_values() -> None:
    """Max 1960: 0.1175 of the square is the least for two bits."""
    x, left = torch.randn(1 << 20, generator=torch.Generator().manual_seed(5)), {}
    for levels in (3, 4):
        found = there_and_back(codecs.by_name("two-bit", scale_values=4096, levels=levels), x)
        left[levels] = float((x - found).square().sum() / x.square().sum())
    assert left[4] == pytest.approx(0.1175, abs=0.001)
    assert left[3] > 0.3


def test_two_bit_default_is_near_the_least_error() -> None:
    generator = torch.Generator().manual_seed(3)
    uniform = torch.rand(200_000, generator=generator) - 0.5
    laplace = -uniform.sign() * (1 - 2 * uniform.abs()).clamp(min=1e-9).log()
    for values in (laplace, torch.randn(200_000, generator=generator)):
        errors = {
            threshold: float((there_and_back(codecs.by_name("two-bit", threshold=threshold), values) - values).norm())
            for threshold in (0.7, 1.1, 1.25, 1.4, 1.8, 2.5)
        }
        assert errors[1.25] ** 2 < 1.03 * min(errors.values()) ** 2
