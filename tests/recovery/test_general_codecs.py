"""raw, zlib and zstd give back every bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from gradwire import codecs
from gradwire.errors import BufferTooSmall, InvalidArgument

NAMES = ["raw", "zlib", "zstd"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

each_codec = pytest.mark.parametrize("name", NAMES)


def encoded(codec: codecs.Codec, gradient: Tensor) -> Tensor:
    out = torch.full((codec.max_encoded_bytes(gradient.numel(), gradient.dtype),), 0xA5, dtype=torch.uint8)
    n_bytes = codec.encode(gradient, out)
    assert (out[n_bytes:] == 0xA5).all(), "written past the message"
    return out[:n_bytes].clone()


def any_bits(n_elements: int, dtype: torch.dtype) -> Tensor:
    random = torch.Generator().manual_seed(n_elements)
    return torch.randint(0, 256, (n_elements * dtype.itemsize,), generator=random, dtype=torch.uint8).view(dtype)


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@each_codec
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_elements", [0, 1, 2, 7, 1000, 100_001])
@pytest.mark.parametrize("kind", ["any bits", "zeros", "normal"])
def test_every_bit_comes_back(name: str, dtype: torch.dtype, n_elements: int, kind: str) -> None:
    gradient = {
        "any bits": lambda: any_bits(n_elements, dtype),  # NaN with payloads, Inf, subnormals
        "zeros": lambda: torch.zeros(n_elements, dtype=dtype),
        "normal": lambda: torch.randn(n_elements).to(dtype),
    }[kind]()
    codec = codecs.by_name(name)
    message = encoded(codec, gradient)
    found = torch.empty_like(gradient)
    codec.decode(message, found)
    assert_same_bits(found, gradient)
    if kind == "zeros" and n_elements >= 1000 and name != "raw":
        assert message.numel() < n_elements * dtype.itemsize / 20


@each_codec
def test_importance_changes_nothing(name: str) -> None:
    gradient, codec = torch.randn(1000), codecs.by_name(name)
    out = torch.empty(codec.max_encoded_bytes(1000, torch.float32), dtype=torch.uint8)
    n_bytes = codec.encode(gradient, out, torch.full((1000,), 255, dtype=torch.uint8))
    assert torch.equal(out[:n_bytes], encoded(codec, gradient))


@pytest.mark.parametrize(("name", "level"), [("zlib", 1), ("zlib", 9), ("zstd", -5), ("zstd", 1), ("zstd", 19)])
def test_any_level_is_read_by_a_codec_of_another_level(name: str, level: int) -> None:
    gradient = torch.randn(5000).round(decimals=1)
    message = encoded(codecs.by_name(name, level=level), gradient)
    found = torch.empty_like(gradient)
    codecs.by_name(name).decode(message, found)
    assert_same_bits(found, gradient)


@each_codec
def test_one_codec_serves_many_threads(name: str) -> None:
    codec = codecs.by_name(name)
    gradients = [torch.randn(20_000 + i).round(decimals=1) for i in range(16)]

    def there_and_back(gradient: Tensor) -> Tensor:
        found = torch.empty_like(gradient)
        codec.decode(encoded(codec, gradient), found)
        return found

    with ThreadPoolExecutor(4) as pool:
        for gradient, found in zip(gradients, pool.map(there_and_back, gradients), strict=True):
            assert_same_bits(found, gradient)


@each_codec
@pytest.mark.parametrize(
    "gradient",
    [torch.zeros(4, dtype=torch.float64), torch.zeros(2, 2), torch.zeros(8)[::2], torch.zeros(4, dtype=torch.int32)],
)
def test_other_tensors_are_refused(name: str, gradient: Tensor) -> None:
    codec = codecs.by_name(name)
    with pytest.raises(InvalidArgument, match="gradient"):
        codec.encode(gradient, torch.empty(1000, dtype=torch.uint8))
    with pytest.raises(InvalidArgument, match="out"):
        codec.decode(encoded(codec, torch.zeros(4)), gradient)
    with pytest.raises(InvalidArgument, match="out"):
        codec.encode(torch.zeros(4), torch.empty(1000))


@each_codec
def test_a_small_output_buffer_is_refused(name: str) -> None:
    codec = codecs.by_name(name)
    with pytest.raises(BufferTooSmall):
        codec.encode(torch.zeros(100), torch.empty(codec.max_encoded_bytes(100, torch.float32) - 1, dtype=torch.uint8))
    with pytest.raises(BufferTooSmall):
        codec.decode(encoded(codec, torch.zeros(100)), torch.empty(99))


@pytest.mark.parametrize(("name", "level"), [("zlib", 0), ("zlib", 10), ("zstd", 0), ("zstd", 23), ("raw", 1)])
def test_unknown_options_are_refused(name: str, level: int) -> None:
    with pytest.raises(InvalidArgument):
        codecs.by_name(name, level=level)
