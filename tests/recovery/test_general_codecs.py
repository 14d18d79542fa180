"""raw, zlib and zstd give back every bit, and so do the float codecs with all bits."""

from collections.abc import Callable

import pytest
import torch

from float_messages import DTYPES, any_bits, encode, finite_gradient, same_bits, there_and_back
from gradwire import codecs
from gradwire.codecs.embedded_float import EmbeddedFloat
from gradwire.codecs.truncated_float import TruncatedFloat

SIZES = (0, 1, 2, 7, 31, 32, 33, 255, 256, 257, 1000, 5000, 16384, 16385, 40_007, 100_001)
LOSSLESS: dict[str, Callable[[torch.dtype], codecs.Codec]] = {
    **{name: lambda _, name=name: codecs.by_name(name) for name in ("raw", "zlib", "zstd")},
    **{f"embedded {format}": lambda _, format=format: EmbeddedFloat(32, format=format) for format in (1, 2)},
    **{
        f"truncated {way}": lambda dtype, way=way: TruncatedFloat(8 * dtype.itemsize, rounding=way)
        for way in ("truncate", "nearest", "stochastic")
    },
}


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_every_bit_comes_back(name: str, dtype: torch.dtype, n: int) -> None:
    codec, zeros, beside_zeros = LOSSLESS[name](dtype), torch.zeros(n, dtype=dtype), torch.zeros(n, dtype=dtype)
    beside_zeros[n // 3 :: 5] = 1e-30  # an escape of embedded floats, in float32 and bfloat16
    for gradient in (any_bits(n, dtype, n), finite_gradient(n, dtype), torch.randn(n).to(dtype), beside_zeros, zeros):
        assert same_bits(there_and_back(codec, gradient), gradient)
    if n >= 1000 and name in ("zlib", "zstd"):
        assert encode(codec, zeros).numel() < n * dtype.itemsize / 20


@pytest.mark.parametrize(("name", "level"), [("zlib", 1), ("zlib", 9), ("zstd", -5), ("zstd", 1), ("zstd", 19)])
def test_any_level_is_read_by_a_codec_of_another_level(name: str, level: int) -> None:
    gradient, found = torch.randn(5000).round(decimals=1), torch.empty(5000)
    codecs.by_name(name).decode(encode(codecs.by_name(name, level=level), gradient), found)
    assert same_bits(found, gradient)
