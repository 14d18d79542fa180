"""Quantisers' bytes and values do not depend on threads or instruction sets."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gradwire import _native, codecs
from gradwire.codecs.hadamard import Thc
from gradwire.codecs.ternary import Ternary
from quantiser_oracles import DTYPES, decode, encode, make_gradient

CODECS: list[tuple[str, dict[str, Any]]] = [
    ("one-bit", {}),
    ("one-bit", {"scale": "two-means"}),
    ("two-bit", {}),
    ("ternary", {"seed": 3}),
    ("qsgd", {"seed": 3}),
    ("qsgd", {"levels": 127, "block": 128, "seed": 3}),
    ("thc", {"seed": 3}),
]
N_VALUES = 3 * 65_536 + 4_321


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    n_threads = _native.thread_count()
    yield
    _native.set_thread_count(n_threads)
    _native.limit_simd_level(True, True)


def digest(*tensors: torch.Tensor) -> str:
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def results(name: str, options: dict[str, Any], n: int, dtype: torch.dtype) -> str:
    """Hash of the message, its values, and the residual of the fused sweep."""
    codec: Any = codecs.by_name(name, **options)
    gradient, residual = make_gradient(n, dtype), make_gradient(n, seed=1)
    message = encode(codec, gradient, step=5)
    out, kept = torch.zeros(codec.max_encoded_bytes(n, dtype), dtype=torch.uint8), torch.empty(n)
    n_bytes = codec.encode_with_residual(gradient, residual, out, 6, new_residual=kept, residual_scale=3.0)
    return digest(message, decode(codec, message, n, dtype), out[:n_bytes], kept)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "options"), CODECS, ids=str)
def test_messages_values_and_residuals_are_the_same_for_every_thread_count_and_instruction_set(
    name: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    found = set()
    for has_avx2 in (False, True):
        for n_threads in (1, 2, 3):
            _native.limit_simd_level(has_avx2, has_avx2)
            _native.set_thread_count(n_threads)
            found.add(results(name, options, N_VALUES, dtype))
    assert len(found) == 1


@pytest.mark.parametrize(("name", "options"), CODECS, ids=str)
def test_every_small_size_gives_the_same_bytes_on_every_instruction_set(name: str, options: dict[str, Any]) -> None:
    for n in [*range(130), 255, 511, 513, 1_023, 1_025, 4_095, 4_097]:
        found = set()
        for has_avx2 in (False, True):
            _native.limit_simd_level(has_avx2, has_avx2)
            found.add(results(name, options, n, torch.float32))
        assert len(found) == 1, n


def test_sums_are_the_same_on_every_instruction_set_and_thread_count() -> None:
    ternary, thc = Ternary(seed=1), Thc(seed=1)
    for n in (1, 63, 100, 1_500, N_VALUES):
        gradient, found = make_gradient(n), set()
        for has_avx2, n_threads in ((False, 1), (True, 1), (True, 3)):
            _native.limit_simd_level(has_avx2, has_avx2)
            _native.set_thread_count(n_threads)
            kept = []
            for n_ranks in (2, 8):
                shares, scales = ternary.share(n, [(0, n)], gradient.device), torch.empty(1)
                ternary.write_scales(gradient, shares, scales)
                counts = torch.zeros(ternary.count_bytes(n, n_ranks), dtype=torch.uint8)
                ternary.write_counts(gradient, shares, scales, n_ranks, counts, 4)
                out = torch.empty(n)
                ternary.read_counts(counts, shares, scales, n_ranks, out)
                kept += [counts, out]
            norms = torch.empty(thc.n_norms(n))
            thc.write_norms(gradient, norms)
            for n_ranks in (5, 9):
                codes, out = torch.zeros(thc.code_bytes(n, n_ranks), dtype=torch.uint8), torch.empty(n)
                thc.write_codes(gradient, norms, codes, n_ranks=n_ranks, sign_step=1, step=2)
                thc.read_sums(codes, norms, n_ranks, out, sign_step=1)
                kept += [codes, out]
            found.add(digest(norms, *kept))
        assert len(found) == 1, n
