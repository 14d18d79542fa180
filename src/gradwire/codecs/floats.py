"""The base of the codecs of truncated and embedded floats: messages made and read by native calls or kernels."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.tensors import bytes_in, bytes_of, check_64_bits, check_tensor, dtype_code
from gradwire.errors import InvalidArgument
from gradwire.gpu.kernels import Kernels, kernels_for, kernels_on, table_of, upload, zeros_between_launches
from gradwire.gpu.launching import SHARED_OF_CHECKSUM, THREADS, fill_struct, parts

_CHUNK_VALUES = 16_384
_SHARED = SHARED_OF_CHECKSUM + 8


class Messages(NamedTuple):
    """Several messages that one launch makes or reads: each from values, and in a room, of its own."""

    table: Tensor | None  # (n, 5) int64 on the device: `Row` of gpu/source/floats.hpp; None: one message of all values
    n: int  # how many there are
    n_most: int  # values of the longest message
    n_scales: int  # of all of them


class Floats(ABC):
    """A codec that keeps the first bits of every value; values of a `partition` share a scale or an exponent.

    A message on a device takes `max_encoded_bytes`; one of finite values may end before that, and the rest means nothing.
    """

    name: str
    _kernels: str  # gw_*_pack and gw_*_unpack
    _decode_natively: Callable[[Tensor, int, Tensor], None]  # (message, dtype, values), bytes in host memory
    feeds_back = True
    seed = 0
    partition: int
    native_rounding = 0

    def check_device(self, device: torch.device) -> Kernels:
        return kernels_on(device)

    @abstractmethod
    def _encode_natively(self, gradient: Tensor, out: Tensor, step: int) -> int:
        """As `encode`, of tensors in host memory."""

    @abstractmethod
    def _format(self, dtype: torch.dtype) -> dict[str, int]:
        """`Format` of gpu/source/floats.hpp, but for the number of values."""

    def encode(self, gradient: Tensor, out: Tensor, importance: Tensor | None = None, *, step: int = 0) -> int | Tensor:
        if kernels_for(gradient.device) is None:
            return self._encode_natively(gradient, out, step)
        return self.encode_messages(gradient, out, self._one_message(gradient.numel()), step=step)

    def _one_message(self, n: int) -> Messages:
        return Messages(None, 1, n, parts(n, self.partition))

    def lay_out(self, messages: Sequence[tuple[int, int, int, int]], device: torch.device) -> Messages:
        """Messages by their first value, their place among the bytes, their values, and what is added to the step by which the
        first one draws; on the current stream."""
        rows, scale = [], 0
        for first, at, n, number in messages:
            rows.append((first, at, n, number, scale))
            scale += parts(n, self.partition)
        return Messages(upload(table_of(*rows), device), len(rows), max(n for _, _, n, _ in messages), scale)

    def encode_messages(self, values: Tensor, room: Tensor, messages: Messages, *, step: int = 0) -> Tensor:
        """As `encode`, of several messages in as many launches as one: their values are of `values`, their bytes of `room`."""
        table, n_rows, n, n_scales = messages
        launch, device = self.check_device(values.device).launch, values.device
        n_bytes = torch.empty(n_rows, dtype=torch.int64, device=device)
        scales = torch.empty(n_scales, dtype=torch.int32, device=device)
        turns, per_row = zeros_between_launches(device, 2 * n_rows), max(1, parts(n, _CHUNK_VALUES))
        parameters = fill_struct(
            "FloatEncode", values=values, message=room, scales=scales, turns=turns, n_bytes=n_bytes,
            seed=self.seed, step=check_64_bits("step", step), n=n, rounding=self.native_rounding,
            per_row=per_row, rows=table, **self._format(values.dtype),
        )  # fmt: skip
        launch(f"gw_{self._kernels}_pack", n_rows * per_row, THREADS, _SHARED, parameters)
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
        """As `DeviceCodec.decode`, with a divisor or adding. Of embedded floats a message begins with bit 0."""
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
        messages = self._one_message(out.numel())
        self.decode_messages(message, out, messages, divisor=divisor, adds=adds, error=error)

    def decode_messages(
        self,
        room: Tensor,
        out: Tensor,
        messages: Messages,
        *,
        n_sources: int = 1,
        source_bytes: int = 0,
        divisor: float = 1.0,
        adds: bool = False,
        error: Tensor | None,
    ) -> None:
        """As `decode`, of several messages in as many launches as one. With `adds`, `n_sources` have sent messages of the same
        values, in rooms `source_bytes` apart: they are added in their order."""
        table, n_rows, n, _ = messages
        launch, per_row = self.check_device(out.device).launch, parts(n, _CHUNK_VALUES)
        error = torch.zeros(1, dtype=torch.int32, device=out.device) if error is None else error
        turns = zeros_between_launches(out.device, 2)
        parameters = fill_struct(
            "FloatDecode", message=room, error=error, turns=turns, per_row=per_row, n=n, out=out, divisor=divisor, adds=adds,
            rows=table, n_rows=n_rows, n_sources=n_sources,
            source_bytes=source_bytes, **self._format(out.dtype),
        )  # fmt: skip
        launch(f"gw_{self._kernels}_unpack", n_rows * (n_sources + per_row), THREADS, _SHARED, parameters)
