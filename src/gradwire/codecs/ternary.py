"""The codec `ternary`: -1, 0 or 1 times a scale, by chance and right on average (TernGrad, Wen et al., NeurIPS 2017)."""

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire import _native
from gradwire.codecs.quantised import Quantised
from gradwire.codecs.tensors import bytes_of, check_64_bits, check_positive, dtype_code
from gradwire.errors import Unsupported
from gradwire.gpu.kernels import kernels_for, table_of, upload_once
from gradwire.gpu.launching import THREADS, fill_struct, grid, parts

_MAX_RANKS = 127  # counts of 2 n_ranks have to fit a byte
_GROUP = 64
_BLOCK = 4096  # values that are added up together
_SUMS_BYTES = 32  # of a block


class Shares(NamedTuple):
    """The parts of n values that have a scale each."""

    n: int
    spans: Sequence[tuple[int, int]]  # their begins and ends; on a device of those that are not empty, ascending
    is_single: bool  # one scale serves all, and values are not divided by it before they are drawn
    n_blocks: int = 0  # of values that kernels add up together
    table: Tensor | None = None  # (n_spans, 3) int64 on the device: begin, end and first block; None in host memory


class Ternary(Quantised):
    """Values are clipped at `clip` standard deviations; x becomes scale x sign(x) with probability |x| / scale, else 0.

    scale is the largest magnitude after clipping, so that without clipping the mean over many steps is the gradient.
    Deviations are taken from zero. Values below 2^-100 count as zero. 1/16 of float32.

    `write_scales`, `write_counts` and `read_counts` are for ranks that share scales: their fields can be summed. On a device
    they are enqueued on the current stream and wait for nothing.

    Args:
        clip: in standard deviations; 2.5 in the paper. It bounds the variance, at the price of a bias in few values.
        seed: of the drawing.
    When not to use this: where two-bit with error feedback can be used, whose errors do not stay.
    """

    name = "ternary"
    feeds_back = False
    _kind = 2

    def __init__(self, clip: float = 2.5, seed: int = 0) -> None:
        self.clip = self._parameter = check_positive("clip", clip)
        self.seed = check_64_bits("seed", seed)

    @staticmethod
    def field_bits(n_ranks: int) -> int:
        """Bits a value that hold the sum over `n_ranks`: 4 up to 7 ranks, else 8. Raises: Unsupported."""
        if not 1 <= n_ranks <= _MAX_RANKS:
            raise Unsupported(f"ternary sums take 1 to {_MAX_RANKS} ranks, not {n_ranks}; use two-bit")
        return 4 if n_ranks <= 7 else 8

    @staticmethod
    def count_bytes(n_elements: int, n_ranks: int) -> int:
        """Bytes of the fields of `n_elements` values: whole groups of 64."""
        return parts(n_elements, _GROUP) * 8 * Ternary.field_bits(n_ranks)

    @staticmethod
    def share(n_elements: int, spans: Sequence[tuple[int, int]], device: torch.device) -> Shares:
        """Lay out n values, of which each of `spans` has a scale; on a device for launches on the current stream."""
        if kernels_for(device) is None:
            return Shares(n_elements, spans, len(spans) == 1)
        filled = [span for span in sorted(spans) if span[0] < span[1]]
        rows, n_blocks = [], 0
        for start, end in filled:
            rows.append((start, end, n_blocks))
            n_blocks += parts(end - start, _BLOCK)
        return Shares(n_elements, filled, len(spans) == 1, n_blocks, upload_once(device, table_of, *rows))

    def write_scales(self, values: Tensor, shares: Shares, scales: Tensor) -> None:
        """Write the scale that each span of `values` (n,) would get by itself to `scales` (n_spans,) float32; infinity if a
        value is not finite."""
        kernels = kernels_for(values.device)
        if kernels is None:
            code = dtype_code(values.dtype)
            found = [_native.ternary_scale(bytes_of(values[slice(*span)]), code, self.clip) for span in shares.spans]
            scales.copy_(torch.tensor(found, dtype=torch.float32, device="cpu"))
            return
        sums = torch.empty(_SUMS_BYTES * shares.n_blocks, dtype=torch.uint8, device=values.device)
        parameters = self._struct(values, shares, scales, sums=sums)
        kernels.launch("gw_ternary_measure", parts(8 * shares.n_blocks, THREADS), THREADS, 0, parameters)
        kernels.launch("gw_ternary_scales", len(shares.spans), THREADS, _SUMS_BYTES * THREADS, parameters)

    def write_counts(
        self, values: Tensor, shares: Shares, scales: Tensor, n_ranks: int, counts: Tensor, step: int
    ) -> None:
        """Draw by `scales`, the largest of any rank, and write fields that can be summed over `n_ranks` as unsigned bytes to
        `counts` (count_bytes(n, n_ranks),). Values beyond their scale count as the scale; ranks need steps of their own."""
        kernels = kernels_for(values.device)
        if kernels is not None:
            parameters = self._struct(values, shares, scales, n_ranks, counts=counts, step=step)
            kernels.launch("gw_ternary_count", grid(8 * parts(shares.n, _GROUP)), THREADS, 0, parameters)
            return
        if not shares.is_single:
            values = values.to(torch.float32, copy=True)
            for (start, end), scale in zip(shares.spans, scales.tolist(), strict=True):
                if scale:  # else all ranks have nothing but zeros
                    values[start:end].div_(scale)
        scale = float(scales) if shares.is_single else 1.0
        code, bits = dtype_code(values.dtype), self.field_bits(n_ranks)
        _native.write_ternary_counts(bytes_of(values), code, scale, self.seed, step, bits, counts)

    def read_counts(self, counts: Tensor, shares: Shares, scales: Tensor, n_ranks: int, out: Tensor) -> None:
        """Write the mean that sums of `n_ranks` fields stand for into the spans of `out` (n,); NaN for no finite scale."""
        kernels = kernels_for(out.device)
        if kernels is not None:
            parameters = self._struct(out, shares, scales, n_ranks, counts=counts)
            kernels.launch("gw_ternary_mean", grid(shares.n), THREADS, 0, parameters)
            return
        means = out if shares.is_single else torch.empty(shares.n, dtype=torch.float32, device="cpu")
        scale = float(scales) if shares.is_single else 1.0
        bits, code = self.field_bits(n_ranks), dtype_code(means.dtype)
        _native.read_ternary_counts(counts, bits, n_ranks, scale, code, bytes_of(means))
        for (start, end), scale in zip(shares.spans, scales.tolist(), strict=True):
            if not math.isfinite(scale):
                out[start:end] = math.nan
            elif not shares.is_single:
                torch.mul(means[start:end], scale, out=out[start:end])

    def _struct(
        self, values: Tensor, shares: Shares, scales: Tensor, n_ranks: int = 1, **others: Tensor | int
    ) -> ctypes.Structure:
        return fill_struct(
            "Ternary", values=values, scales=scales, spans=shares.table, n=shares.n, n_spans=len(shares.spans),
            n_blocks=shares.n_blocks, seed=self.seed, clip=self.clip, dtype=dtype_code(values.dtype), n_ranks=n_ranks,
            are_nibbles=self.field_bits(n_ranks) == 4, is_single=shares.is_single, **others,
        )  # fmt: skip
