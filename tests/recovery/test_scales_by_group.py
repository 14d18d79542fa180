"""One-bit and two-bit with a scale for every group: against numpy, group by group, and never across tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gradwire import CorruptMessage, IncompatibleVersion, InvalidArgument, _native, codecs
from gradwire.codecs.quantised import describe
from gradwire.exchange.ring import engine_codec

CASES: list[tuple[str, dict[str, Any]]] = [
    ("one-bit", {"scale_values": 512}),
    ("one-bit", {"scale_values": 64, "scale": "two-means"}),
    ("two-bit", {"scale_values": 128}),
    ("two-bit", {"scale_values": 4096, "threshold": 0.8}),
    ("two-bit", {"scale_values": 64, "levels": 4}),
    ("two-bit", {"scale_values": 1024, "levels": 4}),
]
LAYOUTS: list[tuple[int, list[int]]] = [
    (0, []), (1, []), (63, [1]), (64, []), (65, [64]), (1_000, [10, 11, 700]), (4_097, [4_096]),
    (140_001, [5, 4_100, 70_000, 140_000]), (1_200_003, [3, 1_000_000]),
]  # fmt: skip


def gradient(n: int, cuts: list[int], seed: int = 0) -> np.ndarray:
    """Tensors whose values differ a hundredfold from one to the next."""
    values = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
    for place, (start, end) in enumerate(zip([0, *cuts], [*cuts, n], strict=True)):
        values[start:end] *= np.float32(100.0 ** (place % 2 - 1))
    values[::97] = 0
    return values


def to_bfloat16(value: float) -> np.float32:
    return np.float32(torch.tensor(value, dtype=torch.float64).to(torch.float32).to(torch.bfloat16).item())


def oracle(name: str, options: dict[str, Any], x: np.ndarray, cuts: list[int]) -> np.ndarray:
    out, step = np.empty_like(x), options["scale_values"]
    for start, end in zip([0, *cuts], [*cuts, x.size], strict=True):
        for first in range(start, end, step):
            mine = x[first : min(end, first + step)]
            wide = mine.astype(np.float64)
            if options.get("levels") == 4:
                inner, outer = (to_bfloat16(factor * np.abs(wide).mean()) for factor in (0.5675, 1.893))
                nearer = np.abs(np.abs(wide) - float(outer)) <= np.abs(np.abs(wide) - float(inner))
                found = np.where(nearer, outer, inner) * np.where(mine < 0, np.float32(-1), np.float32(1))
            elif name == "two-bit":
                t = to_bfloat16(float(np.float32(options.get("threshold", 1.25))) * np.abs(wide).mean())
                found = np.where((mine >= t) & (mine > 0), t, np.where((mine <= -t) & (mine < 0), -t, np.float32(0)))
            else:
                above = below = np.abs(wide).mean()
                if options.get("scale") == "two-means":
                    above = wide[mine >= 0].mean() if (mine >= 0).any() else 0.0
                    below = -wide[mine < 0].mean() if (mine < 0).any() else 0.0
                found = np.where(mine < 0, -to_bfloat16(below), to_bfloat16(above))
            out[first : first + mine.size] = found
    return out


def encode(codec: Any, x: torch.Tensor, cuts: list[int], **more: Any) -> torch.Tensor:
    out = torch.full((codec.max_encoded_bytes(x.numel(), x.dtype, len(cuts)),), 0xA5, dtype=torch.uint8)
    n_bytes = (
        codec.encode_with_residual(x, more.pop("residual"), out, cuts=cuts, **more)
        if more
        else codec.encode(x, out, cuts=cuts)
    )
    return out[:n_bytes].clone()


@pytest.mark.parametrize(("n", "cuts"), LAYOUTS)
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_every_group_has_a_scale_of_its_own(name: str, options: dict[str, Any], n: int, cuts: list[int]) -> None:
    codec, x = codecs.by_name(name, **options), gradient(n, cuts)
    message = encode(codec, torch.from_numpy(x), cuts)
    found = torch.empty(n)
    codec.decode(message, found)
    expected = oracle(name, options, x, cuts)
    # A mean is summed in another order than numpy's: a scale may fall to the neighbouring bfloat16, once in a long while.
    wrong = ~np.isclose(found.numpy(), expected, rtol=1e-6, atol=0)
    assert wrong.sum() <= 2 * options["scale_values"] * (n > 100_000)
    np.testing.assert_allclose(found.numpy(), expected, rtol=2.0**-7)
    if n >= 100_000:
        bits = 8 * message.numel() / n
        per = 2 if options.get("scale") == "two-means" or options.get("levels") == 4 else 1
        assert bits == pytest.approx({"one-bit": 1, "two-bit": 2}[name] + per * 16 / options["scale_values"], rel=0.01)


def test_four_levels_leave_least_of_normal_values() -> None:
    """Max 1960: 0.1175 of the square is the least for two bits."""
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(5))
    left = {}
    for levels in (3, 4):
        codec, out = codecs.by_name("two-bit", scale_values=4096, levels=levels), torch.empty_like(x)
        codec.decode(encode(codec, x, []), out)
        left[levels] = float((x - out).square().sum() / x.square().sum())
    assert left[4] == pytest.approx(0.1175, abs=0.001)
    assert left[3] > 0.3


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_a_tensor_does_not_feel_its_neighbour(name: str, options: dict[str, Any]) -> None:
    codec, cuts = codecs.by_name(name, **options), [1_000]
    x = torch.from_numpy(gradient(2_500, cuts))
    louder = x.clone()
    louder[1_000:] *= 1e6
    results = []
    for values in (x, louder):
        out = torch.empty(2_500)
        codec.decode(encode(codec, values, cuts), out)
        results.append(out)
    assert torch.equal(results[0][:1_000], results[1][:1_000])
    alone = torch.empty(1_000)
    codec.decode(encode(codec, x[:1_000].clone(), []), alone)
    assert torch.equal(alone, results[0][:1_000])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_what_is_left_out_is_the_rest(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Also written over the residual itself, and with AMP's scale."""
    codec, cuts, n = codecs.by_name(name, **options), [333, 5_000], 9_001
    x = (torch.from_numpy(gradient(n, cuts)) * 4).to(dtype)
    residual = torch.from_numpy(gradient(n, cuts, seed=1))
    apart = torch.full((n,), 7.0)
    message = encode(codec, x, cuts, residual=residual, new_residual=apart, residual_scale=4.0)
    decoded = torch.empty(n)
    codec.decode(message, decoded)
    term = x.float() + residual * 4
    assert torch.equal(apart, (term - decoded) * 0.25)
    in_place = residual.clone()
    again = encode(codec, x, cuts, residual=in_place, residual_scale=4.0)
    assert torch.equal(again, message)
    assert torch.equal(in_place, apart)
    added = torch.ones(n)
    _native.add_group(engine_codec(codec, torch.float32, None), _as_piece(message), [n], added, torch.empty(n))
    assert torch.equal(added, 1 + decoded)


