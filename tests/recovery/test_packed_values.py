"""Packing against torch's own masks; the same bytes on every level of instructions; sizes that do not fit are refused."""

from __future__ import annotations

import hashlib

import pytest
import torch

from gradwire import _native
from gradwire.codecs import packed_values
from gradwire.codecs.count_sketch import index_words, write_index
from gradwire.errors import CorruptMessage, InvalidArgument
from ranks import run_ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 15, 16, 17, 31, 32, 33, 1_000, 131_071, 131_072, 131_073, 400_001)


def index_of(mask: torch.Tensor) -> torch.Tensor:
    index = torch.empty(index_words(mask.numel()), dtype=torch.int32)
    write_index(mask.float(), index)
    return index


def check_all(rank: int, world_size: int) -> tuple[str, str]:
    """Rank 0 as the machine is, rank 1 portable."""
    if rank == 1:
        _native.limit_simd_level(False)
    seen = hashlib.sha256()
    generator = torch.Generator().manual_seed(5)
    for n in SIZES:
        for density in (0.0, 0.01, 0.3, 0.9, 1.0):
            mask = torch.rand(n, generator=generator) < density
            bits = torch.randint(-(1 << 15), 1 << 15, (2 * n,), dtype=torch.int16, generator=generator)
            index = index_of(mask)
            n_set = int(packed_values.count(index, n))
            assert n_set == int(mask.sum())
            for dtype in DTYPES:
                values = bits.view(dtype)[:n].clone()  # any bits at all: NaN, Inf, -0
                kind = torch.int32 if dtype == torch.float32 else torch.int16
                room = torch.full((n_set + 40,), 7.0, dtype=dtype)
                packed_values.pack(values, index, room[:n_set])
                assert torch.equal(room[:n_set].view(kind), values.view(kind)[mask])
                assert bool(room[n_set:].eq(7).all())
                back = torch.full((n + 40,), 7.0, dtype=dtype)
                packed_values.unpack(room[:n_set], index, back[:n])
                assert torch.equal(back[:n].view(kind), torch.where(mask, values.view(kind), 0))
                assert bool(back[n:].eq(7).all())
                seen.update(back.view(torch.uint8).numpy().tobytes())
    return _native.simd_level(), seen.hexdigest()


def test_packed_values_are_those_under_the_mask_on_every_level() -> None:
    (_, first), (level, second) = run_ranks(check_all, 2)
    assert level == "portable"
    assert first == second


def test_sizes_that_do_not_fit_and_bits_past_the_end_are_refused() -> None:
    values = torch.randn(100)
    index = index_of(torch.ones(100))
    with pytest.raises(InvalidArgument, match="100 bits"):
        packed_values.pack(values, index, torch.empty(99))
    with pytest.raises(InvalidArgument, match="words"):
        packed_values.unpack(values, index[:3], torch.empty(100))
    index[3] |= 1 << 20
    for call in (lambda: packed_values.count(index, 100), lambda: packed_values.pack(values, index, torch.empty(101))):
        with pytest.raises(CorruptMessage, match="past its 100 values"):
            call()


@pytest.mark.parametrize("largest", [0.0, 6e-8, 1.5, 65_504.0, float("inf"), float("nan")])
def test_index_of_float16_knows_its_largest_value(largest: float) -> None:
    values = torch.zeros(70, dtype=torch.float16)
    values[33] = -largest
    index = torch.empty(3, dtype=torch.int32)
    found = write_index(values, index)
    expected = float(values[33].abs()) if torch.isfinite(values[33]) else float("inf")
    assert found.max_magnitude == expected
    assert found.n_nonzeros == int(largest != 0)
    assert index.tolist() == [0, 2 * (largest != 0), 0]
