"""One-bit and two-bit messages with scales by group on a device: the bytes of the CPU's codecs, as in `quantised`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.one_bit import OneBit
from gradwire.codecs.quantised import TWO_SCALES, Quantised
from gradwire.codecs.tensors import check_step, dtype_code
from gradwire.errors import InvalidArgument
from gradwire.gpu.kernels import Kernels
from gradwire.gpu.quantised import (
    HEADER_BYTES,
    PIECE_BYTES,
    SHARED_OF_CHECKSUM,
    Dequantise,
    DeviceQuantised,
    Quantise,
)
from gradwire.gpu.tensors import THREADS, check_work, grid, parts


class _Grouping(ctypes.Structure):
    """`Grouping` of source/grouped.hpp."""

    _fields_ = [
        ("pieces", ctypes.c_void_p),
        ("n_pieces", ctypes.c_uint64),
        ("values", ctypes.c_uint32),
        ("per_group", ctypes.c_uint32),
    ]


class _QuantiseGroups(ctypes.Structure):
    """`QuantiseGroups` of source/grouped.hpp."""

    _fields_ = [("base", Quantise), ("by", _Grouping), ("largest", ctypes.c_void_p)]


class _DequantiseGroups(ctypes.Structure):
    """`DequantiseGroups` of source/grouped.hpp."""

    _fields_ = [("base", Dequantise), ("by", _Grouping)]


class _Layout(NamedTuple):
    """Where everything of a message lies.

    Attributes:
        on_device: (n_pieces + 1, 3) int64: of each tensor's piece its first value, group and word; last, where all end.
        on_host: what it is copied from, in pinned memory.
    """

    on_device: Tensor
    on_host: Tensor
    n_pieces: int
    n_groups: int
    n_words: int
    message_bytes: int


class DeviceGrouped(DeviceQuantised):
    """A quantiser with `scale_values` on a device; see `DeviceQuantised`.

    Every call takes `cuts`: where tensors begin among the values, ascending, from 1 to n - 1, as the CPU's codec takes them.
    What follows from n and cuts is copied to the device once.

    Args:
        codec: OneBit or TwoBit with `scale_values`.
    Raises: Unsupported (another codec, one scale a message).
    """

    _has_groups = True

    def __init__(self, codec: Quantised, kernels: Kernels) -> None:
        super().__init__(codec, kernels)
        self._layouts: dict[tuple[int, tuple[int, ...]], _Layout] = {}

    def message_bytes(self, n_elements: int, cuts: Sequence[int] = ()) -> int:
        """The room of a message, which is its length if it is finite. Raises: InvalidArgument (cuts)."""
        return self._layout(n_elements, cuts).message_bytes

    def work_bytes(self, n_elements: int, cuts: Sequence[int] = ()) -> int:
        layout = self._layout(n_elements, cuts)
        return 4 * (layout.n_groups + self._pieces_of(layout))

    def encode(
        self,
        values: Tensor,
        out: Tensor,
        n_bytes: Tensor,
        work: Tensor,
        *,
        residual: Tensor | None = None,
        new_residual: Tensor | None = None,
        residual_scale: float = 1.0,
        step: int = 0,
        cuts: Sequence[int] = (),
    ) -> None:
        """As `DeviceQuantised.encode`."""
        n = values.numel()
        layout = self._layout(n, cuts)
        self._check("values", values, values.dtype, n)
        self._check("out", out, torch.uint8, layout.message_bytes)
        self._check("n_bytes", n_bytes, torch.int64, 1)
        check_work(work, self.work_bytes(n, cuts), self._kernels.device)
        for name, tensor in (("residual", residual), ("new_residual", new_residual)):
            if tensor is not None:
                self._check(name, tensor, torch.float32, n)
        kind, rule, parameter, _, _, seed = self.codec.native_options
        base = Quantise(
            values=values.data_ptr(),
            residual=None if residual is None else residual.data_ptr(),
            left_out=None if new_residual is None else new_residual.data_ptr(),
            message=out.data_ptr(),
            pieces=work.data_ptr() + 4 * layout.n_groups,
            n_bytes=n_bytes.data_ptr(),
            n=n,
            seed=seed,
            step=check_step(step),
            residual_scale=residual_scale,
            parameter=parameter,
            kind=kind,
            dtype=dtype_code(values.dtype),
            rule=rule,
        )
        parameters = _QuantiseGroups(base, self._grouping(layout), work.data_ptr())
        launch, n_pieces = self._kernels.launch, self._pieces_of(layout)
        launch("gw_grouped_measure", parts(8 * layout.n_groups, THREADS), THREADS, 0, parameters)
        launch("gw_grouped_head", 1, THREADS, 4, parameters)
        launch("gw_grouped_pack", self._blocks_of(layout), THREADS, 0, parameters)
        launch("gw_quantised_pieces", n_pieces, THREADS, SHARED_OF_CHECKSUM, base)
        launch("gw_quantised_seal", 1, THREADS, SHARED_OF_CHECKSUM, base)

    def decode(
        self,
        message: Tensor,
        out: Tensor,
        error: Tensor,
        work: Tensor,
        *,
        divisor: float = 1.0,
        adds: bool = False,
        cuts: Sequence[int] = (),
    ) -> None:
        """As `DeviceQuantised.decode`, of a message that was written with the same cuts too."""
        n = out.numel()
        layout = self._layout(n, cuts)
        if adds and out.dtype != torch.float32:
            raise InvalidArgument("kernels add to float32 only: pass a float32 tensor as out")
        self._check("message", message, torch.uint8, layout.message_bytes)
        self._check("out", out, out.dtype, n)
        self._check("error", error, torch.int32, 1)
        check_work(work, self.work_bytes(n, cuts), self._kernels.device)
        base = Dequantise(
            message=message.data_ptr(),
            out=out.data_ptr(),
            pieces=work.data_ptr(),
            error=error.data_ptr(),
            n=n,
            payload=layout.message_bytes - HEADER_BYTES,
            divisor=divisor,
            kind=self.codec.native_options[0],
            dtype=dtype_code(out.dtype),
            adds=adds,
        )
        parameters = _DequantiseGroups(base, self._grouping(layout))
        launch = self._kernels.launch
        launch("gw_quantised_read_pieces", self._pieces_of(layout), THREADS, SHARED_OF_CHECKSUM, base)
        launch("gw_grouped_check", 1, THREADS, SHARED_OF_CHECKSUM, parameters)
        launch("gw_grouped_unpack", self._blocks_of(layout), THREADS, 0, parameters)

    @property
    def _per_group(self) -> int:
        return 2 if self.codec.native_options[1] == TWO_SCALES else 1

    @property
    def _per_word(self) -> int:
        return 32 if isinstance(self.codec, OneBit) else 16

    def _grouping(self, layout: _Layout) -> _Grouping:
        return _Grouping(layout.on_device.data_ptr(), layout.n_pieces, self.codec.scale_values, self._per_group)

    def _blocks_of(self, layout: _Layout) -> int:
        return grid(self._per_word * layout.n_words)

    def _pieces_of(self, layout: _Layout) -> int:
        """Of the payload, as its checksum is taken."""
        return parts(layout.message_bytes - HEADER_BYTES, PIECE_BYTES)

    def _layout(self, n_elements: int, cuts: Sequence[int]) -> _Layout:
        key = n_elements, tuple(cuts)
        if key not in self._layouts:
            self._layouts[key] = self._lay_out(*key)
        return self._layouts[key]

    def _lay_out(self, n_elements: int, cuts: tuple[int, ...]) -> _Layout:
        starts = (0, *cuts) if n_elements else cuts
        ends = (*cuts, n_elements) if n_elements else cuts
        if any(start >= end for start, end in zip(starts, ends, strict=True)) or (cuts and not n_elements):
            raise InvalidArgument(f"cuts ascend and lie from 1 to {n_elements - 1}, got {list(cuts)[:8]}")
        values = self.codec.scale_values
        assert values is not None
        rows, n_groups, n_words = [], 0, 0
        for start, end in zip(starts, ends, strict=True):
            rows.append([start, n_groups, n_words])
            n_groups += -(-(end - start) // values)
            n_words += -(-(end - start) // self._per_word)
        rows.append([n_elements, n_groups, n_words])
        scale_bytes = 4 * -(-2 * self._per_group * n_groups // 4)
        device = self._kernels.device
        on_host = torch.tensor(rows, dtype=torch.int64)
        on_host = on_host if device.type == "cpu" else on_host.pin_memory()
        return _Layout(
            on_host.to(device, non_blocking=True),
            on_host,
            len(starts),
            n_groups,
            n_words,
            HEADER_BYTES + 4 + 4 * len(cuts) + scale_bytes + 4 * n_words,
        )


def on_kernels(codec: Quantised, kernels: Kernels) -> DeviceQuantised:
    """The codec as these kernels have it. Raises: Unsupported (they have not)."""
    return (DeviceQuantised if codec.scale_values is None else DeviceGrouped)(codec, kernels)
