"""Groups of pieces: what the native call writes and reads is what the codec's own messages, one by one, are."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from float_messages import decode as decode_alone
from float_messages import encode as encode_alone
from gradwire import _native, codecs
from gradwire.errors import BufferTooSmall, CorruptMessage, GradwireError, InvalidArgument
from gradwire.exchange.ring import engine_codec
from quantiser_oracles import make_gradient

SIZES = (1, 300, 64, 1_025, 7, 65_537, 2)
CODECS: list[tuple[str, dict[str, Any]]] = [
    ("one-bit", {}), ("one-bit", {"scale": "two-means"}), ("one-bit", {"scale_values": 512}), ("two-bit", {}),
    ("two-bit", {"scale_values": 64, "levels": 4}), ("ternary", {"seed": 3}), ("qsgd", {"block": 128}),
    ("thc", {}), ("gcomp", {"importance": "none"}), ("raw", {}),
]  # fmt: skip
each_codec = pytest.mark.parametrize(("name", "options"), CODECS, ids=str)


def native(codec: codecs.Codec) -> Any:
    return engine_codec(codec, torch.float32, None)


def encode(
    codec: codecs.Codec, values: Tensor, sizes: Sequence[int], draw: int = 0, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The message, and what it left out; 5 where values are passed over."""
    out = torch.empty(_native.max_group_bytes(native(codec), sizes), dtype=torch.uint8)
    left_out = torch.full_like(values, 5.0)
    return out[: _native.encode_group(native(codec), values, residual, sizes, out, left_out, draw)], left_out


def decode(codec: codecs.Codec, message: Tensor, sizes: Sequence[int], n: int, divisor: int = 1) -> Tensor:
    """(n,) values; 6 where they are passed over."""
    out = torch.full((n,), 6.0)
    _native.decode_group(native(codec), message, sizes, divisor, out)
    return out


@each_codec
def test_a_group_is_the_messages_of_its_pieces_with_their_lengths(name: str, options: dict[str, Any]) -> None:
    codec, values = codecs.by_name(name, **options), make_gradient(sum(SIZES))
    message, left_out = encode(codec, values, SIZES, 41)
    decoded = decode(codec, message, SIZES, sum(SIZES))
    torch.testing.assert_close(decoded + left_out, values, rtol=0, atol=1e-6 * float(values.abs().max()))
    at = first = 0
    for size in SIZES:
        mine = slice(first, first + size)
        alone = encode_alone(codec, values[mine], **({} if name in ("gcomp", "raw") else {"step": 41 + first}))
        assert int.from_bytes(bytes(message[at : at + 4].tolist()), "little") == alone.numel()
        assert torch.equal(message[at + 4 : at + 4 + alone.numel()], alone)
        assert torch.equal(decode_alone(codec, alone, size), decoded[mine])
        assert torch.equal(left_out[mine], values[mine] - decoded[mine])
        at += 4 + alone.numel()
        first += size
    assert at == message.numel()


@pytest.mark.parametrize(("name", "options"), CODECS[:-2], ids=str)
def test_a_residual_is_added_in_the_same_sweep(name: str, options: dict[str, Any]) -> None:
    codec, values = codecs.by_name(name, **options), make_gradient(sum(SIZES))
    residual = values.flip(0) * 0.3
    expected, found = encode(codec, values + residual, SIZES), encode(codec, values, SIZES, residual=residual)
    assert all(map(torch.equal, found, expected))


@each_codec
@pytest.mark.parametrize("divisor", [2, 3, 17])
def test_decoded_values_are_divided_and_added_to_the_bit(name: str, options: dict[str, Any], divisor: int) -> None:
    codec, values = codecs.by_name(name, **options), make_gradient(sum(SIZES))
    message, _ = encode(codec, values, SIZES)
    decoded, total = decode(codec, message, SIZES, sum(SIZES)), values.clone()
    assert torch.equal(decode(codec, message, SIZES, sum(SIZES), divisor), decoded / divisor)
    _native.add_group(native(codec), message, SIZES, total, torch.empty_like(values))
    assert torch.equal(total, values + decoded)