def _as_piece(message: torch.Tensor) -> torch.Tensor:
    length = torch.tensor(list(message.numel().to_bytes(4, "little")), dtype=torch.uint8)
    return torch.cat([length, message])


@pytest.mark.parametrize("place", [0, 1_500, 2_999])
@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_what_is_not_finite_leaves_the_residual(name: str, options: dict[str, Any], place: int) -> None:
    codec = codecs.by_name(name, **options)
    x, residual = torch.from_numpy(gradient(3_000, [])), torch.ones(3_000)
    x[place] = float("nan")
    for more in ({}, {"new_residual": torch.zeros(3_000)}):
        message = encode(codec, x, [7], residual=residual, residual_scale=1.0, **more)
        assert not describe(message)["is_finite"]
        assert torch.equal(more.get("new_residual", residual), torch.ones(3_000))
        decoded = torch.empty(3_000)
        codec.decode(message, decoded)
        assert bool(decoded.isnan().all())


def test_codecs_of_any_options_read_each_other_and_say_what_they_are() -> None:
    grouped, plain = codecs.by_name("one-bit", scale_values=256), codecs.by_name("one-bit")
    x = torch.from_numpy(gradient(5_000, [100]))
    message = encode(grouped, x, [100])
    ours, theirs = torch.empty(5_000), torch.empty(5_000)
    grouped.decode(message, ours)
    plain.decode(message, theirs)
    assert torch.equal(ours, theirs)
    told = describe(message)
    assert (told["format_version"], told["block"], told["levels"]) == (2, 256, 1)


