"""One-bit, two-bit and QSGD messages on a device: the bytes of the CPU's codecs, enqueued by nobody who waits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.codecs.one_bit import OneBit
from gradwire.codecs.qsgd import Qsgd
from gradwire.codecs.quantised import Quantised
from gradwire.codecs.tensors import check_step, dtype_code
from gradwire.codecs.two_bit import TwoBit
from gradwire.errors import CorruptMessage, GradwireError, IncompatibleVersion, InvalidArgument, Unsupported
from gradwire.gpu.kernels import Kernels
from gradwire.gpu.tensors import THREADS, address, check_on_device, check_work, grid, parts

HEADER_BYTES = 32
_CPU_BLOCK = 4096  # values that the CPU adds up together
PIECE_BYTES = 16_384
_SUMS_BYTES = 32
SHARED_OF_CHECKSUM = 4 * (256 + 8)
_SHARED_OF_CHOICE = _SUMS_BYTES * THREADS
_ERROR_OF_CODE = 7  # the error word is this less the first of what is wrong

_WRONG: dict[int, tuple[type[GradwireError], str]] = {
    1: (CorruptMessage, "it does not begin with GWQT: another kind of message, or bytes were lost"),
    2: (IncompatibleVersion, "it is of another format version: use the same gradwire release on every rank"),
    3: (CorruptMessage, "it has another number of values than expected"),
    4: (CorruptMessage, "the checksum does not match: bytes were changed on the way"),
    5: (CorruptMessage, "it is of another quantiser, or has flags or scales that no encoder writes"),
    6: (CorruptMessage, "it holds a code that no encoder writes"),
}


class Quantise(ctypes.Structure):
    """`Quantise` of source/quantised.hpp."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("values", "residual", "left_out", "message", "sums", "pieces", "n_bytes")
        ),
        *((name, ctypes.c_uint64) for name in ("n", "seed", "step")),
        *((name, ctypes.c_float) for name in ("residual_scale", "parameter")),
        *((name, ctypes.c_uint32) for name in ("kind", "dtype", "rule", "levels", "block", "pad")),
    ]


