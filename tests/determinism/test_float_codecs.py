"""Float codecs: bytes and values do not depend on threads, instruction sets or how the process treats subnormals."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from float_messages import DTYPES, LEVELS, decode, encode, finite_gradient, same_bits
from gcomp_gradients import KINDS, make_gradient
from gradwire import _native
from gradwire.codecs import Codec
from gradwire.codecs.embedded_float import EmbeddedFloat
from gradwire.codecs.truncated_float import TruncatedFloat

CODECS: list[Codec] = [
    *(EmbeddedFloat(bits) for bits in (2, 7, 8, 9, 16, 17, 24, 25, 31, 32)),
    EmbeddedFloat(8, partition=32),
    *(TruncatedFloat(bits, "native") for bits in range(2, 17)),
    *(TruncatedFloat(bits) for bits in (2, 3, 4, 5, 6, 7, 8, 11, 16)),
    *(TruncatedFloat(bits, "auto", "truncate") for bits in (3, 5, 7, 12)),
    *(TruncatedFloat(bits, "auto", "stochastic") for bits in (2, 4, 6, 8, 9, 12)),
    *(TruncatedFloat(bits, "native", "stochastic", seed=9) for bits in (3, 5, 8, 9, 12)),
    TruncatedFloat(8, "fp8-e5m2", partition=64),
]


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    n_threads = _native.thread_count()
    yield
    _native.set_thread_count(n_threads)
    _native.limit_simd_level(True, True)
    torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_messages_and_values_are_the_same_for_every_thread_count_and_instruction_set(dtype: torch.dtype) -> None:
    gradients = [make_gradient(kind, 16384 + 1321, dtype) for kind in KINDS]
    for number, codec in enumerate(CODECS):
        for gradient in (gradients[number % 4], gradients[(number + 1) % 4]):
            _native.set_thread_count(1)
            _native.limit_simd_level(False)
            message = encode(codec, gradient)
            values = decode(codec, message, gradient)
            for allowed, n_threads in ((LEVELS["portable"], 3), (LEVELS["avx2"], 1), (LEVELS["avx512"], 4)):
                _native.limit_simd_level(*allowed)
                _native.set_thread_count(n_threads)
                assert torch.equal(encode(codec, gradient), message), (codec.name, vars(codec), allowed)
                assert same_bits(decode(codec, message, gradient), values), (codec.name, vars(codec), allowed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_small_size_gives_the_same_bytes_on_every_instruction_set(dtype: torch.dtype) -> None:
    codecs = [EmbeddedFloat(5), EmbeddedFloat(32, 64), TruncatedFloat(7), TruncatedFloat(13, "native", "stochastic")]
    for n in [*range(70), 127, 255, 256, 257, 289, 511, 513]:
        gradient = make_gradient(KINDS[n % 4], n, dtype)
        for codec in codecs:
            messages, values = [], []
            for allowed in LEVELS.values():
                _native.limit_simd_level(*allowed)
                messages.append(encode(codec, gradient))
                values.append(decode(codec, messages[0], gradient))
            assert all(torch.equal(message, messages[0]) for message in messages), (n, codec.name)
            assert all(same_bits(value, values[0]) for value in values), (n, codec.name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_refinements_are_the_same_on_every_instruction_set(dtype: torch.dtype) -> None:
    gradient, codec = make_gradient("special", 20_000, dtype), EmbeddedFloat()
    known = []
    for allowed in LEVELS.values():
        _native.limit_simd_level(*allowed)
        receiver, found = codec.receive(20_000, dtype), []
        for first, last in ((0, 3), (3, 4), (4, 15), (15, 32)):
            out = torch.empty(codec.max_plane_bytes(20_000, dtype, first, last - first), dtype=torch.uint8)
            message = out[: codec.encode_planes(gradient, first, last - first, out)].clone()
            receiver.add_planes(message)
            values = torch.empty_like(gradient)
            receiver.write(values)
            found += [message, values.view(torch.uint8)]
        known.append(found)
    for others in known[1:]:
        assert all(torch.equal(a, b) for a, b in zip(known[0], others, strict=True))


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this machine cannot flush subnormals")
@pytest.mark.parametrize("dtype", DTYPES)
def test_flushing_subnormals_changes_nothing(dtype: torch.dtype) -> None:
    gradients = [finite_gradient(3000, dtype), make_gradient("random bits", 3000, dtype)]
    if dtype != torch.float16:
        gradients.append(make_gradient("gaussian", 3000, dtype) * 1e-36)
    _native.set_thread_count(1)
    for allowed in (LEVELS["portable"], LEVELS["avx2"]):
        _native.limit_simd_level(*allowed)
        for codec in CODECS:
            for gradient in gradients:
                torch.set_flush_denormal(False)
                message = encode(codec, gradient)
                values = decode(codec, message, gradient)
                torch.set_flush_denormal(True)
                assert torch.equal(encode(codec, gradient), message), (codec.name, vars(codec))
                assert same_bits(decode(codec, message, gradient), values), (codec.name, vars(codec))
