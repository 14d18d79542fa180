"""The codec `thc`: values rotated by random signs and a Hadamard transform, then 16 levels (Li et al., NSDI 2024)."""

import ctypes
import math

import torch
from torch import Tensor

from gradwire import _native
from gradwire.codecs.quantised import Quantised
from gradwire.codecs.tensors import bytes_of, check_64_bits, check_positive, check_tensor, dtype_code
from gradwire.errors import Unsupported
from gradwire.gpu.kernels import kernels_for
from gradwire.gpu.launching import THREADS, fill_struct, parts

TRANSFORM_ELEMENTS = 1_024
_SHARED_BYTES = 4 * (TRANSFORM_ELEMENTS + 32)  # values and signs of a block
_MAX_RANKS_IN_BYTES = 8  # sums of table values up to 30
_MAX_RANKS = 1_000  # two bytes, and the sign bit left alone


class Thc(Quantised):
    """Blocks of 1,024 values are multiplied by random signs and an orthonormal Hadamard matrix, which makes any values
    look Gaussian; rotated values are clamped at `clip` standard deviations, mapped to 0 ... 30 and rounded by chance to
    {0, 3, 5, 7, 9, 11, 13, 14, 16, 17, 19, 21, 23, 25, 27, 30}. 0.126 of float32.

    `write_norms`, `write_codes` and `read_sums` are for ranks that share norms: table values can be summed as integers. On a
    device they are enqueued on the current stream and wait for nothing.

    In a message, `step` gives both the signs and the rounding, and the signs' share of it travels along.

    Args:
        clip: in standard deviations of the rotated values; 2.15 clamps one in 32, as published.
        seed: of signs and rounding.

    When not to use this: for small gradients (blocks are padded), and where the codec's time counts: a transform each way.
    """

    name = "thc"
    _kind = 4

    def __init__(self, clip: float = 2.15, seed: int = 0) -> None:
        self.clip = self._parameter = check_positive("clip", clip)
        self.seed = check_64_bits("seed", seed)
        self.sign_seed = self.seed ^ _native.THC_SIGN_SEED

    @staticmethod
    def n_norms(n_elements: int) -> int:
        """The number of blocks of `n_elements` values."""
        return parts(n_elements, TRANSFORM_ELEMENTS)

    @staticmethod
    def sums_are_wide(n_ranks: int) -> bool:
        """True if a sum over `n_ranks` takes two bytes instead of one: more than 8 ranks. Raises: Unsupported."""
        if not 1 <= n_ranks <= _MAX_RANKS:
            raise Unsupported(f"thc's sums take 1 to {_MAX_RANKS} ranks, not {n_ranks}; use two-bit")
        return n_ranks > _MAX_RANKS_IN_BYTES

    @staticmethod
    def code_bytes(n_elements: int, n_ranks: int) -> int:
        """Bytes of one rank's codes, which the sum over `n_ranks` takes too; the last block is padded to a power of two."""
        return _native.thc_padded_elements(n_elements) * (2 if Thc.sums_are_wide(n_ranks) else 1)

    @staticmethod
    def summable(codes: Tensor, n_ranks: int) -> Tensor:
        """`codes` in a dtype that backends sum: of two bytes, two to a word, as none of the sums carries."""
        return codes.view(torch.int32) if Thc.sums_are_wide(n_ranks) else codes

    def write_norms(
        self, values: Tensor, norms: Tensor, residual: Tensor | None = None, residual_scale: float = 1.0
    ) -> None:
        """Write the norm of each block of values + residual to `norms` (n_norms(n),) float32; infinity if it is not finite."""
        kernels = kernels_for(values.device)
        if kernels is not None:
            parameters = self._struct(values, norms, residual=residual, residual_scale=residual_scale)
            kernels.launch("gw_thc_norms", parts(8 * norms.numel(), THREADS), THREADS, 0, parameters)
            return
        check_tensor("norms", norms, torch.float32, self.n_norms(values.numel()))
        _native.thc_write_norms(bytes_of(values), dtype_code(values.dtype), residual, residual_scale, norms)

    def write_codes(
        self,
        values: Tensor,
        norms: Tensor,
        codes: Tensor,
        *,
        n_ranks: int,
        sign_step: int,
        step: int,
        residual: Tensor | None = None,
        new_residual: Tensor | None = None,
        residual_scale: float = 1.0,
    ) -> None:
        """Write table values of values + residual, to be summed over `n_ranks`, to `codes` (code_bytes(n, n_ranks),)
        uint8. `norms` (n_norms(n),) float32 are the largest of any rank. Signs are drawn by `sign_step`, the same on
        all ranks, rounding by `step`, another on each. Residuals: as in `Quantised.encode`."""
        kernels = kernels_for(values.device)
        if kernels is not None:
            parameters = self._struct(
                values, norms, n_ranks, codes=codes, sign_step=sign_step, step=step, residual=residual,
                left_out=new_residual, residual_scale=residual_scale,
            )  # fmt: skip
            kernels.launch("gw_thc_write", norms.numel(), THREADS, _SHARED_BYTES, parameters)
            return
        check_tensor("codes", codes, torch.uint8, self.code_bytes(values.numel(), n_ranks))
        is_wide = self.sums_are_wide(n_ranks)
        narrow = torch.empty(codes.numel() // 2, dtype=torch.uint8, device="cpu") if is_wide else codes
        summed = bytes_of(values), dtype_code(values.dtype), residual, residual_scale
        _native.thc_write_codes(
            *summed, new_residual, norms, self.clip, self.sign_seed, sign_step, self.seed, step, narrow
        )
        if is_wide:
            codes.view(torch.int16).copy_(narrow)

    def read_sums(self, sums: Tensor, norms: Tensor, n_ranks: int, out: Tensor, *, sign_step: int) -> None:
        """Write the mean that sums (code_bytes(n, n_ranks),) uint8 stand for into out (n,): NaN in blocks of no finite norm."""
        kernels = kernels_for(out.device)
        if kernels is not None:
            parameters = self._struct(out, norms, n_ranks, codes=sums, sign_step=sign_step)
            kernels.launch("gw_thc_read", norms.numel(), THREADS, _SHARED_BYTES, parameters)
            return
        rotation, code = (self.clip, self.sign_seed, sign_step), dtype_code(out.dtype)
        _native.thc_read_sums(sums, self.sums_are_wide(n_ranks), n_ranks, norms, *rotation, code, bytes_of(out))
        if not norms.numel() or math.isfinite(float(norms.max())):
            return
        for block in norms.isfinite().logical_not_().nonzero().view(-1).tolist():
            out[TRANSFORM_ELEMENTS * block :][:TRANSFORM_ELEMENTS] = math.nan

    def _struct(
        self, values: Tensor, norms: Tensor, n_ranks: int = 1, **others: Tensor | float | None
    ) -> ctypes.Structure:
        return fill_struct(
            "Rotated", values=values, norms=norms, n=values.numel(), sign_seed=self.sign_seed, seed=self.seed, clip=self.clip,
            dtype=dtype_code(values.dtype), n_ranks=n_ranks, are_wide=self.sums_are_wide(n_ranks), **others,
        )  # fmt: skip
