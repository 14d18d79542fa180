"""What AVX2 makes of a sketch, the portable code makes: indices, cells, orders of peeling and sums, compared as bytes."""

from __future__ import annotations

import hashlib

import torch

from gradwire import _native
from gradwire.codecs.count_sketch import CountSketch, FixedPoint, index_words, write_index
from ranks import run_ranks
from sketches import sparse_gradients


def results_at_level(rank: int, world_size: int) -> tuple[str, dict[str, str]]:
    """Rank 1 does without AVX2."""
    if rank == 1:
        _native.limit_simd_level(False)
    results: dict[str, torch.Tensor] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for n_elements, density in ((1_000, 0.3), (100_003, 0.02), (400_000, 0.3)):
            (gradient,) = sparse_gradients(n_elements, density, 1, dtype=dtype)
            index = torch.empty(index_words(n_elements), dtype=torch.int32)
            facts = write_index(gradient, index)
            results[f"index {dtype} {n_elements}"] = index
            results[f"facts {dtype} {n_elements}"] = torch.tensor(facts, dtype=torch.float64)
            for fixed in (None, FixedPoint.fit(30, 3, torch.int32), FixedPoint.fit(30, 3, torch.int64)):
                sketch = CountSketch()
                kind = torch.float32 if fixed is None else fixed.dtype
                cells = torch.empty(sketch.prepare(index, n_elements, 1), dtype=kind)
                sketch.peel(index)
                sketch.add(gradient, index, cells, fixed)
                mean = torch.empty_like(gradient)
                results[f"cells {kind} {dtype} {n_elements}"] = cells.clone()
                sketch.recover(cells, 0.3, mean, estimate=True)
                results[f"mean {kind} {dtype} {n_elements}"] = mean
    digests = {name: hashlib.sha256(tensor.view(torch.uint8).numpy()).hexdigest() for name, tensor in results.items()}
    return _native.simd_level(), digests


def test_portable_sketches_have_the_bytes_of_avx2() -> None:
    (_, first), (level, second) = run_ranks(results_at_level, 2)
    assert level == "portable"
    assert first == second
