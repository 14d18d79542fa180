"""TernGrad's shared scales and summed fields on a device: the bits of the codec `Ternary`, enqueued by nobody who waits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.tensors import check_step, dtype_code
from gradwire.codecs.ternary import Ternary
from gradwire.gpu.kernels import Kernels
from gradwire.gpu.tensors import THREADS, check_on_device, grid, parts

_BLOCK = 4096  # values that the CPU adds up together
_GROUP = 64
_SUMS_BYTES = 32


class _Ternary(ctypes.Structure):
    """`Ternary` of source/ternary.hpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("values", "sums", "scales", "counts", "spans")),
        *((name, ctypes.c_uint64) for name in ("n", "n_spans", "n_blocks", "seed", "step")),
        ("clip", ctypes.c_float),
        *((name, ctypes.c_uint32) for name in ("dtype", "n_ranks", "are_nibbles", "is_single")),
    ]


class Shares(NamedTuple):
    """What shares scales among n values.

    Attributes:
        n_spans: that have values, and so a scale each.
        n_blocks: of values that are added up together.
        is_single: whether one scale serves all, as the CPU's codec then reckons otherwise.
        on_device: (n_spans, 3) int64: first and past-the-last value, and first block.
        on_host: what it is copied from, in pinned memory.
    """

    n: int
    n_spans: int
    n_blocks: int
    is_single: bool
    on_device: Tensor
    on_host: Tensor


class DeviceTernary:
    """Scales, fields and means on a device, for ranks that share scales; calls enqueue on the current stream and return.

    Args:
        codec: its clip and seed.
        n_ranks: whose fields are summed. Raises: Unsupported (too many).
    """

    def __init__(self, codec: Ternary, kernels: Kernels, n_ranks: int) -> None:
        self.codec, self._kernels, self._n_ranks = codec, kernels, n_ranks
        self._are_nibbles = codec.field_bits(n_ranks) == 4

    def share(self, n_elements: int, spans: Sequence[tuple[int, int]]) -> Shares:
        """Lay out n values of which each of `spans`, which do not overlap, has a scale; copied once, without waiting."""
        rows, n_blocks = [], 0
        for start, end in sorted(spans):
            if start < end:
                rows.append([start, end, n_blocks])
                n_blocks += -(-(end - start) // _BLOCK)
        on_host = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
        device = self._kernels.device
        on_host = on_host if device.type == "cpu" else on_host.pin_memory()
        on_device = on_host.to(device, non_blocking=True)
        return Shares(n_elements, len(rows), n_blocks, len(spans) == 1, on_device, on_host)

    def work_bytes(self, shares: Shares) -> int:
        """Of the memory that `write_scales` uses on the side, at a multiple of 8 bytes."""
        return _SUMS_BYTES * shares.n_blocks

    def count_bytes(self, n_elements: int) -> int:
        return self.codec.count_bytes(n_elements, self._n_ranks)

    def write_scales(self, values: Tensor, shares: Shares, work: Tensor, scales: Tensor) -> None:
        """As `Ternary.scale_of` for each span.

        Args:
            values: (n,) float32, bfloat16 or float16.
            work: at least (work_bytes(shares),) uint8.
            scales: (n_spans,) int32: float32 as bits, which are in the order of the numbers; infinity if not finite.
        """
        self._check("work", work, torch.uint8, self.work_bytes(shares), 8)
        parameters = self._parameters(values, shares, scales, None, sums=work.data_ptr())
        launch = self._kernels.launch
        launch("gw_ternary_measure", parts(8 * shares.n_blocks, THREADS), THREADS, 0, parameters)
        launch("gw_ternary_scales", shares.n_spans, THREADS, _SUMS_BYTES * THREADS, parameters)

    def write_counts(self, values: Tensor, shares: Shares, scales: Tensor, counts: Tensor, step: int) -> None:
        """As `Ternary.write_counts`, of values over their scales. counts: (count_bytes(n),) uint8."""
        parameters = self._parameters(values, shares, scales, counts, step=check_step(step))
        self._launch_over("gw_ternary_count", -(-shares.n // _GROUP) * 8, parameters)

    def read_counts(self, counts: Tensor, shares: Shares, scales: Tensor, out: Tensor) -> None:
        """As `Ternary.read_counts`, times the scales; NaN for a scale that is not finite. out: (n,)."""
        self._launch_over("gw_ternary_mean", shares.n, self._parameters(out, shares, scales, counts))

    def _launch_over(self, name: str, n_threads: int, parameters: _Ternary) -> None:
        self._kernels.launch(name, grid(n_threads), THREADS, 0, parameters)

    def _parameters(
        self, values: Tensor, shares: Shares, scales: Tensor, counts: Tensor | None, *, sums: int = 0, step: int = 0
    ) -> _Ternary:
        self._check("values", values, values.dtype, shares.n, 1)
        self._check("scales", scales, torch.int32, shares.n_spans, 4)
        if counts is not None:
            self._check("counts", counts, torch.uint8, self.count_bytes(shares.n), 1)
        return _Ternary(
            values=values.data_ptr(),
            sums=sums or None,
            scales=scales.data_ptr(),
            counts=None if counts is None else counts.data_ptr(),
            spans=shares.on_device.data_ptr(),
            n=shares.n,
            n_spans=shares.n_spans,
            n_blocks=shares.n_blocks,
            seed=self.codec.seed,
            step=step,
            clip=self.codec.clip,
            dtype=dtype_code(values.dtype),
            n_ranks=self._n_ranks,
            are_nibbles=self._are_nibbles,
            is_single=shares.is_single,
        )

    def _check(self, name: str, tensor: Tensor, dtype: torch.dtype, n: int, alignment: int) -> None:
        check_on_device(name, tensor, dtype, n, self._kernels.device, alignment)
