"""The values at the set bits of an index, one after the other: what ranks that hold the same index can sum as it is."""

from __future__ import annotations

import torch

from gradwire import _native

__all__ = ["count", "pack", "unpack"]


def count(index: torch.Tensor, n_elements: int) -> int:
    """How many bits are set.

    Args:
        index: (ceil(n_elements / 32),) int32; bit i % 32 of word i / 32 stands for value i.
    Raises: InvalidArgument (size), CorruptMessage (bits past the end).
    """
    return int(_native.sketch_count_index(index.view(torch.uint32), n_elements))


def pack(values: torch.Tensor, index: torch.Tensor, packed: torch.Tensor) -> None:
    """Write the values at the set bits, in order.

    Args:
        values: (n,) of 2 or 4 bytes each, contiguous, CPU.
        index: (ceil(n / 32),) int32.
        packed: (count(index, n),) of the dtype of `values`; overwritten.
    Raises: InvalidArgument (sizes), CorruptMessage (bits past the end).
    Cost: one pass; multi-threaded; releases the GIL. The same bytes on every machine.
    """
    size = values.element_size()
    _native.pack_values(values.view(torch.uint8), size, index.view(torch.uint32), packed.view(torch.uint8))


def unpack(packed: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    """The inverse of `pack`: every one of `values` is written, those without a bit as 0. Raises and costs: as `pack`."""
    size = values.element_size()
    _native.unpack_values(packed.view(torch.uint8), size, index.view(torch.uint32), values.view(torch.uint8))
