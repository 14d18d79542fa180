"""Truncated and embedded floats on a device: the bytes of the CPU's codecs, enqueued by nobody who waits."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod

import torch
from torch import Tensor

from gradwire.codecs.embedded_float import N_BITS, EmbeddedFloat
from gradwire.codecs.tensors import check_step, dtype_code
from gradwire.codecs.truncated_float import TruncatedFloat
from gradwire.errors import CorruptMessage, GradwireError, IncompatibleVersion, InvalidArgument, Unsupported
from gradwire.gpu.kernels import Kernels
from gradwire.gpu.tensors import THREADS, check_on_device, check_work, grid, parts

_CHUNK_VALUES = 16_384
_WARP = 32
_SHARED_OF_CHECKSUM = 4 * (256 + 8)
_SHARED_OF_SEAL = _SHARED_OF_CHECKSUM + 4
_ERROR_OF_CODE = 7  # the error word is this less the first of what is wrong
_TRUNCATED, _EMBEDDED = 0, 1

_WRONG: dict[int, tuple[type[GradwireError], str]] = {
    1: (CorruptMessage, "it does not begin with this codec's letters: another kind of message, or bytes were lost"),
    2: (IncompatibleVersion, "it is of another format version: use the same gradwire release on every rank"),
    3: (CorruptMessage, "it has another length or number of values than expected"),
    4: (CorruptMessage, "a checksum does not match: bytes were changed on the way"),
    5: (CorruptMessage, "it was written with other options, or has flags, scales or exponents that no encoder writes"),
}


class _Format(ctypes.Structure):
    """`Format` of source/floats.hpp."""

    _fields_ = [
        ("n", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("kind", "dtype", "format", "n_bits", "partition", "pad")),
    ]


class _Written(ctypes.Structure):
    """`Written` of source/floats.hpp."""

    _fields_ = [("out", ctypes.c_void_p), ("divisor", ctypes.c_float), ("adds", ctypes.c_uint32)]


class _Encode(ctypes.Structure):
    """`FloatEncode` of source/floats.hpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("values", "message", "scales", "chunk_flags", "n_bytes")),
        *((name, ctypes.c_uint64) for name in ("seed", "step")),
        ("format", _Format),
        *((name, ctypes.c_uint32) for name in ("rounding", "pad")),
    ]


class _Decode(ctypes.Structure):
    """`FloatDecode` of source/floats.hpp."""

    _fields_ = [("message", ctypes.c_void_p), ("error", ctypes.c_void_p), ("format", _Format), ("to", _Written)]


class _DeviceFloats(ABC):
    """What both codecs share; see `DeviceTruncatedFloat`."""

    name: str

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    @abstractmethod
    def message_bytes(self, n_elements: int, dtype: torch.dtype) -> int:
        """The room of a message."""

    @abstractmethod
    def _format(self, n_elements: int, dtype: torch.dtype) -> _Format:
        """The options. Raises: InvalidArgument."""

    @abstractmethod
    def _launch_pack(self, n_elements: int, parameters: _Encode) -> None:
        """All of a message but its checksums and header."""

    @abstractmethod
    def _launch_unpack(self, n_elements: int, parameters: _Decode) -> None:
        """The values of a message that has been checked."""

    def work_bytes(self, n_elements: int, dtype: torch.dtype) -> int:
        """Of the memory that `encode` uses on the side, at a multiple of 8 bytes."""
        n_partitions = parts(n_elements, self._format(n_elements, dtype).partition)
        return 4 * (n_partitions + parts(n_elements, _CHUNK_VALUES))

    def decode(self, message: Tensor, out: Tensor, error: Tensor, *, divisor: float = 1.0, adds: bool = False) -> None:
        """Read a message that was written with the same options.

        Args:
            message: (message_bytes(n, dtype),) uint8, at a multiple of 4 bytes.
            out: (n,) of the sender's dtype: gets the values / divisor, or has them added. All NaN where the message is not
                whole.
            error: (1,) int32: keeps the worst of what was wrong since it was 0; see `raise_error`. No message counts as whole
                beside one that was not.
            divisor: not together with `adds`.
        All contiguous on the kernels' device. Raises: InvalidArgument, and what a launch raises.
        """
        n, device = out.numel(), self._kernels.device
        message_format = self._format(n, out.dtype)
        check_on_device("message", message, torch.uint8, self.message_bytes(n, out.dtype), device, 4)
        check_on_device("out", out, out.dtype, n, device, out.element_size())
        check_on_device("error", error, torch.int32, 1, device, 4)
        if adds and divisor != 1:
            raise InvalidArgument("values are added without a divisor")
        to = _Written(out.data_ptr(), divisor, adds)
        parameters = _Decode(message.data_ptr(), error.data_ptr(), message_format, to)
        self._kernels.launch("gw_floats_check", 1, THREADS, _SHARED_OF_CHECKSUM, parameters)
        n_chunks = parts(n, _CHUNK_VALUES)
        self._kernels.launch("gw_floats_read_chunks", n_chunks, THREADS, _SHARED_OF_CHECKSUM, parameters)
        self._launch_unpack(n, parameters)

    def raise_error(self, code: int) -> None:
        """Raise what the error word says, if anything. Raises: CorruptMessage, IncompatibleVersion."""
        if code == 0:
            return
        error, text = _WRONG[_ERROR_OF_CODE - code]
        raise error(f"{self.name} message on {self._kernels.device}: {text}")

    def _encode(
        self,
        values: Tensor,
        out: Tensor,
        n_bytes: Tensor,
        work: Tensor,
        seed: int = 0,
        step: int = 0,
        rounding: int = 0,
    ) -> None:
        n, device = values.numel(), self._kernels.device
        message_format = self._format(n, values.dtype)
        check_on_device("values", values, values.dtype, n, device, values.element_size())
        check_on_device("out", out, torch.uint8, self.message_bytes(n, values.dtype), device, 4)
        check_on_device("n_bytes", n_bytes, torch.int64, 1, device, 8)
        check_work(work, self.work_bytes(n, values.dtype), device)
        flags_at = work.data_ptr() + 4 * parts(n, message_format.partition)
        parameters = _Encode(
            values.data_ptr(), out.data_ptr(), work.data_ptr(), flags_at, n_bytes.data_ptr(),
            seed, step, message_format, rounding,
        )  # fmt: skip
        self._launch_pack(n, parameters)
        n_chunks = parts(n, _CHUNK_VALUES)
        self._kernels.launch("gw_floats_seal_chunks", n_chunks, THREADS, _SHARED_OF_SEAL, parameters)
        self._kernels.launch("gw_floats_seal", 1, THREADS, _SHARED_OF_SEAL, parameters)


