"""Packing against torch's own masks; the same bytes on every level of instructions; sizes that do not fit are refused."""

import pytest
import torch

from float_messages import DTYPES, assert_same_bytes_everywhere, same_bits
from gradwire.codecs import packed_values
from gradwire.errors import CorruptMessage, InvalidArgument
from sketches import index_of

SIZES = (1, 15, 16, 17, 31, 32, 33, 1_000, 131_071, 131_072, 131_073, 400_001)


@pytest.mark.parametrize("density", [0.0, 0.01, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("n", SIZES)
def test_packed_values_are_those_under_the_mask_on_every_level(n: int, density: float) -> None:
    generator = torch.Generator().manual_seed(n)
    mask = torch.rand(n, generator=generator) < density
    bits = torch.randint(-(1 << 15), 1 << 15, (2 * n,), dtype=torch.int16, generator=generator)
    index, n_set = index_of(mask.float()), int(mask.sum())
    assert int(packed_values.count(index, n)) == n_set
    for dtype in DTYPES:
        values = bits.view(dtype)[:n].clone()  # any bits at all: NaN, Inf, -0

        def there_and_back(values: torch.Tensor = values) -> list[torch.Tensor]:
            room, back = (values.new_full((size + 40,), 7.0) for size in (n_set, n))
            packed_values.pack(values, index, room[:n_set])
            packed_values.unpack(room[:n_set], index, back[:n])
            return [room, back]

        room, back = assert_same_bytes_everywhere(there_and_back, (1, 3))
        assert same_bits(room[:n_set], values[mask])
        assert same_bits(back[:n], torch.where(mask, values, 0))
        assert torch.cat([room[n_set:], back[n:]]).eq(7).all()


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
