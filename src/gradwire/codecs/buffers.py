"""Checks that the float codecs make of the tensors they are given, and their bytes."""

from __future__ import annotations

import torch

from gradwire.errors import BufferTooSmall, InvalidArgument

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
WIDTHS = {torch.float32: 32, torch.bfloat16: 16, torch.float16: 16}


def dtype_code(dtype: torch.dtype) -> int:
    """The dtype as messages name it. Raises: InvalidArgument."""
    if dtype not in DTYPE_CODES:
        raise InvalidArgument(f"expected float32, bfloat16 or float16, got {dtype}: convert the tensor first")
    return DTYPE_CODES[dtype]


def require_buffer(what: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Raises: InvalidArgument unless `tensor` is (n,), contiguous, on the CPU and, where one is given, of `dtype`."""
    if dtype is not None and tensor.dtype != dtype:
        raise InvalidArgument(f"{what}: expected {dtype}, got {tensor.dtype}")
    if tensor.device.type != "cpu":
        raise InvalidArgument(f"{what}: expected a CPU tensor, got one on {tensor.device}: copy it first")
    if tensor.dim() != 1:
        raise InvalidArgument(f"{what}: expected one dimension, got shape {tuple(tensor.shape)}: flatten it")
    if not tensor.is_contiguous():
        raise InvalidArgument(f"{what}: it is not contiguous: call .contiguous()")


def require_room(out: torch.Tensor, n_bytes: int, n_elements: int) -> None:
    """Raises: InvalidArgument (no uint8 buffer), BufferTooSmall (fewer than `n_bytes`)."""
    require_buffer("out", out, torch.uint8)
    if out.numel() < n_bytes:
        raise BufferTooSmall(f"out has {out.numel()} bytes; a message of {n_elements} values may need {n_bytes}")


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory; a contiguous tensor of one value or none may have any stride, which a view refuses."""
    flat = tensor.detach()
    return (flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))).view(torch.uint8)
