"""GComp's bytes and values do not depend on threads or instruction sets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gcomp_gradients import KINDS, make_gradient, make_importance, words_of
from gradwire import _native
from gradwire.codecs.gcomp import GCompCodec

MODES = (
    *((mode, bits, format) for format in (1, 2) for mode, bits in (("none", None), ("paper", None), ("uniform", 5))),
    ("truncate", 4, 1),
    ("truncate", 4, 2),
    ("paper", 3, 2),
)
LEVELS = {"portable": (False, False), "avx2": (True, False), "avx512": (True, True)}
N_VALUES = 5 * 16384 + 4321


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    n_threads = _native.thread_count()
    yield
    _native.set_thread_count(n_threads)
    _native.limit_simd_level(True, True)


def encode(codec: GCompCodec, gradient: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    out = torch.empty(codec.max_encoded_bytes(gradient.numel(), gradient.dtype), dtype=torch.uint8)
    return out[: codec.encode(gradient, out, importance)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_messages_and_values_are_the_same_for_every_thread_count_and_instruction_set(
    dtype: torch.dtype, kind: str
) -> None:
    """A level that this machine lacks falls back to the one below it: then it is compared twice, and still equal."""
    gradient, importance = make_gradient(kind, N_VALUES, dtype), make_importance(N_VALUES)
    for mode, bits, format in MODES:
        codec = GCompCodec(mode, bits=bits, format=format)
        _native.set_thread_count(1)
        _native.limit_simd_level(False)
        expected = encode(codec, gradient, importance)
        expected_values = torch.empty_like(gradient)
        codec.decode(expected, expected_values, importance)
        for name, allowed in LEVELS.items():
            for n_threads in (1, 2, 3, 4):
                _native.limit_simd_level(*allowed)
                _native.set_thread_count(n_threads)
                assert torch.equal(encode(codec, gradient, importance), expected), (name, n_threads, mode, format)
                decoded = torch.empty_like(gradient)
                codec.decode(expected, decoded, importance)
                assert (words_of(decoded) == words_of(expected_values)).all(), (name, n_threads, mode, format)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_small_size_gives_the_same_bytes_on_every_instruction_set(dtype: torch.dtype) -> None:
    for n in [*range(200), 511, 513, 1023]:
        gradient, importance = make_gradient(KINDS[n % 4], n, dtype), make_importance(n)
        for mode, bits, format in MODES:
            codec = GCompCodec(mode, bits=bits, format=format)
            messages, values = [], []
            for allowed in LEVELS.values():
                _native.limit_simd_level(*allowed)
                messages.append(encode(codec, gradient, importance))
                decoded = torch.empty_like(gradient)
                codec.decode(messages[0], decoded, importance)
                values.append(words_of(decoded))
            assert all(torch.equal(message, messages[0]) for message in messages), (n, mode, format)
            assert all((value == values[0]).all() for value in values), (n, mode, format)


def test_exponents_are_counted_alike_on_every_instruction_set() -> None:
    gradient, histograms = make_gradient("special", 50_001, torch.float32), []
    for allowed in LEVELS.values():
        _native.limit_simd_level(*allowed)
        histograms.append(torch.zeros(256, dtype=torch.int64))
        GCompCodec("none").histogram(gradient, histograms[-1])
    assert torch.equal(histograms[0], histograms[1])
    assert torch.equal(histograms[0], histograms[2])
