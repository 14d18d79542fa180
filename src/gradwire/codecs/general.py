"""General-purpose lossless messages: raw bytes, zlib and zstd. What the specialised codecs are measured against."""

from __future__ import annotations

import struct
import threading
import zlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire import _native
from gradwire.codecs.tensors import DTYPE_CODES, bytes_of, check_room, check_size, check_tensor, dtype_code
from gradwire.errors import BufferTooSmall, CorruptMessage, IncompatibleVersion, InvalidArgument, Unsupported

__all__ = ["RawCodec", "ZlibCodec", "ZstdCodec", "describe"]

MAGIC = b"GWGE"
VERSION = 1

# magic, version, method, dtype, zero, n_elements, payload_bytes, checksum (docs/format.md#general)
_HEADER = struct.Struct("<4sBBBBQQI")
_CHECKSUM_OFFSET = _HEADER.size - 4

_STORED, _ZLIB, _ZSTD = 0, 1, 2
_METHOD_NAMES = {_STORED: "raw", _ZLIB: "zlib", _ZSTD: "zstd"}


class RawCodec:
    """The values as they are, behind a header: the lossless baseline of a ring of messages.

    When not to use this: to save bytes.
    Format: docs/format.md#general.
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
        """Write `gradient` as one message.

        Args:
            gradient: (n,) float32, bfloat16 or float16, contiguous, CPU. All bits are kept.
            out: (>= max_encoded_bytes(n),) uint8, contiguous, CPU.
            importance: not used; lossless.
        Returns: bytes written.
        Raises: InvalidArgument (shape, dtype, device), BufferTooSmall.
        """
        check_tensor("gradient", gradient)
        check_room(self.name, out, self.max_encoded_bytes(gradient.numel(), gradient.dtype))
        values = bytes_of(gradient).numpy()
        payload, method = values, _STORED
        compressed = self._compress(values) if values.size else None
        if compressed is not None and len(compressed) < values.size:
            payload, method = np.frombuffer(compressed, dtype=np.uint8), self._method
        message = out.numpy()
        end = _HEADER.size + payload.size
        message[_HEADER.size : end] = payload
        dtype = DTYPE_CODES[gradient.dtype]
        message[: _HEADER.size] = np.frombuffer(
            _HEADER.pack(MAGIC, VERSION, method, dtype, 0, gradient.numel(), payload.size, 0), dtype=np.uint8
        )
        checksum = _checksum(message[:end])
        message[_CHECKSUM_OFFSET : _HEADER.size] = np.frombuffer(checksum.to_bytes(4, "little"), dtype=np.uint8)
        return end

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Read exactly one message into `out`.

        Args:
            message: (n_bytes,) uint8, contiguous, CPU.
            out: (n,) of the dtype that was encoded, contiguous, CPU; its contents are undefined after an error.
        Raises: InvalidArgument, CorruptMessage, IncompatibleVersion, BufferTooSmall (the message holds more).
        """
        check_tensor("message", message, torch.uint8)
        check_tensor("out", out)
        dtype_code(out.dtype, "out")
        data, values = message.numpy(), bytes_of(out).numpy()
        method = self._check_header(data, out)
        payload = data[_HEADER.size :]
        if method == _STORED:
            if payload.size != values.size:
                raise CorruptMessage(f"{self.name}: {payload.size} raw bytes for {values.size}")
            values[:] = payload
            return
        content = self._decompress(payload, values.size)
        if len(content) != values.size:
            raise CorruptMessage(f"{self.name}: the payload holds {len(content)} bytes, expected {values.size}")
        values[:] = np.frombuffer(content, dtype=np.uint8)

    def _check_header(self, data: np.ndarray[Any, np.dtype[np.uint8]], out: Tensor) -> int:
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
        return int(method)

    def _compress(self, values: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes | None:
        return None

    def _decompress(self, payload: np.ndarray[Any, np.dtype[np.uint8]], n_bytes: int) -> bytes:
        raise AssertionError("raw messages have no other method")


class ZlibCodec(RawCodec):
    """zlib (DEFLATE). The bytes depend on the zlib that Python was built with; every zlib reads them.

    When not to use this: to save time; it compresses gradients by 7 % at 0.03 GB/s (level 1).
    Args: level: 1 (fast) to 9. Raises: InvalidArgument.
    """

    name = "zlib"
    _method = _ZLIB

    def __init__(self, level: int = 1) -> None:
        if not 1 <= level <= 9:
            raise InvalidArgument(f"zlib: level must be 1 to 9, got {level}")
        self._level = level

    def _compress(self, values: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes | None:
        return zlib.compress(values.data, self._level)

    def _decompress(self, payload: np.ndarray[Any, np.dtype[np.uint8]], n_bytes: int) -> bytes:
        stream = zlib.decompressobj()
        try:
            content = stream.decompress(payload.data, n_bytes + 1)  # one more: a longer content must not pass unseen
        except zlib.error as error:
            raise CorruptMessage(f"zlib: {error}") from error
        if not stream.eof or stream.unused_data or stream.unconsumed_tail:
            raise CorruptMessage("zlib: the stream does not end with the payload")
        return content


class ZstdCodec(RawCodec):
    """Zstandard. The bytes depend on the version of the zstandard package; every version reads them.

    When not to use this: on networks faster than some 1 Gb/s; it compresses gradients by 7 % at 0.4 GB/s (level 1).
    Args: level: -7 (fast) to 22, not 0. Raises: InvalidArgument, Unsupported (package not installed).
    """

    name = "zstd"
    _method = _ZSTD

    def __init__(self, level: int = 1) -> None:
        if not -7 <= level <= 22 or level == 0:
            raise InvalidArgument(f"zstd: level must be -7 to 22 and not 0, got {level}")
        try:
            import zstandard
        except ImportError as error:
            raise Unsupported(
                "codec zstd needs the package zstandard: pip install 'gradwire[bench]'; zlib works without"
            ) from error
        self._zstandard = zstandard
        self._level = level
        self._contexts = threading.local()  # a context serves one call at a time, and costs more than a small message

    def _compress(self, values: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes | None:
        if not hasattr(self._contexts, "compressor"):
            self._contexts.compressor = self._zstandard.ZstdCompressor(level=self._level)
        compressed: bytes = self._contexts.compressor.compress(values.data)
        return compressed

    def _decompress(self, payload: np.ndarray[Any, np.dtype[np.uint8]], n_bytes: int) -> bytes:
        if not hasattr(self._contexts, "decompressor"):
            self._contexts.decompressor = self._zstandard.ZstdDecompressor()
        try:
            # The frame says how much it holds, and that much would be allocated: checked first.
            held = self._zstandard.get_frame_parameters(payload.data).content_size
            if held != n_bytes:
                raise CorruptMessage(f"zstd: a frame of {held} bytes, expected {n_bytes}")
            content: bytes = self._contexts.decompressor.decompress(payload.data, allow_extra_data=False)
        except self._zstandard.ZstdError as error:
            raise CorruptMessage(f"zstd: {error}") from error
        return content


def describe(message: Tensor) -> dict[str, Any]:
    """What a general message says of itself, as plain values: codec, format_version, dtype, n_elements, message_bytes,
    payload_bytes. The payload is checked against its checksum, not decoded.

    Raises: InvalidArgument, CorruptMessage, IncompatibleVersion.
    """
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
