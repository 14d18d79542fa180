"""Every scheme trains on the late device, through host memory, and ends with the bits of its run on the CPU."""

from pathlib import Path

import pytest
from late_cases import SCHEMES, begin, train_on_both

from ranks import on_ranks


@pytest.mark.parametrize(("world_size", "latenesses_us"), [(1, [1_000]), (2, [0, 5_000]), (3, [1_000])])
@on_ranks(timeout_s=170)
def test_every_scheme_has_its_bits_of_the_cpu(
    rank: int, world_size: int, library: Path, latenesses_us: list[int]
) -> None:
    late, device = begin(library)
    train_on_both(rank, late, device, SCHEMES, latenesses_us)
