"""What GComp is given wrongly raises a typed error that says what to do."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from gradwire import codecs
from gradwire.codecs.gcomp import GCompCodec, HuffmanTable, Truncate, describe
from gradwire.errors import BufferTooSmall, CorruptMessage, InvalidArgument

GRADIENT = torch.linspace(-1, 1, 64)
OUT = torch.empty(1000, dtype=torch.uint8)
IMPORTANCE = torch.zeros(64, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("gradient", "out", "importance", "text"),
    [
        (GRADIENT, OUT, None, r"encode\(gradient, out, importance\)"),
        (GRADIENT, OUT, IMPORTANCE[:63], "63 bytes for a gradient of 64"),
        (GRADIENT, OUT, IMPORTANCE.int(), "importance: expected torch.uint8"),
        (GRADIENT.double(), OUT, IMPORTANCE, "float32, bfloat16 or float16"),
        (GRADIENT.long(), OUT, IMPORTANCE, "float32, bfloat16 or float16"),
        (GRADIENT.reshape(8, 8), OUT, IMPORTANCE, r"\(8, 8\): flatten"),
        (GRADIENT[::2], OUT, IMPORTANCE[:32], r"\.contiguous\(\)"),
        (GRADIENT, OUT.int(), IMPORTANCE, "out: expected torch.uint8"),
        (GRADIENT.to("meta"), OUT, IMPORTANCE, "meta: copy it"),
    ],
)
def test_unfit_argument_of_encode_raises_invalid_argument(
    gradient: torch.Tensor, out: torch.Tensor, importance: torch.Tensor | None, text: str
) -> None:
    with pytest.raises(InvalidArgument, match=text):
        GCompCodec().encode(gradient, out, importance)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"importance": "all"}, "none, paper, uniform, truncate"),
        ({"importance": "uniform"}, "bits=10"),
        ({"importance": "none", "bits": 3}, "means nothing"),
        ({"importance": "paper", "bits": 3, "format": 1}, "use format=2"),
        ({"format": 3}, "format is 1 or 2"),
        ({"rounding": "up"}, "nearest, truncate"),
        ({"importance": "uniform", "bits": 24}, "0 to 23"),
        ({"importance": "uniform", "bits": -1}, "0 to 23"),
        ({"importence": "none"}, "importence"),
    ],
)
def test_unfit_option_raises_invalid_argument(options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        codecs.by_name("gcomp", **options)


def test_bits_beyond_the_mantissa_of_the_dtype_raise_invalid_argument() -> None:
    with pytest.raises(InvalidArgument, match="bfloat16 has 7 bits"):
        GCompCodec("uniform", bits=8).encode(GRADIENT.bfloat16(), OUT)


def test_missing_importance_bytes_of_a_message_of_format_2_raise_invalid_argument() -> None:
    message = OUT[: GCompCodec().encode(GRADIENT, OUT, IMPORTANCE)]
    for importance in (None, IMPORTANCE[:63]):
        with pytest.raises(InvalidArgument, match="importance"):
            GCompCodec().decode(message, torch.empty(64), importance)
    with pytest.raises(InvalidArgument, match="addend"):
        GCompCodec().decode(message, torch.empty(64), IMPORTANCE, addend=GRADIENT, divisor=2)
    with pytest.raises(InvalidArgument, match="divisor"):
        GCompCodec().decode(message, torch.empty(64), IMPORTANCE, divisor=0)


def test_short_out_raises_buffer_too_small_with_the_size_needed() -> None:
    n_needed = GCompCodec().max_encoded_bytes(64, torch.float32)
    with pytest.raises(BufferTooSmall, match=str(n_needed)):
        GCompCodec().encode(GRADIENT, OUT[: n_needed - 1], IMPORTANCE)
    GCompCodec().encode(GRADIENT, OUT[:n_needed], IMPORTANCE)


@pytest.mark.parametrize(
    "value", [GRADIENT, OUT[::2], OUT.reshape(10, 100)], ids=["floats", "strided", "two-dimensional"]
)
def test_unfit_message_raises_invalid_argument(value: torch.Tensor) -> None:
    with pytest.raises(InvalidArgument):
        GCompCodec().decode(value, torch.empty(64))


def test_histogram_of_another_dtype_raises_invalid_argument() -> None:
    with pytest.raises(InvalidArgument, match="32 counts"):
        GCompCodec(format=1).histogram(GRADIENT.half(), torch.zeros(256, dtype=torch.int64))


def test_single_values_of_a_strided_tensor_are_read_and_written() -> None:
    """Tensors of one value count as contiguous whatever their stride."""
    source, target = torch.tensor([1.5, 2.5, 3.5])[::2][1:], torch.zeros(4)[::3][1:]
    codec = GCompCodec("none")
    codec.decode(OUT[: codec.encode(source, OUT)], target)
    assert target.item() == 3.5


def test_gradient_that_requires_grad_is_encoded() -> None:
    codec, decoded = GCompCodec("none"), torch.empty(64)
    codec.decode(OUT[: codec.encode(GRADIENT.clone().requires_grad_(), OUT)], decoded)
    assert torch.equal(decoded, GRADIENT)


def test_truncate_drops_eighteen_bits_towards_zero_by_default() -> None:
    codec, decoded = codecs.by_name("truncate"), torch.empty(64)
    assert isinstance(codec, Truncate)
    codec.decode(OUT[: codec.encode(GRADIENT, OUT)], decoded)
    assert torch.equal(decoded.view(torch.int32), GRADIENT.view(torch.int32) & ~((1 << 18) - 1))


def test_codec_encodes_with_the_table_put_in_use_and_keeps_a_bounded_number() -> None:
    codec = GCompCodec("none")
    tables = [HuffmanTable.from_histogram(torch.arange(256).roll(k)) for k in range(8)]
    for table in tables:
        codec.use_table(table)
        assert codec.table_in_use(torch.float32) == table
        assert codec.table_in_use(torch.float16) == table
        assert describe(OUT[: codec.encode(GRADIENT, OUT)])["table_id"] == table.id
    for i, table in enumerate(tables):
        message = OUT[: GCompCodec("none", table=table).encode(GRADIENT, OUT)]
        with nullcontext() if i >= 2 else pytest.raises(CorruptMessage, match=f"{table.id:#018x}"):
            codec.decode(message, torch.empty(64))


def test_description_adds_up_to_the_message() -> None:
    parts = describe(OUT[: GCompCodec().encode(GRADIENT, OUT, IMPORTANCE)])
    segments = ("header_bytes", "exponent_bytes", "level_bytes", "mantissa_bytes")
    assert sum(parts[part] for part in segments) == parts["message_bytes"]
    assert (parts["importance"], parts["dtype"], parts["n_elements"]) == ("paper", "float32", 64)
