"""Signs and their majority on a device: the bits of the CPU's votes, enqueued by nobody who waits."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from gradwire.codecs.tensors import dtype_code
from gradwire.gpu.kernels import Kernels
from gradwire.gpu.tensors import THREADS, check_on_device, grid, parts


class _Signs(ctypes.Structure):
    """`Signs` of source/signs.hpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("values", "words", "flags")),
        ("n", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("dtype", "n_ranks", "unit", "ties_are_positive")),
    ]


class DeviceSigns:
    """Messages of a bit a value, and what most of them say; calls enqueue on the current stream and return.

    Args:
        ties_are_positive: what is written where as many ranks are below zero as not: +1, or else 0.
    """

    def __init__(self, kernels: Kernels, ties_are_positive: bool) -> None:
        self._kernels, self._ties_are_positive = kernels, ties_are_positive

    @staticmethod
    def n_words(n_elements: int) -> int:
        """Of one rank's message."""
        return 1 + parts(n_elements, 32)

    def pack(self, values: Tensor, words: Tensor) -> None:
        """The signs of values (n,) float32, bfloat16 or float16 into words (n_words(n),) int32, all of them written.

        The first word is 0, or 1 if a value is not finite. Raises: InvalidArgument, and what a launch raises.
        """
        self._check("words", words, torch.int32, self.n_words(values.numel()), 4)
        words[:1].zero_()
        self._launch("gw_signs_pack", values, words)

    def vote(self, words: Tensor, values: Tensor, unit: int, not_finite: Tensor) -> None:
        """Write into values (n,) what most of the messages say: +1, -1 or 0 times the loss scale; all NaN beside a bad one.

        Args:
            words: (n_ranks, n_words(n)) int32.
            unit: the loss scale in the dtype of `values`, as bits.
            not_finite: (1,) int32: 1 is added by "or" if a rank's values were not finite.
        Raises: InvalidArgument, and what a launch raises.
        """
        n_ranks = words.shape[0]
        self._check("words", words.view(-1), torch.int32, n_ranks * self.n_words(values.numel()), 4)
        self._check("not_finite", not_finite, torch.int32, 1, 4)
        self._launch("gw_signs_vote", values, words, not_finite, n_ranks, unit)

    def _launch(
        self, name: str, values: Tensor, words: Tensor, flags: Tensor | None = None, n_ranks: int = 1, unit: int = 0
    ) -> None:
        n = values.numel()
        self._check("values", values, values.dtype, n, values.element_size())
        parameters = _Signs(
            values=values.data_ptr(),
            words=words.data_ptr(),
            flags=None if flags is None else flags.data_ptr(),
            n=n,
            dtype=dtype_code(values.dtype),
            n_ranks=n_ranks,
            unit=unit,
            ties_are_positive=self._ties_are_positive,
        )
        self._kernels.launch(name, grid(n), THREADS, 0, parameters)

    def _check(self, name: str, tensor: Tensor, dtype: torch.dtype, n: int, alignment: int) -> None:
        check_on_device(name, tensor, dtype, n, self._kernels.device, alignment)
