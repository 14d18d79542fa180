"""What device codecs ask of tensors, and how many threads they start."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.errors import InvalidArgument
from gradwire.gpu.launching import THREADS, grid, parts

__all__ = ["THREADS", "address", "check_on_device", "check_work", "grid", "parts"]


def check_on_device(
    name: str, tensor: Tensor, dtype: torch.dtype, n: int, device: torch.device, alignment: int
) -> None:
    """Raise InvalidArgument unless it is (n,) of `dtype`, contiguous, on `device`, at a multiple of `alignment` bytes."""
    if tensor.dtype != dtype or tensor.dim() != 1 or tensor.numel() != n or not tensor.is_contiguous():
        raise InvalidArgument(
            f"{name} must be ({n},) {dtype}, contiguous; it is {tuple(tensor.shape)} {tensor.dtype} with strides "
            f"{tensor.stride()}"
        )
    if tensor.device != device:
        raise InvalidArgument(f"{name} is on {tensor.device}, the kernels run on {device}")
    if n and tensor.data_ptr() % alignment:
        raise InvalidArgument(f"{name} begins at no multiple of {alignment} bytes")


def check_work(work: Tensor, n_bytes: int, device: torch.device) -> None:
    """Raise InvalidArgument unless it has room for `n_bytes`, at a multiple of 8 bytes."""
    check_on_device("work", work, torch.uint8, work.numel(), device, 8)
    if work.numel() < n_bytes:
        raise InvalidArgument(f"work has {work.numel()} bytes; {n_bytes} are needed")


def address(tensor: Tensor | None) -> int | None:
    """Where it lies; None for none."""
    return None if tensor is None else tensor.data_ptr()