def test_altered_messages_are_refused() -> None:
    """With a right checksum too: every field for itself."""
    from gradwire import _native

    codec = codecs.by_name("two-bit", scale_values=64)
    message = encode(codec, torch.from_numpy(gradient(300, [100, 200])), [100, 200])

    def refused(change: dict[int, int], error: type[Exception], length: int | None = None) -> None:
        altered = message.clone()[:length]
        for place, value in change.items():
            altered[place] = value
        crc = _native.crc32c(torch.cat([altered[:28], altered[32:]]))
        altered[28:32] = torch.tensor(list(crc.to_bytes(4, "little")), dtype=torch.uint8)
        with pytest.raises(error):
            codec.decode(altered, torch.empty(300))

    refused({4: 3}, IncompatibleVersion)
    refused({4: 1}, CorruptMessage)  # groups in version 1
    refused({5: 3}, CorruptMessage)  # qsgd has none
    refused({7: 2}, CorruptMessage)  # two scales a group: too short
    refused({7: 3}, CorruptMessage)
    refused({16: 63}, CorruptMessage)
    refused({32: 3}, CorruptMessage)  # more cuts than there are
    refused({32: 255, 35: 255}, CorruptMessage)
    refused({36: 0}, CorruptMessage)  # a cut at 0
    refused({36: 200}, CorruptMessage)  # that does not ascend
    refused({41: 2}, CorruptMessage)  # past the end
    refused({44: 0x80, 45: 0x7F}, CorruptMessage)  # an infinite scale
    refused({message.numel() - 4: 0xFF}, CorruptMessage)  # code 3
    refused({}, CorruptMessage, length=message.numel() - 4)
    refused({}, CorruptMessage, length=34)


@pytest.mark.parametrize("wrong", [0, 63, 32, 8192, 100, True, "512", -64])
def test_wrong_group_sizes(wrong: Any) -> None:
    for name in ("one-bit", "two-bit"):
        with pytest.raises(InvalidArgument, match="scale_values"):
            codecs.by_name(name, scale_values=wrong)


def test_what_groups_do_not_go_with() -> None:
    with pytest.raises(InvalidArgument, match="fixed"):
        codecs.by_name("one-bit", scale="fixed", scale_values=512)
    for wrong in ({}, {"scale_values": 64, "threshold": 1.0}, {"scale_values": 64, "relative": False}):
        with pytest.raises(InvalidArgument, match="levels=4"):
            codecs.by_name("two-bit", levels=4, **wrong)
    with pytest.raises(InvalidArgument, match="levels is 3 or 4"):
        codecs.by_name("two-bit", levels=2, scale_values=64)
    with pytest.raises(InvalidArgument, match="relative"):
        codecs.by_name("two-bit", relative=False, scale_values=512)
    x, out = torch.zeros(100), torch.empty(1_000, dtype=torch.uint8)
    with pytest.raises(InvalidArgument, match="cuts"):
        codecs.by_name("one-bit").encode(x, out, cuts=[50])
    for cuts in ([0], [100], [50, 50], [60, 50]):
        with pytest.raises(InvalidArgument, match="cuts"):
            codecs.by_name("one-bit", scale_values=64).encode(x, out, cuts=cuts)