class Dequantise(ctypes.Structure):
    """`Dequantise` of source/quantised.hpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("message", "out", "pieces", "error")),
        *((name, ctypes.c_uint64) for name in ("n", "payload")),
        ("divisor", ctypes.c_float),
        *((name, ctypes.c_uint32) for name in ("kind", "dtype", "adds", "levels", "block")),
    ]


class DeviceQuantised:
    """A quantiser on a device: encode and decode enqueue kernels on the current stream and return.

    Messages are those of the CPU's codec, byte for byte, and have a fixed room: `message_bytes(n)`. One that is not finite
    is its header alone, and the rest of the room means nothing.

    Args:
        codec: OneBit, TwoBit or Qsgd.
        kernels: where they run.
    Raises: Unsupported (another codec; scales by group, which are `DeviceGrouped`'s).
    """

    _has_groups = False

    def __init__(self, codec: Quantised, kernels: Kernels) -> None:
        if not isinstance(codec, OneBit | TwoBit | Qsgd):
            raise Unsupported(f"{codec.name} has no kernels: one-bit, two-bit and qsgd have")
        if (codec.scale_values is not None) != self._has_groups:
            raise Unsupported(f"{type(self).__name__} has no kernels for scale_values={codec.scale_values}")
        self.codec = codec
        self._kernels = kernels

    def message_bytes(self, n_elements: int, cuts: Sequence[int] = ()) -> int:
        """The room of a message of `n_elements`, a multiple of 4. `cuts`: see `DeviceGrouped`; here always ()."""
        return self.codec.max_encoded_bytes(n_elements, torch.float32)

    def work_bytes(self, n_elements: int, cuts: Sequence[int] = ()) -> int:
        """Of the memory that `encode` and `decode` use on the side, at a multiple of 8 bytes."""
        return _SUMS_BYTES * self._n_sums(n_elements) + 4 * self._n_pieces(n_elements)

    def encode(
        self,
        values: Tensor,
        out: Tensor,
        n_bytes: Tensor,
        work: Tensor,
        *,
        residual: Tensor | None = None,
        new_residual: Tensor | None = None,
        residual_scale: float = 1.0,
        step: int = 0,
        cuts: Sequence[int] = (),
    ) -> None:
        """As `Quantised.encode_with_residual`, or without residuals as `encode`.

        Args:
            values: (n,) float32, bfloat16 or float16.
            out: (message_bytes(n),) uint8.
            n_bytes: (1,) int64: gets the length of the message, 32 if a value is not finite.
            work: at least (work_bytes(n),) uint8.
            residual, new_residual: (n,) float32 or None; they may be the same.
        All contiguous on the kernels' device. Raises: InvalidArgument, and what a launch raises.
        """
        n, codec = values.numel(), self.codec
        code = dtype_code(values.dtype)
        self._check("values", values, values.dtype, n)
        self._check("out", out, torch.uint8, self.message_bytes(n))
        self._check("n_bytes", n_bytes, torch.int64, 1)
        for name, tensor in (("residual", residual), ("new_residual", new_residual)):
            if tensor is not None:
                self._check(name, tensor, torch.float32, n)
        check_work(work, self.work_bytes(n), self._kernels.device)
        kind, rule, parameter, levels, block, seed = codec.native_options
        is_qsgd = isinstance(codec, Qsgd)
        block = block if is_qsgd else _CPU_BLOCK
        parameters = Quantise(
            values.data_ptr(),
            address(residual),
            address(new_residual),
            out.data_ptr(),
            work.data_ptr(),
            work.data_ptr() + _SUMS_BYTES * self._n_sums(n),
            n_bytes.data_ptr(),
            n,
            seed,
            check_step(step),
            residual_scale,
            parameter,
            kind,
            code,
            rule,
            levels,
            block,
        )
        launch = self._kernels.launch
        n_sums = self._n_sums(n) if n else 0
        launch("gw_quantised_measure", parts(8 * n_sums, THREADS), THREADS, 0, parameters)
        launch("gw_quantised_choose", 1, THREADS, _SHARED_OF_CHOICE, parameters)
        if is_qsgd:
            launch("gw_quantised_pack_levels", grid(8 * parts(n, 64)), THREADS, 0, parameters)
        else:
            launch("gw_quantised_pack", grid(n), THREADS, 0, parameters)
        launch("gw_quantised_pieces", self._n_pieces(n), THREADS, SHARED_OF_CHECKSUM, parameters)
        launch("gw_quantised_seal", 1, THREADS, SHARED_OF_CHECKSUM, parameters)

    def decode(
        self,
        message: Tensor,
        out: Tensor,
        error: Tensor,
        work: Tensor,
        *,
        divisor: float = 1.0,
        adds: bool = False,
        cuts: Sequence[int] = (),
    ) -> None:
        """Read a message that was written with the same options.

        Args:
            message: (message_bytes(n),) uint8.
            out: (n,) float32, bfloat16 or float16: gets the values / divisor; or, float32, has them added. NaN where the
                message is not whole, and for codes that are none.
            error: (1,) int32: keeps the worst of what was wrong since it was 0; see `raise_error`. No message counts as whole
                beside one that was not.
            work: at least (work_bytes(n),) uint8.
        All contiguous on the kernels' device. Raises: InvalidArgument, and what a launch raises.
        """
        n = out.numel()
        code = dtype_code(out.dtype)
        if adds and out.dtype != torch.float32:
            raise InvalidArgument("kernels add to float32 only: pass a float32 tensor as out")
        self._check("message", message, torch.uint8, self.message_bytes(n))
        self._check("out", out, out.dtype, n)
        self._check("error", error, torch.int32, 1)
        check_work(work, self.work_bytes(n), self._kernels.device)
        kind, _, _, levels, block, _ = self.codec.native_options
        parameters = Dequantise(
            message.data_ptr(),
            out.data_ptr(),
            work.data_ptr(),
            error.data_ptr(),
            n,
            message.numel() - HEADER_BYTES,
            divisor,
            kind,
            code,
            adds,
            levels,
            block,
        )
        launch = self._kernels.launch
        launch("gw_quantised_read_pieces", self._n_pieces(n), THREADS, SHARED_OF_CHECKSUM, parameters)
        launch("gw_quantised_check", 1, THREADS, SHARED_OF_CHECKSUM, parameters)
        launch("gw_quantised_unpack", grid(n), THREADS, 0, parameters)

    def raise_error(self, code: int) -> None:
        """Raise what the error word says, if anything. Raises: CorruptMessage, IncompatibleVersion."""
        if code == 0:
            return
        error, text = _WRONG[_ERROR_OF_CODE - code]
        raise error(f"{self.codec.name} message on {self._kernels.device}: {text}")

    def _n_sums(self, n_elements: int) -> int:
        block = self.codec.block if isinstance(self.codec, Qsgd) else _CPU_BLOCK
        return max(1, parts(n_elements, block))

    def _n_pieces(self, n_elements: int) -> int:
        return parts(self.message_bytes(n_elements) - HEADER_BYTES, PIECE_BYTES)

    def _check(self, name: str, tensor: Tensor, dtype: torch.dtype, n: int) -> None:
        check_on_device(name, tensor, dtype, n, self._kernels.device, _ALIGNMENT[name])


_ALIGNMENT = {
    "out": 4,
    "message": 4,
    "n_bytes": 8,
    "error": 4,
    "values": 1,
    "residual": 4,
    "new_residual": 4,
}
