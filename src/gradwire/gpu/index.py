"""The index of non-zeros on a device, and the values at its bits: the CPU codecs' bytes, enqueued by nobody who waits."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from gradwire.codecs.count_sketch import index_words
from gradwire.codecs.tensors import dtype_code
from gradwire.gpu.kernels import Kernels
from gradwire.gpu.tensors import THREADS, check_on_device, grid, parts

HEAD_WORDS = 12
FLAGS_AT = 2  # of the head
NOT_FINITE, PAST_THE_END = 1, 2
_BLOCK_VALUES = 1024  # that are counted together


class _Index(ctypes.Structure):
    """`Index` of source/index.hpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("values", "packed", "words", "head", "largest", "counts", "ends")),
        *((name, ctypes.c_uint64) for name in ("n", "n_blocks", "n_packed")),
        *((name, ctypes.c_uint32) for name in ("dtype", "facts")),
    ]


class DeviceIndex:
    """Indices of values on a device; calls enqueue on the current stream and return.

    An index is (HEAD_WORDS + ceil(n / 32),) int32: a head that may be ORed as the bits after it may (docs/format.md), and
    bit i % 32 of word i / 32 for value i.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    @staticmethod
    def message_words(n_elements: int) -> int:
        """Words of head and bits."""
        return HEAD_WORDS + index_words(n_elements)

    @staticmethod
    def n_blocks(n_elements: int) -> int:
        """Counts that `count` writes."""
        return parts(n_elements, _BLOCK_VALUES)

    def write(self, values: Tensor, message: Tensor, largest: Tensor, facts: int) -> None:
        """Where `values` are not zero (-0.0 is), whether all are finite, and the exponent of the largest.

        Args:
            values: (n,) float32, bfloat16 or float16.
            message: (message_words(n),) int32; overwritten.
            largest: (1,) int32 of work space.
            facts: 31 bits that ranks have to share.
        """
        self._check("largest", largest, torch.int32, 1)
        largest.zero_()
        parameters = self._parameters(values, message, largest=largest.data_ptr(), facts=facts)
        n_words = index_words(values.numel())
        self._kernels.launch("gw_index_write", grid(32 * n_words), THREADS, 0, parameters)
        self._kernels.launch("gw_index_head", 1, 32, 0, parameters)

    def count(self, message: Tensor, n_elements: int, counts: Tensor, ends: Tensor) -> None:
        """How many bits are set in each block of 1,024, and up to its end; bits past the end are told in the head.

        Args: counts, ends: (n_blocks(n_elements),) int32 each; overwritten.
        """
        n_blocks = self.n_blocks(n_elements)
        for name, tensor in (("counts", counts), ("ends", ends)):
            self._check(name, tensor, torch.int32, n_blocks)
        parameters = self._parameters(None, message, n_elements, counts=counts.data_ptr())
        self._kernels.launch("gw_index_count", grid(32 * n_blocks), THREADS, 0, parameters)
        torch.cumsum(counts, 0, dtype=torch.int32, out=ends)

    def pack(self, values: Tensor, message: Tensor, ends: Tensor, packed: Tensor) -> None:
        """The values at the set bits, in order. packed: (count,) of the dtype of `values`; overwritten."""
        self._copy("gw_index_pack", values, message, ends, packed)

    def unpack(self, packed: Tensor, message: Tensor, ends: Tensor, values: Tensor) -> None:
        """The inverse: every one of `values` is written, those without a bit as 0."""
        self._copy("gw_index_unpack", values, message, ends, packed)

    def _copy(self, kernel: str, values: Tensor, message: Tensor, ends: Tensor, packed: Tensor) -> None:
        n_blocks = self.n_blocks(values.numel())
        self._check("ends", ends, torch.int32, n_blocks)
        self._check("packed", packed, values.dtype, packed.numel())
        parameters = self._parameters(
            values, message, ends=ends.data_ptr(), packed=packed.data_ptr(), n_packed=packed.numel()
        )
        self._kernels.launch(kernel, grid(32 * n_blocks), THREADS, 0, parameters)

    def _parameters(
        self, values: Tensor | None, message: Tensor, n_elements: int | None = None, **others: int
    ) -> _Index:
        n = n_elements if values is None else values.numel()
        assert n is not None
        self._check("message", message, torch.int32, self.message_words(n))
        if values is not None:
            self._check("values", values, values.dtype, n)
        head = message.data_ptr()
        return _Index(
            values=None if values is None else values.data_ptr(),
            head=head,
            words=head + 4 * HEAD_WORDS,
            n=n,
            n_blocks=self.n_blocks(n),
            dtype=0 if values is None else dtype_code(values.dtype),
            **others,
        )

    def _check(self, name: str, tensor: Tensor, dtype: torch.dtype, n: int) -> None:
        check_on_device(name, tensor, dtype, n, self._kernels.device, dtype.itemsize)
