"""Checks of the tensors and numbers that codecs are given, and the dtypes' numbers in the native core."""

import math

import torch
from torch import Tensor

from gradwire.errors import BufferTooSmall, InvalidArgument

PARTITIONS = tuple(32 << i for i in range(6))  # values that may share a scale
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def dtype_code(dtype: torch.dtype, what: str = "the gradient") -> int:
    """The native number of the dtype of `what`."""
    code = DTYPE_CODES.get(dtype)
    if code is None:
        raise InvalidArgument(f"codecs take float32, bfloat16 and float16, not {dtype}: convert {what}")
    return code


def check_positive(what: str, value: float) -> float:
    """`value` as a finite float above zero."""
    number = float(value)
    if not math.isfinite(number) or number <= 0 or number > 3e38:
        raise InvalidArgument(f"{what} must be a positive number, got {value!r}")
    return number


def check_64_bits(what: str, value: int) -> int:
    """`value` if it is an integer of 64 bits without a sign."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 64:
        raise InvalidArgument(f"{what} must be an integer from 0 to 2^64 - 1, got {value!r}")
    return value


def check_room(name: str, out: Tensor, n_bytes: int) -> Tensor:
    """The memory of `out`. Raises: InvalidArgument (no uint8 buffer), BufferTooSmall (fewer than `n_bytes`)."""
    check_tensor("out", out, torch.uint8)
    if out.numel() < n_bytes:
        raise BufferTooSmall(f"{name}: out has {out.numel()} bytes, the message may take {n_bytes}")
    return bytes_of(out)


def check_size(n_elements: int) -> None:
    if n_elements < 0:
        raise InvalidArgument(f"n_elements is not negative, got {n_elements}")


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's memory; a contiguous tensor of one value or none may have any stride, which a view refuses."""
    flat = tensor.detach()
    return (flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))).view(torch.uint8)


def bytes_in(what: str, tensor: Tensor, dtype: torch.dtype | None = None, n_elements: int | None = None) -> Tensor:
    """The memory of a tensor that was given from outside. Raises: as `check_tensor`."""
    check_tensor(what, tensor, dtype, n_elements)
    return bytes_of(tensor)


def check_tensor(what: str, tensor: Tensor, dtype: torch.dtype | None = None, n_elements: int | None = None) -> None:
    """Raise InvalidArgument unless it is one contiguous dimension on the CPU, of this dtype and length."""
    if dtype is not None and tensor.dtype != dtype:
        raise InvalidArgument(f"{what}: expected {dtype}, got {tensor.dtype}")
    if tensor.device.type != "cpu":
        raise InvalidArgument(f"{what}: expected a CPU tensor, got one on {tensor.device}: copy it first")
    if tensor.dim() != 1:
        raise InvalidArgument(f"{what}: expected one dimension, got shape {tuple(tensor.shape)}: flatten it")
    if not tensor.is_contiguous():
        raise InvalidArgument(f"{what}: it is not contiguous: call .contiguous()")
    if n_elements is not None and tensor.numel() != n_elements:
        raise InvalidArgument(f"{what}: has {tensor.numel()} values, the gradient {n_elements}")
