"""raw, zlib and zstd give back every bit."""

from __future__ import annotations

import pytest
import torch

from float_messages import DTYPES, encode, same_bits, there_and_back
from gradwire import codecs


@pytest.mark.parametrize("name", ["raw", "zlib", "zstd"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 2, 7, 1000, 100_001])
def test_every_bit_comes_back(name: str, dtype: torch.dtype, n: int) -> None:
    codec, random = codecs.by_name(name), torch.Generator().manual_seed(n)
    any_bits = torch.randint(0, 256, (n * dtype.itemsize,), generator=random, dtype=torch.uint8)
    for gradient in (any_bits.view(dtype), torch.randn(n).to(dtype), torch.zeros(n, dtype=dtype)):
        assert same_bits(there_and_back(codec, gradient), gradient)
    if n >= 1000 and name != "raw":  # the zeros
        assert encode(codec, gradient).numel() < n * dtype.itemsize / 20


@pytest.mark.parametrize(("name", "level"), [("zlib", 1), ("zlib", 9), ("zstd", -5), ("zstd", 1), ("zstd", 19)])
def test_any_level_is_read_by_a_codec_of_another_level(name: str, level: int) -> None:
    gradient, found = torch.randn(5000).round(decimals=1), torch.empty(5000)
    codecs.by_name(name).decode(encode(codecs.by_name(name, level=level), gradient), found)
    assert same_bits(found, gradient)