@each_codec
def test_values_that_are_passed_over_are_neither_read_nor_written(name: str, options: dict[str, Any]) -> None:
    """The same message as of the pieces alone; around them everything stays as it was, NaN or not."""
    codec, sizes = codecs.by_name(name, **options), (-3, 300, 64, -1, 1_025, -70_000, 7, -9)
    travels = torch.cat([torch.full((abs(size),), size > 0) for size in sizes])
    n, n_travels, of_pieces = travels.numel(), int(travels.sum()), [size for size in sizes if size > 0]
    values, alone = torch.full((n,), float("nan")), make_gradient(n_travels)
    values[travels] = alone
    message, left_out = encode(codec, values, sizes)
    decoded, total = decode(codec, message, sizes, n, 3), torch.full((n,), 7.0)
    assert left_out[~travels].eq(5).all()
    assert decoded[~travels].eq(6).all()
    if name in ("one-bit", "two-bit", "raw"):  # the others draw by where a piece begins, or weigh
        expected, left = encode(codec, alone, of_pieces)
        assert torch.equal(message, expected)
        assert torch.equal(left_out[travels], left)
    assert torch.equal(decoded[travels], decode(codec, message, of_pieces, n_travels, 3))
    _native.add_group(native(codec), message, sizes, total, torch.zeros(n))
    assert torch.equal(total[travels], 7 + decode(codec, message, of_pieces, n_travels))
    assert total[~travels].eq(7).all()


@each_codec
def test_damaged_groups_are_refused(name: str, options: dict[str, Any]) -> None:
    codec, sizes = codecs.by_name(name, **options), (40, 9, 130)
    message, _ = encode(codec, make_gradient(179), sizes)
    for n_bytes in range(message.numel()):
        with pytest.raises(CorruptMessage):
            decode(codec, message[:n_bytes].clone(), sizes, 179)
    with pytest.raises(CorruptMessage, match="1 bytes too many"):
        decode(codec, torch.cat([message, torch.zeros(1, dtype=torch.uint8)]), sizes, 179)
    for lie in (0, 2**31, 2**32 - 1):
        length = torch.tensor(list(lie.to_bytes(4, "little")), dtype=torch.uint8)
        with pytest.raises(CorruptMessage):
            decode(codec, torch.cat([length, message[4:]]), sizes, 179)
    with pytest.raises((CorruptMessage, BufferTooSmall)):
        decode(codec, message, (9, 40, 130), 179)


def test_no_pieces_are_an_empty_message() -> None:
    codec = codecs.by_name("one-bit")
    message, left_out = encode(codec, torch.empty(0), ())
    assert message.numel() == left_out.numel() == decode(codec, message, (), 0).numel() == 0


ONE_BIT, VALUES = codecs.by_name("one-bit"), make_gradient(100)
N_BYTES = encode(ONE_BIT, VALUES, (60, 40))[0].numel()


def encode_into(n_bytes: int, sizes: Sequence[int], name: str = "one-bit", residual: Tensor | None = None) -> None:
    out = torch.empty(n_bytes, dtype=torch.uint8)
    _native.encode_group(native(codecs.by_name(name)), VALUES, residual, sizes, out, torch.empty(100), 0)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        *(
            (lambda sizes=sizes: encode_into(1_000, sizes), InvalidArgument, None)
            for sizes in ((50, 49), (50, 51), (2**63 - 1, 101), (-(2**63), 100), (50, -49), (50, -51))
        ),
        (lambda: decode(ONE_BIT, encode(ONE_BIT, VALUES, (60, 40))[0], (60, 40), 99), InvalidArgument, None),
        *((lambda room=room: encode_into(room, (60, 40)), GradwireError, None) for room in range(0, N_BYTES, 7)),
        # only some codecs add a residual in one sweep
        *(
            (lambda name=name: encode_into(1_000, (100,), name, torch.zeros(100)), InvalidArgument, "residual")
            for name in ("truncated-float", "raw")
        ),
    ],
)
def test_sizes_buffers_and_residuals_that_do_not_fit_are_refused(
    call: Callable[[], None], error: type[Exception], match: str | None
) -> None:
    with pytest.raises(error, match=match):
        call()
