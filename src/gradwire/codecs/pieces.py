"""Neighbouring pieces of a flat buffer as one message: each piece's own message, its length before it.

So whatever a codec derives from its values (a scale) belongs to one piece, and many small tensors travel together
(docs/format.md#slimgc-group). The quantisers do it in one native call, since their pieces take less time than a call.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.codecs import Codec, WeighingCodec
from gradwire.codecs.quantised import Quantised
from gradwire.errors import CorruptMessage

_LENGTH = struct.Struct("<I")
_CHECK = "check that all ranks run the same gradwire, and the host's memory and network"


def max_encoded_bytes(codec: Codec, sizes: Sequence[int]) -> int:
    """Bytes that no message of pieces of float32 of these sizes exceeds."""
    return sum(_LENGTH.size + codec.max_encoded_bytes(size, torch.float32) for size in sizes if size >= 0)


def is_one_call(codec: Codec) -> bool:
    """Whether a group takes one native call, in which `encode` also adds a residual: most quantisers."""
    return isinstance(codec, Quantised) and codec.has_native_pieces


def encode(
    codec: Codec,
    values: Tensor,
    sizes: Sequence[int],
    out: Tensor,
    left_out: Tensor,
    first_step: int = 0,
    importance: Tensor | None = None,
    residual: Tensor | None = None,
) -> int:
    """Write `values` + `residual` as one message, and what that loses into `left_out`.

    Args:
        values, residual: (n,) float32, contiguous, CPU; a residual only where `is_one_call`.
        sizes: of the pieces, which together are the values. A negative one passes over so many values: they are neither
            read nor, in `left_out`, written; `decode` leaves them as they are.
        out: (>= max_encoded_bytes(codec, sizes),) uint8.
        left_out: (n,) float32: gets values + residual - decoded.
        first_step: for quantisers that draw: the piece from value k on is encoded with step first_step + k.
        importance: (n,) uint8, for codecs that weigh values.
    Returns: bytes written.
    Raises: whatever the codec raises.
    """
    if is_one_call(codec):
        assert isinstance(codec, Quantised)
        return codec.encode_pieces(values, residual, sizes, out, left_out, first_step)
    assert residual is None
    first = at = 0
    for size in sizes:
        if size < 0:
            first -= size
            continue
        piece, mine, room = values[first : first + size], left_out[first : first + size], out[at + _LENGTH.size :]
        if isinstance(codec, Quantised):
            n_bytes = codec.encode_with_residual(piece, None, room, first_step + first, new_residual=mine)
        else:
            n_bytes = codec.encode(piece, room, None if importance is None else importance[first : first + size])
            _decode_piece(codec, room[:n_bytes], mine, importance, first)
            torch.sub(piece, mine, out=mine)
        out[at : at + _LENGTH.size] = torch.frombuffer(bytearray(_LENGTH.pack(n_bytes)), dtype=torch.uint8)
        at += _LENGTH.size + n_bytes
        first += size
    return at


def decode(
    codec: Codec,
    message: Tensor,
    sizes: Sequence[int],
    out: Tensor,
    divisor: int = 1,
    importance: Tensor | None = None,
) -> None:
    """Read a message of pieces of these sizes, divided by `divisor`, into `out` (n,) float32.

    Args: importance: as in `encode`, the sender's, for codecs that need it again.
    Raises: CorruptMessage, and whatever the codec raises.
    """
    if is_one_call(codec):
        assert isinstance(codec, Quantised)
        codec.decode_pieces(message, sizes, out, divisor)
        return
    first = at = 0
    for size in sizes:
        if size < 0:
            first -= size
            continue
        length = message[at : at + _LENGTH.size]
        n_bytes = _LENGTH.unpack(bytes(length.tolist()))[0] if length.numel() == _LENGTH.size else -1
        at += _LENGTH.size
        if not 0 <= n_bytes <= message.numel() - at:
            raise CorruptMessage(
                f"a group of {len(sizes)} pieces ends after {message.numel()} bytes, before the piece of values "
                f"{first} to {first + size}; {_CHECK}"
            )
        mine = out[first : first + size]
        _decode_piece(codec, message[at : at + n_bytes], mine, importance, first)
        if divisor != 1:
            mine.div_(divisor)
        at += n_bytes
        first += size
    if at != message.numel():
        raise CorruptMessage(f"a group of {len(sizes)} pieces has {message.numel() - at} bytes too many; {_CHECK}")


def add(
    codec: Codec,
    message: Tensor,
    sizes: Sequence[int],
    total: Tensor,
    scratch: Tensor,
    importance: Tensor | None = None,
) -> None:
    """Add what a message of pieces of these sizes holds to `total`; `scratch`: both (n,) float32. Else as `decode`."""
    if is_one_call(codec):
        assert isinstance(codec, Quantised)
        codec.decode_pieces(message, sizes, total, adds=True)
        return
    decode(codec, message, sizes, scratch, importance=importance)
    total.add_(scratch)


def _decode_piece(codec: Codec, message: Tensor, out: Tensor, importance: Tensor | None, first: int) -> None:
    """One piece's own message, of values from `first` on of the group that `importance` is of."""
    if isinstance(codec, WeighingCodec):
        codec.decode(message, out, None if importance is None else importance[first : first + out.numel()])
    else:
        codec.decode(message, out)
