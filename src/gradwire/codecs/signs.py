"""Signs and their majority: a bit a value, in host memory or on a device."""

import torch
from torch import Tensor

from gradwire import _native
from gradwire.codecs.tensors import bytes_of, dtype_code
from gradwire.gpu.kernels import kernels_for
from gradwire.gpu.launching import THREADS, fill_struct, grid, parts


class Signs:
    """Packs signs, and writes what most ranks have; on a device it is enqueued on the current stream and waits for nothing.

    A message is a bit a value, 1 below zero. On a device a word comes before, which is not 0 if a value is not finite.
    `ties_are_positive`: +1 is written where as many ranks are below zero as not; else 0.
    """

    def __init__(self, ties_are_positive: bool) -> None:
        self._ties_are_positive = ties_are_positive

    @staticmethod
    def n_words(values: Tensor) -> int:
        return parts(values.numel(), 32) + Signs.n_leading(values)

    @staticmethod
    def n_leading(words: Tensor) -> int:
        """Words of a message that lie there before the signs."""
        return int(kernels_for(words.device) is not None)

    def pack(self, values: Tensor, words: Tensor) -> Tensor:
        """Write the signs of `values` (n,) into `words` (n_words(values),) int32. Returns: () bool, whether all are finite."""
        kernels = kernels_for(values.device)
        if kernels is None:
            code, bits = dtype_code(values.dtype), words.view(torch.uint32)
            return torch.tensor(_native.pack_signs(bytes_of(values), code, bits), dtype=torch.bool, device="cpu")
        words[:1].zero_()
        n, code = values.numel(), dtype_code(values.dtype)
        parameters = fill_struct("Signs", values=values, words=words, n=n, dtype=code)
        kernels.launch("gw_signs_pack", grid(n), THREADS, 0, parameters)
        return words[0] == 0

    def vote(self, words: Tensor, values: Tensor, loss_scale: float, not_finite: Tensor | None = None) -> None:
        """Write what most of `words` (n_ranks, n_words(values)) int32 say into `values`: +1, -1 or 0, times the loss
        scale. On a device all become NaN, and `not_finite` (1,) int32 becomes 1, if a message says that a value was not
        finite."""
        n_ranks, code = len(words), dtype_code(values.dtype)
        one = torch.tensor([loss_scale], dtype=values.dtype, device="cpu")
        unit = int.from_bytes(one.view(torch.uint8).numpy().tobytes(), "little")
        kernels, words = kernels_for(values.device), words.contiguous()
        if kernels is None:
            bits, ties = words.view(-1).view(torch.uint32), self._ties_are_positive
            _native.write_majority(bits, n_ranks, code, unit, ties, bytes_of(values))
            return
        parameters = fill_struct(
            "Signs", values=values, words=words, flags=not_finite, n=values.numel(), dtype=code, n_ranks=n_ranks, unit=unit,
            ties_are_positive=self._ties_are_positive,
        )  # fmt: skip
        kernels.launch("gw_signs_vote", grid(values.numel()), THREADS, 0, parameters)
