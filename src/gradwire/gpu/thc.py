"""THC's shared norms and summed table values on a device: the bits of the codec `Thc`, enqueued by nobody who waits."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from gradwire.codecs.hadamard import Thc
from gradwire.codecs.tensors import check_step, dtype_code
from gradwire.gpu.kernels import Kernels
from gradwire.gpu.tensors import THREADS, address, check_on_device, parts

_SHARED_BYTES = 4 * (1024 + 32)


class _Rotated(ctypes.Structure):
    """`Rotated` of source/thc.hpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("values", "residual", "left_out", "norms", "codes")),
        *((name, ctypes.c_uint64) for name in ("n", "sign_seed", "sign_step", "seed", "step")),
        *((name, ctypes.c_float) for name in ("residual_scale", "clip")),
        *((name, ctypes.c_uint32) for name in ("dtype", "n_ranks", "are_wide", "pad")),
    ]


class DeviceThc:
    """Norms, codes and means on a device, for ranks that share norms; calls enqueue on the current stream and return.

    Args:
        codec: its clip and seed.
        n_ranks: whose codes are summed. Raises: Unsupported (too many).
    """

    def __init__(self, codec: Thc, kernels: Kernels, n_ranks: int) -> None:
        self.codec, self._kernels, self._n_ranks = codec, kernels, n_ranks
        self._code_dtype = torch.int16 if codec.sums_are_wide(n_ranks) else torch.uint8

    def code_bytes(self, n_elements: int) -> int:
        """Of a rank's codes, a multiple of 64."""
        return self.codec.n_codes(n_elements) * self._code_dtype.itemsize

    def summable(self, codes: Tensor) -> Tensor:
        """The codes in a dtype that backends sum: of 16 bits, two to a word, as none of the sums carries."""
        return codes.view(torch.int32) if self._code_dtype == torch.int16 else codes

    def write_norms(
        self, values: Tensor, norms: Tensor, residual: Tensor | None = None, residual_scale: float = 1.0
    ) -> None:
        """As `Thc.norms_of`.

        Args:
            values: (n,) float32, bfloat16 or float16.
            norms: (n_norms(n),) int32: float32 as bits, which are in the order of the numbers; infinity if not finite.
            residual: (n,) float32 or None.
        All contiguous on the kernels' device. Raises: InvalidArgument, and what a launch raises.
        """
        parameters = self._parameters(values, norms, None, residual, residual_scale=residual_scale)
        self._kernels.launch("gw_thc_norms", parts(8 * norms.numel(), THREADS), THREADS, 0, parameters)

    def write_codes(
        self,
        values: Tensor,
        norms: Tensor,
        codes: Tensor,
        *,
        sign_step: int,
        step: int,
        residual: Tensor | None = None,
        new_residual: Tensor | None = None,
        residual_scale: float = 1.0,
    ) -> None:
        """As `Thc.write_codes`. codes: (code_bytes(n),) uint8. residual, new_residual: (n,) float32; may be the same."""
        parameters = self._parameters(
            values, norms, codes, residual, new_residual, residual_scale, check_step(sign_step), check_step(step)
        )
        self._kernels.launch("gw_thc_write", norms.numel(), THREADS, _SHARED_BYTES, parameters)

    def read_sums(self, sums: Tensor, norms: Tensor, out: Tensor, *, sign_step: int) -> None:
        """As `Thc.read_sums`; NaN where a norm is not finite. sums: (code_bytes(n),) uint8. out: (n,)."""
        parameters = self._parameters(out, norms, sums, sign_step=check_step(sign_step))
        self._kernels.launch("gw_thc_read", norms.numel(), THREADS, _SHARED_BYTES, parameters)

    def _parameters(
        self,
        values: Tensor,
        norms: Tensor,
        codes: Tensor | None,
        residual: Tensor | None = None,
        new_residual: Tensor | None = None,
        residual_scale: float = 1.0,
        sign_step: int = 0,
        step: int = 0,
    ) -> _Rotated:
        n = values.numel()
        self._check("values", values, values.dtype, n, values.element_size())
        self._check("norms", norms, torch.int32, self.codec.n_norms(n), 4)
        for name, tensor in (("residual", residual), ("new_residual", new_residual)):
            if tensor is not None:
                self._check(name, tensor, torch.float32, n, 4)
        if codes is not None:
            self._check("codes", codes, torch.uint8, self.code_bytes(n), 4)
        return _Rotated(
            values=values.data_ptr(),
            residual=address(residual),
            left_out=address(new_residual),
            norms=norms.data_ptr(),
            codes=address(codes),
            n=n,
            sign_seed=self.codec.sign_seed,
            sign_step=sign_step,
            seed=self.codec.seed,
            step=step,
            residual_scale=residual_scale,
            clip=self.codec.clip,
            dtype=dtype_code(values.dtype),
            n_ranks=self._n_ranks,
            are_wide=self._code_dtype == torch.int16,
        )

    def _check(self, name: str, tensor: Tensor, dtype: torch.dtype, n: int, alignment: int) -> None:
        check_on_device(name, tensor, dtype, n, self._kernels.device, alignment)
