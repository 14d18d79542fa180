"""Groups of pieces: what the native call writes and reads is what the codec's own messages, one by one, are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire import _native, codecs
from gradwire.errors import BufferTooSmall, CorruptMessage, GradwireError, InvalidArgument
from gradwire.exchange.ring import engine_codec
from quantiser_oracles import make_gradient

SIZES = (1, 300, 64, 1_025, 7, 65_537, 2)
CODECS: list[tuple[str, dict[str, Any]]] = [
    ("one-bit", {}),
    ("one-bit", {"scale": "two-means"}),
    ("two-bit", {}),
    ("ternary", {"seed": 3}),
    ("qsgd", {"block": 128}),
    ("thc", {}),
    ("gcomp", {"importance": "none"}),
    ("raw", {}),
]
each_codec = pytest.mark.parametrize(("name", "options"), CODECS, ids=str)


class Pieces:
    """The native calls, by the names of what they do."""

    @staticmethod
    def max_encoded_bytes(codec: codecs.Codec, sizes: Any) -> int:
        return _native.max_group_bytes(engine_codec(codec, torch.float32, None), sizes)

    @staticmethod
    def encode(
        codec: codecs.Codec,
        values: Tensor,
        sizes: Any,
        out: Tensor,
        left_out: Tensor,
        draw: int = 0,
        residual: Any = None,
    ) -> int:
        native = engine_codec(codec, torch.float32, None)
        return _native.encode_group(native, values, residual, sizes, out, left_out, draw)

    @staticmethod
    def decode(codec: codecs.Codec, message: Tensor, sizes: Any, out: Tensor, divisor: int = 1) -> None:
        _native.decode_group(engine_codec(codec, torch.float32, None), message, sizes, divisor, out)

    @staticmethod
    def add(codec: codecs.Codec, message: Tensor, sizes: Any, total: Tensor, scratch: Tensor) -> None:
        _native.add_group(engine_codec(codec, torch.float32, None), message, sizes, total, scratch)


pieces = Pieces


def encode(codec: codecs.Codec, values: Tensor, sizes: tuple[int, ...], first_step: int = 0) -> tuple[Tensor, Tensor]:
    """The message, and what it left out."""
    out = torch.empty(pieces.max_encoded_bytes(codec, sizes), dtype=torch.uint8)
    left_out = torch.full_like(values, float("nan"))
    return out[: pieces.encode(codec, values, sizes, out, left_out, first_step)], left_out


@each_codec
def test_a_group_is_the_messages_of_its_pieces_with_their_lengths(name: str, options: dict[str, Any]) -> None:
    codec, values, first_step = codecs.by_name(name, **options), make_gradient(sum(SIZES)), 41
    message, left_out = encode(codec, values, SIZES, first_step)
    decoded = torch.empty_like(values)
    pieces.decode(codec, message, SIZES, decoded)
    torch.testing.assert_close(decoded + left_out, values, rtol=0, atol=1e-6 * float(values.abs().max()))
    at = first = 0
    for size in SIZES:
        mine = values[first : first + size]
        alone = torch.empty(codec.max_encoded_bytes(size, torch.float32), dtype=torch.uint8)
        if name in ("gcomp", "raw"):
            alone = alone[: codec.encode(mine, alone)]
        else:
            alone = alone[: codec.encode(mine, alone, step=first_step + first)]  # type: ignore[call-arg]
        assert int.from_bytes(bytes(message[at : at + 4].tolist()), "little") == alone.numel()
        assert torch.equal(message[at + 4 : at + 4 + alone.numel()], alone)
        again = torch.empty(size)
        codec.decode(alone, again)
        assert torch.equal(again, decoded[first : first + size])
        assert torch.equal(left_out[first : first + size], mine - again)
        at += 4 + alone.numel()
        first += size
    assert at == message.numel()


@pytest.mark.parametrize(("name", "options"), CODECS[:6], ids=str)
def test_a_residual_is_added_in_the_same_sweep(name: str, options: dict[str, Any]) -> None:
    codec, values = codecs.by_name(name, **options), make_gradient(sum(SIZES))
    residual = values.flip(0) * 0.3
    expected, expected_left_out = encode(codec, values + residual, SIZES)
    out, left_out = torch.empty(2 * expected.numel(), dtype=torch.uint8), torch.empty_like(values)
    n_bytes = pieces.encode(codec, values, SIZES, out, left_out, residual=residual)
    assert torch.equal(out[:n_bytes], expected)
    assert torch.equal(left_out, expected_left_out)


@each_codec
@pytest.mark.parametrize("divisor", [2, 3, 17])
def test_decoded_values_are_divided_and_added_to_the_bit(name: str, options: dict[str, Any], divisor: int) -> None:
    codec, values = codecs.by_name(name, **options), make_gradient(sum(SIZES))
    message, _ = encode(codec, values, SIZES)
    decoded, divided, scratch = (torch.empty_like(values) for _ in range(3))
    pieces.decode(codec, message, SIZES, decoded)
    pieces.decode(codec, message, SIZES, divided, divisor)
    assert torch.equal(divided, decoded / divisor)
    total = values.clone()
    pieces.add(codec, message, SIZES, total, scratch)
    assert torch.equal(total, values + decoded)


@each_codec
def test_damaged_groups_are_refused(name: str, options: dict[str, Any]) -> None:
    sizes = (40, 9, 130)
    codec = codecs.by_name(name, **options)
    message, _ = encode(codec, make_gradient(sum(sizes)), sizes)
    out = torch.empty(sum(sizes))
    for n_bytes in range(message.numel()):
        with pytest.raises(CorruptMessage):
            pieces.decode(codec, message[:n_bytes].clone(), sizes, out)
    with pytest.raises(CorruptMessage, match="1 bytes too many"):
        pieces.decode(codec, torch.cat([message, torch.zeros(1, dtype=torch.uint8)]), sizes, out)
    for lie in (0, 2**31, 2**32 - 1):
        damaged = message.clone()
        damaged[:4] = torch.tensor(list(lie.to_bytes(4, "little")), dtype=torch.uint8)
        with pytest.raises(CorruptMessage):
            pieces.decode(codec, damaged, sizes, out)
    with pytest.raises((CorruptMessage, BufferTooSmall)):
        pieces.decode(codec, message, (9, 40, 130), out)


def test_only_codecs_that_do_it_in_one_sweep_add_a_residual() -> None:
    values, out = make_gradient(100), torch.empty(1_000, dtype=torch.uint8)
    for name in ("truncated-float", "raw"):
        codec = codecs.by_name(name)
        with pytest.raises(InvalidArgument, match="residual"):
            pieces.encode(codec, values, (100,), out, torch.empty(100), residual=torch.zeros(100))


def test_no_pieces_are_an_empty_message() -> None:
    codec = codecs.by_name("one-bit")
    message, left_out = encode(codec, torch.empty(0), ())
    assert message.numel() == left_out.numel() == 0
    pieces.decode(codec, message, (), torch.empty(0))


@each_codec
def test_values_that_are_passed_over_are_neither_read_nor_written(name: str, options: dict[str, Any]) -> None:
    """The same message as of the pieces alone; around them everything stays as it was, NaN or not."""
    codec, sizes = codecs.by_name(name, **options), (-3, 300, 64, -1, 1_025, -70_000, 7, -9)
    n = sum(map(abs, sizes))
    values, travels = torch.full((n,), float("nan")), torch.zeros(n, dtype=torch.bool)
    first = 0
    for size in sizes:
        travels[first : first + abs(size)] = size > 0
        first += abs(size)
    alone = make_gradient(int(travels.sum()))
    values[travels] = alone
    out = torch.empty(pieces.max_encoded_bytes(codec, sizes), dtype=torch.uint8)
    left_out, decoded, total = torch.full((n,), 5.0), torch.full((n,), 6.0), torch.full((n,), 7.0)
    message = out[: pieces.encode(codec, values, sizes, out, left_out)]
    pieces.decode(codec, message, sizes, decoded, 3)
    assert left_out[~travels].eq(5).all()
    assert decoded[~travels].eq(6).all()
    if name in ("one-bit", "two-bit", "raw"):  # the others draw by where a piece begins, or weigh
        expected, left = encode(codec, alone, tuple(size for size in sizes if size > 0))
        assert torch.equal(message, expected)
        assert torch.equal(left_out[travels], left)
    again = torch.empty(alone.numel())
    pieces.decode(codec, message, [size for size in sizes if size > 0], again, 3)
    assert torch.equal(decoded[travels], again)
    pieces.add(codec, message, sizes, total, torch.zeros(n))
    assert torch.equal(total[travels], 7 + decode_alone(codec, message, sizes, again))
    assert total[~travels].eq(7).all()


def decode_alone(codec: codecs.Codec, message: Tensor, sizes: tuple[int, ...], like: Tensor) -> Tensor:
    out = torch.empty_like(like)
    pieces.decode(codec, message, [size for size in sizes if size > 0], out)
    return out


def test_sizes_have_to_be_those_of_the_buffer() -> None:
    codec, values = codecs.by_name("two-bit"), make_gradient(100)
    for sizes in ((50, 49), (50, 51), (2**63 - 1, 101), (-(2**63), 100), (50, -49), (50, -51)):
        out = torch.empty(1_000, dtype=torch.uint8)
        with pytest.raises(InvalidArgument):
            pieces.encode(codec, values, sizes, out, torch.empty(100))
    message, _ = encode(codec, values, (60, 40))
    with pytest.raises(InvalidArgument):
        pieces.decode(codec, message, (60, 40), torch.empty(99))


def test_a_buffer_without_room_is_refused() -> None:
    codec, values = codecs.by_name("one-bit"), make_gradient(100)
    n_bytes = encode(codec, values, (60, 40))[0].numel()
    for room in range(0, n_bytes, 7):
        with pytest.raises(GradwireError):
            pieces.encode(codec, values, (60, 40), torch.empty(room, dtype=torch.uint8), torch.empty(100))
