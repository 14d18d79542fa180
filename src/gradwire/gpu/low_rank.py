"""Factors on a device: what each rank computes for itself, with the CPU's bits."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from gradwire.codecs.tensors import dtype_code
from gradwire.errors import InvalidArgument
from gradwire.gpu.kernels import Kernels
from gradwire.gpu.tensors import THREADS, grid


class _Multiply(ctypes.Structure):
    """`MultiplyFactors` of source/low_rank.hpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("left", "right", "matrix")),
        *((name, ctypes.c_uint64) for name in ("n_rows", "n_columns")),
        *((name, ctypes.c_uint32) for name in ("rank", "dtype", "subtracts")),
    ]


class _Orthogonalise(ctypes.Structure):
    """`OrthogonaliseFactors` of source/low_rank.hpp."""

    _fields_ = [("factors", ctypes.c_void_p), ("n", ctypes.c_uint64), ("rank", ctypes.c_uint32)]


class DeviceFactors:
    """`HostFactors` on a device: what is enqueued on the current stream, but `checksum`, waits for nothing."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.device = kernels.device

    def multiply(self, left: Tensor, right: Tensor, out: Tensor, subtract: bool = False) -> None:
        """out (n, m) = left^T right, rounded to its dtype; or, float32, out -= that.

        Args:
            left, right: (rank, n), (rank, m) float32. All contiguous, on this device.
        Raises: InvalidArgument, and what a launch raises.
        """
        (rank, n_rows), n_columns = left.shape, right.shape[1]
        for name, tensor, shape in (
            ("left", left, (rank, n_rows)),
            ("right", right, (rank, n_columns)),
            ("out", out, (n_rows, n_columns)),
        ):
            self._check(name, tensor, shape, out.dtype if name == "out" and not subtract else torch.float32)
        addresses = left.data_ptr(), right.data_ptr(), out.data_ptr()
        parameters = _Multiply(*addresses, n_rows, n_columns, rank, dtype_code(out.dtype), subtract)
        self._kernels.launch("gw_multiply_factors", grid(out.numel()), THREADS, 0, parameters)

    def orthogonalise(self, factors: Tensor) -> None:
        """Make the rows of each of `factors` (k, rank, n) orthonormal, in place. Raises: InvalidArgument (rank > n)."""
        n_factors, rank, n = factors.shape
        if rank > n:
            raise InvalidArgument(f"factors are (k, rank, n) with rank at most n, got {tuple(factors.shape)}")
        self._check("factors", factors, (n_factors, rank, n), torch.float32)
        parameters = _Orthogonalise(factors.data_ptr(), n, rank)
        self._kernels.launch("gw_orthogonalise_factors", n_factors, THREADS, 4 * (2 + rank), parameters)

    def checksum(self, factors: Tensor, before: int = 0) -> int:
        """32 bits of `factors` and of `before`; waits for the current stream, to tell ranks that hold others."""
        words = factors.view(-1).view(torch.int32)
        return (31 * before + int(words.sum(dtype=torch.int64))) & 0xFFFFFFFF

    def _check(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous() or tensor.device != self.device:
            raise InvalidArgument(
                f"{name} must be {shape} {dtype}, contiguous, on {self.device}; it is {tuple(tensor.shape)} {tensor.dtype} "
                f"with strides {tensor.stride()} on {tensor.device}"
            )
