"""General-purpose lossless messages: raw bytes. The laboratory adds zlib and zstd, which other codecs are measured against."""

import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire import _native
from gradwire.codecs.tensors import DTYPE_CODES, bytes_of, check_room, check_size, check_tensor, dtype_code
from gradwire.errors import BufferTooSmall, CorruptMessage, IncompatibleVersion

MAGIC, VERSION = b"GWGE", 1
# magic, version, method, dtype, zero, n_elements, payload_bytes, checksum (docs/format.md#general)
_HEADER = struct.Struct("<4sBBBBQQI")
_CHECKSUM_OFFSET = _HEADER.size - 4
_STORED = 0
_METHOD_NAMES = {_STORED: "raw", 1: "zlib", 2: "zstd"}


class RawCodec:
    """The values as they are, behind a header (docs/format.md#general): the lossless baseline of a ring of messages.

    When not to use this: to save bytes.
    """

    name = "raw"
    feeds_back = True
    _method = _STORED

    def max_encoded_bytes(self, n_elements: int, dtype: torch.dtype) -> int:
        """Header and raw values: a payload that compression would make longer is stored."""
        dtype_code(dtype)
        check_size(n_elements)
        return _HEADER.size + n_elements * dtype.itemsize

    def encode(self, gradient: Tensor, out: Tensor, importance: Tensor | None = None) -> int:
        check_tensor("gradient", gradient)
        check_room(self.name, out, self.max_encoded_bytes(gradient.numel(), gradient.dtype))
        values = bytes_of(gradient).numpy()
        payload, method = values, _STORED
        compressed = self._compress(values) if values.size else None
        if compressed is not None and len(compressed) < values.size:
            payload, method = np.frombuffer(compressed, dtype=np.uint8), self._method
        message, end = out.numpy(), _HEADER.size + payload.size
        message[_HEADER.size : end] = payload
        fields = MAGIC, VERSION, method, DTYPE_CODES[gradient.dtype], 0, gradient.numel(), payload.size
        _HEADER.pack_into(message.data, 0, *fields, 0)
        _HEADER.pack_into(message.data, 0, *fields, _checksum(message[:end]))
        return end

    def decode(self, message: Tensor, out: Tensor) -> None:
        """As `Codec.decode`; raises also BufferTooSmall (the message holds more)."""
        check_tensor("message", message, torch.uint8)
        check_tensor("out", out)
        dtype_code(out.dtype, "out")
        data, values = message.numpy(), bytes_of(out).numpy()
        _, _, method, dtype, zero, n_elements, _, _ = _read_header(data, self.name)
        if zero != 0 or method not in (_STORED, self._method):
            found = _METHOD_NAMES.get(method, str(method))
            raise CorruptMessage(f"{self.name}: message of method {found}, this codec reads {self.name} and raw")
        if dtype != DTYPE_CODES[out.dtype]:
            raise CorruptMessage(
                f"{self.name}: message of dtype code {dtype}, out is {out.dtype} ({DTYPE_CODES[out.dtype]})"
            )
        if n_elements > out.numel():
            raise BufferTooSmall(f"{self.name}: message of {n_elements} values, out has room for {out.numel()}")
        if n_elements < out.numel():
            raise CorruptMessage(f"{self.name}: message of {n_elements} values, expected {out.numel()}")
        content = data[_HEADER.size :]
        if method != _STORED:
            content = np.frombuffer(self._decompress(content, values.size), dtype=np.uint8)
        if content.size != values.size:
            raise CorruptMessage(f"{self.name}: the payload holds {content.size} bytes, expected {values.size}")
        values[:] = content

    def _compress(self, values: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes | None:
        return None

    def _decompress(self, payload: np.ndarray[Any, np.dtype[np.uint8]], n_bytes: int) -> bytes:
        raise AssertionError("raw messages have no other method")


def describe(message: Tensor) -> dict[str, Any]:
    """What a message's header says, as plain values. Raises: as `decode`; the payload is checked by its checksum only."""
    check_tensor("message", message, torch.uint8)
    data = message.numpy()
    _, _, method, dtype, _, n_elements, payload_bytes, _ = _read_header(data, "general message")
    if method not in _METHOD_NAMES or dtype not in DTYPE_CODES.values():
        raise CorruptMessage(f"general message: method {method}, dtype code {dtype}: not both are known")
    return {
        "codec": _METHOD_NAMES[method],
        "format_version": VERSION,
        "dtype": next(str(known).removeprefix("torch.") for known, code in DTYPE_CODES.items() if code == dtype),
        "n_elements": n_elements,
        "message_bytes": data.size,
        "payload_bytes": payload_bytes,
    }


def _read_header(data: np.ndarray[Any, np.dtype[np.uint8]], name: str) -> tuple[Any, ...]:
    """The header's fields, when magic, version, length and checksum are right."""
    if data.size < _HEADER.size:
        raise CorruptMessage(f"{name}: {data.size} bytes, a header alone has {_HEADER.size}")
    fields = _HEADER.unpack_from(data.data)
    magic, version, _, _, _, _, payload_bytes, checksum = fields
    if magic != MAGIC:
        raise CorruptMessage(f"{name}: not a message of a general codec: it begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise IncompatibleVersion(f"{name}: message version {version}, this build reads {VERSION}")
    if payload_bytes != data.size - _HEADER.size:
        raise CorruptMessage(f"{name}: payload of {data.size - _HEADER.size} bytes, header says {payload_bytes}")
    if checksum != _checksum(data):
        raise CorruptMessage(f"{name}: CRC32C is {_checksum(data):08x}, header says {checksum:08x}")
    return fields


def _checksum(message: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
    """CRC32C of the message without the four bytes of the checksum itself."""
    return _native.crc32c(message[_HEADER.size :], _native.crc32c(message[:_CHECKSUM_OFFSET]))
