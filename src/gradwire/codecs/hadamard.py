"""The codec `thc`: values rotated by random signs and a Hadamard transform, then 16 levels (Li et al., NSDI 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire import _native
from gradwire.codecs.quantised import Quantised
from gradwire.codecs.tensors import bytes_of, check_positive, check_seed, check_step, check_tensor, dtype_code
from gradwire.errors import Unsupported

TRANSFORM_ELEMENTS = 1_024
_MAX_RANKS_IN_BYTES = 8  # sums of table values up to 30
_MAX_RANKS = 1_000  # two bytes, and the sign bit left alone


class Thc(Quantised):
    """Blocks of 1,024 values are multiplied by random signs and an orthonormal Hadamard matrix, which makes any values
    look Gaussian; rotated values are clamped at `clip` standard deviations, mapped to 0 ... 30 and rounded by chance to
    {0, 3, 5, 7, 9, 11, 13, 14, 16, 17, 19, 21, 23, 25, 27, 30}. 0.126 of float32.

    `norms_of`, `write_codes` and `read_sums` are for ranks that share norms: table values can be summed as integers.

    Fused form for error feedback: `encode_with_residual(gradient, residual, out, step)`. In a message, `step` gives both
    the signs and the rounding, and the signs' share of it travels along.

    Args:
        clip: in standard deviations of the rotated values; 2.15 clamps one in 32, as published.
        seed: of signs and rounding.
    Raises: InvalidArgument.

    Attributes:
        sign_seed: of the signs alone.

    When not to use this: for small gradients (blocks are padded), and where the codec's time counts: a transform each way.
    """

    name = "thc"
    _kind = 4

    def __init__(self, clip: float = 2.15, seed: int = 0) -> None:
        self.clip = self._parameter = check_positive("clip", clip)
        self.seed = check_seed(seed)
        self.sign_seed = self.seed ^ _native.THC_SIGN_SEED

    # ---- sums over ranks

    @staticmethod
    def n_norms(n_elements: int) -> int:
        """How many blocks `n_elements` make."""
        return -(-n_elements // TRANSFORM_ELEMENTS)

    @staticmethod
    def n_codes(n_elements: int) -> int:
        """Values after padding the last block to a power of two of at least 64."""
        return _native.thc_padded_elements(n_elements)

    @staticmethod
    def sums_are_wide(n_ranks: int) -> bool:
        """Whether a sum over `n_ranks` takes two bytes instead of one: more than 8 ranks. Raises: Unsupported."""
        if not 1 <= n_ranks <= _MAX_RANKS:
            raise Unsupported(f"thc's sums take 1 to {_MAX_RANKS} ranks, not {n_ranks}; use two-bit")
        return n_ranks > _MAX_RANKS_IN_BYTES

    def norms_of(
        self, gradient: Tensor, out: Tensor, residual: Tensor | None = None, residual_scale: float = 1.0
    ) -> None:
        """out (n_norms(n),) float32: the norm of each block of gradient + residual; infinity where not finite."""
        check_tensor("gradient", gradient)
        check_tensor("out", out, torch.float32, self.n_norms(gradient.numel()))
        _native.thc_write_norms(bytes_of(gradient), dtype_code(gradient.dtype), residual, residual_scale, out)

    def write_codes(
        self,
        gradient: Tensor,
        norms: Tensor,
        out: Tensor,
        *,
        sign_step: int,
        step: int,
        residual: Tensor | None = None,
        new_residual: Tensor | None = None,
        residual_scale: float = 1.0,
    ) -> None:
        """Table values of gradient + residual by `norms` that the ranks share, to be summed.

        Args:
            gradient: (n,) float32, bfloat16 or float16, finite.
            norms: (n_norms(n),) float32: the largest of any rank, for each block.
            out: (n_codes(n),) uint8.
            sign_step: what signs are drawn by: the same on all ranks.
            step: what rounding is drawn by: another on each rank.
            residual, new_residual, residual_scale: as in `encode_with_residual`.
        Raises: InvalidArgument.
        """
        check_tensor("gradient", gradient)
        check_tensor("out", out, torch.uint8)
        _native.thc_write_codes(
            bytes_of(gradient),
            dtype_code(gradient.dtype),
            residual,
            residual_scale,
            new_residual,
            norms,
            self.clip,
            self.sign_seed,
            check_step(sign_step),
            self.seed,
            check_step(step),
            out,
        )

    def read_sums(self, sums: Tensor, norms: Tensor, n_ranks: int, out: Tensor, *, sign_step: int) -> None:
        """Sums of `n_ranks` codes to the mean of what they stand for, into out (n,).

        Args:
            sums: (n_codes(n),) uint8, or int16 where `sums_are_wide`.
        Raises: InvalidArgument, Unsupported.
        """
        wide = self.sums_are_wide(n_ranks)
        check_tensor("sums", sums, torch.int16 if wide else torch.uint8)
        check_tensor("out", out)
        _native.thc_read_sums(
            bytes_of(sums),
            wide,
            n_ranks,
            norms,
            self.clip,
            self.sign_seed,
            check_step(sign_step),
            dtype_code(out.dtype),
            bytes_of(out),
        )
