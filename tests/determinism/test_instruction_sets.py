"""What AVX2 computes, the portable code computes: compared across two processes, as a level can only be lowered."""

from __future__ import annotations

import hashlib

import torch

from gradwire import _native
from ranks import run_ranks


def results_at_level(rank: int, world_size: int) -> tuple[str, dict[str, str]]:
    """Rank 1 does without AVX2."""
    if rank == 1:
        _native.limit_simd_level(False)
    generator = torch.Generator().manual_seed(5)
    results = {}
    for rank_of_matrix, n, m in ((1, 5, 3), (4, 64, 147), (7, 33, 130), (32, 300, 768)):
        left = torch.randn(rank_of_matrix, n, generator=generator)
        right = torch.randn(rank_of_matrix, m, generator=generator)
        matrix = torch.randn(n, m, generator=generator)
        _native.multiply_factors(left.view(-1), right.view(-1), rank_of_matrix, True, matrix.view(-1))
        results[f"product {n} {m}"] = matrix
        if rank_of_matrix <= n:
            _native.orthogonalise_factors(left.view(-1), 1, rank_of_matrix)
            results[f"orthogonal {n}"] = left
    values = torch.randn(100_003, generator=generator)
    values[::7] = 0.0
    values[::11] *= -0.0
    for code, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16)):
        typed = values.to(dtype)
        words = torch.empty(3, 3_126, dtype=torch.uint32)
        for message in range(3):
            _native.pack_signs(typed.roll(message).view(torch.uint8), code, words[message])
        for n_ranks in (1, 2, 3):
            votes = torch.empty_like(typed)
            one = torch.ones(1, dtype=dtype).view(torch.uint8).tolist()
            scale_bits = int.from_bytes(bytes(one), "little")
            _native.write_majority(words[:n_ranks].view(-1), n_ranks, code, scale_bits, False, votes.view(torch.uint8))
            results[f"votes {dtype} {n_ranks}"] = votes
    for k in (1, 100, 50_000):
        indices = torch.empty(k, dtype=torch.int32)
        _native.select_largest(values, indices)
        results[f"largest {k}"] = indices
    digests = {
        name: hashlib.sha256(bytes(t.contiguous().view(-1).view(torch.uint8).tolist())).hexdigest()
        for name, t in results.items()
    }
    return _native.simd_level(), digests


def test_portable_code_gives_the_bits_of_avx2() -> None:
    (_, first), (level, second) = run_ranks(results_at_level, 2)
    assert level == "portable"
    assert first == second