class DeviceTruncatedFloat(_DeviceFloats):
    """TruncatedFloat on a device: calls enqueue kernels on the current stream and return.

    Messages are those of the CPU's codec, byte for byte, and have a fixed room: `message_bytes`. One whose values are all
    finite ends before its marks, and the rest of the room means nothing.

    Args:
        codec: its options.
        kernels: where they run.
    """

    name = TruncatedFloat.name

    def __init__(self, codec: TruncatedFloat, kernels: Kernels) -> None:
        super().__init__(kernels)
        self.codec = codec

    def message_bytes(self, n_elements: int, dtype: torch.dtype) -> int:
        """Bytes that no message of `n_elements` exceeds. Raises: InvalidArgument."""
        return self.codec.max_encoded_bytes(n_elements, dtype)

    def encode(self, values: Tensor, out: Tensor, n_bytes: Tensor, work: Tensor, *, step: int = 0) -> None:
        """As `TruncatedFloat.encode`.

        Args:
            values: (n,) float32, bfloat16 or float16.
            out: (message_bytes(n, dtype),) uint8, at a multiple of 4 bytes.
            n_bytes: (1,) int64: gets the length of the message.
            work: at least (work_bytes(n, dtype),) uint8.
            step: what "stochastic" draws by.
        All contiguous on the kernels' device. Raises: InvalidArgument, and what a launch raises.
        """
        self._encode(values, out, n_bytes, work, self.codec.seed, check_step(step), self.codec.native_rounding)

    def _format(self, n_elements: int, dtype: torch.dtype) -> _Format:
        code, number_format, n_bits, partition = self.codec.native_settings(dtype)
        return _Format(n_elements, _TRUNCATED, code, number_format, n_bits, partition)

    def _launch_pack(self, n_elements: int, parameters: _Encode) -> None:
        n_warps = parts(n_elements, parameters.format.partition)
        self._kernels.launch("gw_truncated_scales", grid(_WARP * n_warps), THREADS, 0, parameters)
        self._kernels.launch("gw_truncated_pack", grid(parts(n_elements, _WARP) + THREADS), THREADS, 0, parameters)

    def _launch_unpack(self, n_elements: int, parameters: _Decode) -> None:
        self._kernels.launch("gw_truncated_unpack", grid(parts(n_elements, _WARP) + THREADS), THREADS, 0, parameters)


class DeviceEmbeddedFloat(_DeviceFloats):
    """EmbeddedFloat on a device: messages with the first bits, of a length that their number of values alone decides.

    Args: as of `DeviceTruncatedFloat`.
    Raises: Unsupported (32 bits, whose messages end with escapes, of any number).
    """

    name = EmbeddedFloat.name

    def __init__(self, codec: EmbeddedFloat, kernels: Kernels) -> None:
        if codec.bits == N_BITS:
            raise Unsupported(
                "kernels write embedded floats of 2 to 31 bits; bits=32 needs escapes: leave placement out"
            )
        super().__init__(kernels)
        self.codec = codec

    def message_bytes(self, n_elements: int, dtype: torch.dtype) -> int:
        """Bytes of every message of `n_elements`. Raises: InvalidArgument."""
        return self.codec.max_encoded_bytes(n_elements, dtype)

    def encode(self, values: Tensor, out: Tensor, n_bytes: Tensor, work: Tensor, *, step: int = 0) -> None:
        """As `EmbeddedFloat.encode`. Arguments and errors are those of `DeviceTruncatedFloat.encode`; no step is drawn by."""
        self._encode(values, out, n_bytes, work)

    def _format(self, n_elements: int, dtype: torch.dtype) -> _Format:
        return _Format(n_elements, _EMBEDDED, dtype_code(dtype), 0, self.codec.bits, self.codec.partition)

    def _launch_pack(self, n_elements: int, parameters: _Encode) -> None:
        n_warps = parts(n_elements, self.codec.partition)
        self._kernels.launch("gw_embedded_pack", grid(_WARP * n_warps), THREADS, 0, parameters)

    def _launch_unpack(self, n_elements: int, parameters: _Decode) -> None:
        n_warps = parts(n_elements, self.codec.partition)
        self._kernels.launch("gw_embedded_unpack", grid(_WARP * n_warps), THREADS, 0, parameters)
