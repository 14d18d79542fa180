"""The codec `ternary`: -1, 0 or 1 times a scale, by chance and right on average (TernGrad, Wen et al., NeurIPS 2017)."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire import _native
from gradwire.codecs.quantised import Quantised
from gradwire.codecs.tensors import bytes_of, check_positive, check_seed, check_step, dtype_code
from gradwire.errors import InvalidArgument, Unsupported

_MAX_RANKS = 127  # counts of 2 n_ranks have to fit a byte


class Ternary(Quantised):
    """Values are clipped at `clip` standard deviations; x becomes scale x sign(x) with probability |x| / scale, else 0.

    scale is the largest magnitude after clipping, so that without clipping the mean over many steps is the gradient.
    Deviations are taken from zero. Values below 2^-100 count as zero. 1/16 of float32.

    `scale_of`, `write_counts` and `read_counts` are for ranks that share a scale: their fields can be summed.

    Args:
        clip: in standard deviations; 2.5 in the paper. It bounds the variance, at the price of a bias in few values.
        seed: of the drawing.
    Raises: InvalidArgument.
    When not to use this: where two-bit with error feedback can be used, whose errors do not stay.
    """

    name = "ternary"
    feeds_back = False
    _kind = 2

    def __init__(self, clip: float = 2.5, seed: int = 0) -> None:
        self.clip = check_positive("clip", clip)
        self.seed = check_seed(seed)
        self._parameter = self.clip

    def scale_of(self, gradient: Tensor) -> float:
        """The scale that `gradient` (n,) would get by itself; infinity if a value is not finite."""
        return _native.ternary_scale(bytes_of(gradient), dtype_code(gradient.dtype), self.clip)

    @staticmethod
    def field_bits(n_ranks: int) -> int:
        """Bits a value that hold the sum over `n_ranks`: 4 up to 7 ranks, else 8. Raises: Unsupported."""
        if not 1 <= n_ranks <= _MAX_RANKS:
            raise Unsupported(f"ternary sums take 1 to {_MAX_RANKS} ranks, not {n_ranks}; use two-bit")
        return 4 if n_ranks <= 7 else 8

    @staticmethod
    def count_bytes(n_elements: int, n_ranks: int) -> int:
        """Bytes of the fields of `n_elements` values: whole groups of 64."""
        return -(-n_elements // 64) * 8 * Ternary.field_bits(n_ranks)

    def write_counts(self, gradient: Tensor, scale: float, n_ranks: int, out: Tensor, *, step: int = 0) -> None:
        """Draw by a shared `scale`, and write fields that can be summed over `n_ranks` as unsigned bytes.

        Args:
            gradient: (n,) float32, bfloat16 or float16, finite; beyond `scale` it counts as `scale`.
            out: (count_bytes(n, n_ranks),) uint8.
            step: as in `encode`; ranks need steps of their own.
        Raises: InvalidArgument, Unsupported.
        """
        if not 0 <= scale < float("inf"):
            raise InvalidArgument(f"scale must be finite and not negative, got {scale}")
        _native.write_ternary_counts(
            bytes_of(gradient),
            dtype_code(gradient.dtype),
            scale,
            self.seed,
            check_step(step),
            self.field_bits(n_ranks),
            out,
        )

    def read_counts(self, sums: Tensor, scale: float, n_ranks: int, out: Tensor) -> None:
        """Sums of `n_ranks` fields to the mean of what they stand for, into `out` (n,).

        Raises: InvalidArgument, Unsupported.
        """
        if sums.dtype != torch.uint8:
            raise InvalidArgument(f"sums are uint8, got {sums.dtype}")
        _native.read_ternary_counts(
            sums, self.field_bits(n_ranks), n_ranks, scale, dtype_code(out.dtype), bytes_of(out)
        )
