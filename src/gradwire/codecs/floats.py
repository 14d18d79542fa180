"""The base of the codecs of truncated and embedded floats: messages made and read by native calls or kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from gradwire.codecs.tensors import bytes_in, bytes_of, check_step, check_tensor, dtype_code
from gradwire.errors import InvalidArgument
from gradwire.gpu.kernels import Kernels, kernels_for, kernels_on
from gradwire.gpu.launching import SHARED_OF_CHECKSUM, THREADS, parts
from gradwire.gpu.structs import fill_struct

_CHUNK_VALUES = 16_384
_SHARED_OF_SEAL = SHARED_OF_CHECKSUM + 4


class Floats(ABC):
    """A codec that keeps the first bits of every value; values of a `partition` share a scale or an exponent.

    `encode` and `decode` take tensors on a device too; see `DeviceCodec`. A message there takes `max_encoded_bytes`; one of
    finite values may end before that, and the rest means nothing.
    """

    name: str
    feeds_back = True
    seed = 0
    partition: int
    native_rounding = 0

    def check_device(self, device: torch.device) -> Kernels:
        """See `DeviceCodec`."""
        return kernels_on(device)

    @abstractmethod
    def _encode_natively(self, gradient: Tensor, out: Tensor, step: int) -> int:
        """As `encode`, of tensors in host memory."""

    @staticmethod
    @abstractmethod
    def _decode_natively(message: Tensor, dtype: int, values: Tensor) -> None:
        """As `decode`, of bytes in host memory."""

    @abstractmethod
    def _format(self, dtype: torch.dtype) -> dict[str, int]:
        """`Format` of gpu/source/floats.hpp, but for the number of values. Raises: InvalidArgument."""

    @abstractmethod
    def _launches(self, n_elements: int) -> tuple[dict[str, int], dict[str, int]]:
        """Kernels, and blocks of threads of each, that write codes and scales, and that read them."""

    def encode(self, gradient: Tensor, out: Tensor, importance: Tensor | None = None, *, step: int = 0) -> int | Tensor:
        """As `DeviceCodec.encode`. Cost: one or two passes, no allocation below bit 31."""
        if kernels_for(gradient.device) is None:
            return self._encode_natively(gradient, out, step)
        n, device = gradient.numel(), gradient.device
        launch = self.check_device(device).launch
        n_chunks = parts(n, _CHUNK_VALUES)
        n_bytes = torch.empty(1, dtype=torch.int64, device=device)
        scales = torch.empty(parts(n, self.partition), dtype=torch.int32, device=device)
        flags = torch.empty(n_chunks, dtype=torch.int32, device=device)
        parameters = fill_struct(
            "FloatEncode", values=gradient, message=out, scales=scales, chunk_flags=flags, n_bytes=n_bytes,
            seed=self.seed, step=check_step(step), n=n, rounding=self.native_rounding, **self._format(gradient.dtype),
        )  # fmt: skip
        for kernel, n_blocks in self._launches(n)[0].items():
            launch(kernel, n_blocks, THREADS, 0, parameters)
        launch("gw_floats_seal_chunks", n_chunks, THREADS, _SHARED_OF_SEAL, parameters)
        launch("gw_floats_seal", 1, THREADS, _SHARED_OF_SEAL, parameters)
        return n_bytes

    def decode(
        self,
        message: Tensor,
        out: Tensor,
        importance: Tensor | None = None,
        *,
        divisor: float = 1.0,
        adds: bool = False,
        error: Tensor | None = None,
    ) -> None:
        """As `DeviceCodec.decode`, with a divisor or adding. Of embedded floats a message begins with bit 0.

        Cost: one pass, no allocation but with `adds`.
        """
        code = dtype_code(out.dtype)
        if adds and divisor != 1:
            raise InvalidArgument("values are added without a divisor")
        if kernels_for(out.device) is None:
            check_tensor("out", out)
            values = torch.empty_like(out) if adds else out
            self._decode_natively(bytes_in("message", message, torch.uint8), code, bytes_of(values))
            if adds:
                out += values
            elif divisor != 1:
                out /= divisor
            return
        n, launch = out.numel(), self.check_device(out.device).launch
        error = torch.zeros(1, dtype=torch.int32, device=out.device) if error is None else error
        parameters = fill_struct(
            "FloatDecode",
            message=message,
            error=error,
            n=n,
            out=out,
            divisor=divisor,
            adds=adds,
            **self._format(out.dtype),
        )
        launch("gw_floats_check", 1, THREADS, SHARED_OF_CHECKSUM, parameters)
        launch("gw_floats_read_chunks", parts(n, _CHUNK_VALUES), THREADS, SHARED_OF_CHECKSUM, parameters)
        for kernel, n_blocks in self._launches(n)[1].items():
            launch(kernel, n_blocks, THREADS, 0, parameters)
