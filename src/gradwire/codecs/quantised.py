"""What the quantisers' codecs share: native calls and kernels, with error feedback in the same sweep as encoding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from gradwire import _native
from gradwire.codecs.tensors import bytes_of, check_room, check_size, check_step, check_tensor, dtype_code
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.gpu.kernels import Kernels, has_kernels, kernels_on
from gradwire.gpu.launching import SHARED_OF_CHECKSUM, THREADS, Uploads, grid, parts
from gradwire.gpu.structs import fill_struct

# A rule of native/quantisers/codec.hpp: two scales for the same values.
TWO_SCALES = 2

# Of the kernels (gpu/source/quantised.hpp): values that are added up together where a codec has no blocks, bytes of such
# sums, bytes of a message that a block of threads takes the checksum of.
_CPU_BLOCK, _SUMS_BYTES, _PIECE_BYTES = 4096, 32, 16_384
_HEADER_BYTES = 32


class _Layout(NamedTuple):
    """Where everything of a message lies that is made on a device.

    Attributes:
        n_bytes: of the message.
        n_sums: blocks or groups of values that are added up together.
        n_words: of codes; 0 without scales by group.
        groups: (n_pieces + 1, 3) int64: of each tensor's piece its first value, group and word; last, where all end. None
            without scales by group.
    """

    n_bytes: int
    n_sums: int
    n_words: int = 0
    groups: Tensor | None = None

    @property
    def n_checksums(self) -> int:
        """Pieces of the payload."""
        return parts(self.n_bytes - _HEADER_BYTES, _PIECE_BYTES)


class Quantised:
    """A codec that keeps a few bits of every value (docs/format.md#quantised).

    Messages do not say the dtype of what was encoded: they decode to float32, rounded to the dtype of `out`. A gradient
    with Inf or NaN becomes a message that says so and decodes to NaN everywhere.

    `encode`, `encode_with_residual` and `decode` take tensors on a device too, all on one, where they enqueue kernels on
    the current stream and return; see `DeviceCodec`. A message there takes `message_room` bytes, of which one that is not
    finite uses the header alone.
    """

    name: str
    feeds_back = True
    _has_kernels: ClassVar[bool] = False
    _kind: ClassVar[int]
    _per_word: ClassVar[int] = 16  # codes in 32 bits
    # What the native encoder is told; see native/quantisers/codec.hpp.
    _rule = 1
    _parameter = 0.0
    _levels = 0
    _block = 0
    seed = 0
    # Values to a scale, where they are less than a message's; such a codec wants to know where tensors begin (`cuts`).
    scale_values: int | None = None

    def __init__(self) -> None:
        self._layouts: dict[tuple[int, tuple[int, ...]], _Layout] = {}
        self._uploads = Uploads()

    def check_device(self, device: torch.device) -> Kernels:
        """See `DeviceCodec`."""
        if not self._has_kernels:
            raise Unsupported(f"{self.name} has no kernels: one-bit, two-bit and qsgd have")
        return kernels_on(device)

    def max_encoded_bytes(self, n_elements: int, dtype: torch.dtype, n_cuts: int = 0) -> int:
        """Bytes of a message of `n_elements` finite values with up to `n_cuts` cuts; no message is longer.

        Raises: InvalidArgument (dtype, negative n_elements).
        """
        dtype_code(dtype)
        check_size(n_elements)
        return _native.quantiser_max_bytes(self._kind, self._levels, self._block, n_elements, n_cuts)

    def message_room(self, n_elements: int, cuts: Sequence[int] = ()) -> int:
        """Bytes of every finite message of `n_elements` values with just these cuts. Raises: InvalidArgument (cuts)."""
        return self._layout(n_elements, cuts).n_bytes

    def encode(
        self,
        gradient: Tensor,
        out: Tensor,
        importance: Tensor | None = None,
        *,
        step: int = 0,
        cuts: Sequence[int] = (),
    ) -> int | Tensor:
        """Write `gradient` as one message.

        Args:
            gradient: (n,) float32, bfloat16 or float16, contiguous; any n from 0.
            out: (>= max_encoded_bytes(n, dtype),) uint8, contiguous; on a device, (>= message_room(n, cuts),).
            importance: not used.
            step: what stochastic rounding draws by, beside the codec's seed: from 0 to 2^64 - 1. Messages whose errors
                have to be independent (of other steps, ranks, chunks) need steps of their own.
            cuts: where tensors begin in `gradient`, ascending, from 1 to n - 1; only for codecs with `scale_values`,
                none of whose scales then serves two tensors.
        Returns: bytes written; on a device (1,) int64 there.
        Raises: InvalidArgument (shape, dtype, device, step, cuts), BufferTooSmall.
        Cost: one or two passes, no allocation once warm, releases the GIL.
        """
        return self._encode(gradient, None, 1.0, None, out, step, cuts)

    def encode_with_residual(
        self,
        gradient: Tensor,
        residual: Tensor | None,
        out: Tensor,
        step: int = 0,
        *,
        new_residual: Tensor | None = None,
        residual_scale: float = 1.0,
        cuts: Sequence[int] = (),
    ) -> int | Tensor:
        """Error feedback in one sweep: encode gradient + residual, and keep what the message left out of it.

        Args:
            gradient: (n,) float32, bfloat16 or float16, contiguous; not changed.
            residual: (n,) float32, contiguous: what earlier messages left out, divided by `residual_scale`. None for
                nothing; then `new_residual` has to be given.
            out, step, cuts: as in `encode`.
            new_residual: (n,) float32: where the new residual goes; `residual` itself if not given. Given another
                tensor, `residual` is not changed, so that a step may still be thrown away.
            residual_scale: what the gradient is multiplied by and the residual is not (AMP's loss scale); positive.
        Returns: as `encode`. If a value is not finite, the message says only that, and the residual stays.
        Raises: InvalidArgument, BufferTooSmall.
        Cost: as `encode`; the sums, the decoded values and their difference stay in the first-level cache.
        """
        target = residual if new_residual is None else new_residual
        if target is None:
            raise InvalidArgument("without a residual, say where the new one goes: new_residual=tensor")
        if not (residual_scale > 0 and math.isfinite(residual_scale)):
            raise InvalidArgument(f"residual_scale must be positive and finite, got {residual_scale}")
        return self._encode(gradient, residual, residual_scale, target, out, step, cuts)

    def decode(
        self,
        message: Tensor,
        out: Tensor,
        importance: Tensor | None = None,
        *,
        divisor: float = 1.0,
        adds: bool = False,
        cuts: Sequence[int] = (),
        error: Tensor | None = None,
    ) -> None:
        """Read exactly one message of this quantiser into `out`.

        In host memory it may be of any options. On a device it has this codec's and these cuts, and what is wrong with it
        gives NaN and an error word.

        Args:
            message: (n_bytes,) uint8, contiguous; on a device, (>= message_room(n, cuts),).
            out: (n,) float32, bfloat16 or float16, contiguous; n is the sender's. Undefined after an error.
            importance: not used.
            divisor: `out` gets the values / divisor.
            adds: `out`, float32, has the values / divisor added.
            cuts: where tensors begin in the values; looked at on a device only.
            error: (1,) int32 on the device; see `DeviceCodec`.
        Raises: InvalidArgument, CorruptMessage, IncompatibleVersion.
        Cost: one pass, no allocation but with `divisor` and `adds`, releases the GIL.
        """
        code = dtype_code(out.dtype)
        if adds and out.dtype != torch.float32:
            raise InvalidArgument("values are added to float32 only: pass a float32 tensor as out")
        n = out.numel()
        if not has_kernels(out.device):
            check_tensor("message", message, torch.uint8)
            check_tensor("out", out)
            if divisor == 1 and not adds:
                _native.quantiser_decode(bytes_of(message), self._kind, code, bytes_of(out))
                return
            values = torch.empty(n, dtype=torch.float32, device="cpu")
            _native.quantiser_decode(bytes_of(message), self._kind, 0, bytes_of(values))
            values /= divisor
            out.copy_(out + values if adds else values)
            return
        launch = self.check_device(out.device).launch
        kind, _, _, levels, block, _ = self.native_options
        layout = self._layout(n, cuts)
        error = torch.zeros(1, dtype=torch.int32, device=out.device) if error is None else error
        checksums = torch.empty(layout.n_checksums, dtype=torch.int32, device=out.device)
        parameters = fill_struct(
            "DequantiseGroups", message=message, out=out, pieces=checksums, error=error, n=n,
            payload=layout.n_bytes - _HEADER_BYTES, divisor=divisor, kind=kind, dtype=code, adds=adds,
            levels=levels, block=block, **self._grouping(layout, n, cuts, out.device),
        )  # fmt: skip
        launch("gw_quantised_read_pieces", layout.n_checksums, THREADS, SHARED_OF_CHECKSUM, parameters)
        if layout.groups is not None:
            launch("gw_grouped_check", 1, THREADS, SHARED_OF_CHECKSUM, parameters)
            launch("gw_grouped_unpack", grid(self._per_word * layout.n_words), THREADS, 0, parameters)
        else:
            launch("gw_quantised_check", 1, THREADS, SHARED_OF_CHECKSUM, parameters)
            launch("gw_quantised_unpack", grid(n), THREADS, 0, parameters)

    def exchange_codec(
        self, dtype: torch.dtype, importance: _native.BucketImportance | None, first_step: int = 0
    ) -> _native.ExchangeCodec:
        """This codec as exchanges call it, whose n-th message draws by step `first_step` + n. Raises: InvalidArgument."""
        return _native.quantiser_exchange_codec(self.native_options, check_step(first_step))

    @property
    def native_options(self) -> tuple[int, int, float, int, int, int]:
        """Kind, rule, parameter, levels, block, seed: see native/quantisers/codec.hpp."""
        return self._kind, self._rule, self._parameter, self._levels, self._block, self.seed

    def _encode(
        self,
        gradient: Tensor,
        residual: Tensor | None,
        residual_scale: float,
        new_residual: Tensor | None,
        out: Tensor,
        step: int,
        cuts: Sequence[int],
    ) -> int | Tensor:
        if not has_kernels(gradient.device):
            for name, tensor in (("residual", residual), ("new_residual", new_residual)):
                if tensor is not None:
                    check_tensor(name, tensor, torch.float32, gradient.numel())
            code = dtype_code(gradient.dtype)
            check_tensor("gradient", gradient)
            if cuts and self.scale_values is None:
                raise InvalidArgument(f"{self.name} has one scale a message here, which cuts mean nothing to")
            if any(not 0 < cut < gradient.numel() for cut in cuts):
                raise InvalidArgument(f"cuts lie from 1 to {gradient.numel() - 1}, got {list(cuts)[:8]}")
            if self.scale_values is None or not cuts:
                check_room(self.name, out, self.max_encoded_bytes(gradient.numel(), gradient.dtype))
            return _native.quantiser_encode(
                bytes_of(gradient),
                code,
                residual,
                residual_scale,
                new_residual,
                *self.native_options,
                check_step(step),
                bytes_of(out),
                cuts,
            )
        n, device = gradient.numel(), gradient.device
        launch = self.check_device(device).launch
        kind, rule, parameter, levels, block, seed = self.native_options
        layout = self._layout(n, cuts)
        n_bytes = torch.empty(1, dtype=torch.int64, device=device)
        sum_bytes = _SUMS_BYTES if layout.groups is None else 4
        sums = torch.empty(sum_bytes * layout.n_sums, dtype=torch.uint8, device=device)
        checksums = torch.empty(layout.n_checksums, dtype=torch.int32, device=device)
        parameters = fill_struct(
            "QuantiseGroups", values=gradient, residual=residual, left_out=new_residual, message=out, sums=sums,
            pieces=checksums, n_bytes=n_bytes, n=n, seed=seed, step=check_step(step), residual_scale=residual_scale,
            parameter=parameter, kind=kind, dtype=dtype_code(gradient.dtype), rule=rule, levels=levels,
            block=block or _CPU_BLOCK, largest=sums, **self._grouping(layout, n, cuts, device),
        )  # fmt: skip
        if layout.groups is not None:
            launch("gw_grouped_measure", parts(8 * layout.n_sums, THREADS), THREADS, 0, parameters)
            launch("gw_grouped_head", 1, THREADS, 4, parameters)
            launch("gw_grouped_pack", grid(self._per_word * layout.n_words), THREADS, 0, parameters)
        else:
            launch("gw_quantised_measure", parts(8 * layout.n_sums, THREADS), THREADS, 0, parameters)
            launch("gw_quantised_choose", 1, THREADS, _SUMS_BYTES * THREADS, parameters)
            if levels:
                launch("gw_quantised_pack_levels", grid(8 * parts(n, 64)), THREADS, 0, parameters)
            else:
                launch("gw_quantised_pack", grid(n), THREADS, 0, parameters)
        launch("gw_quantised_pieces", layout.n_checksums, THREADS, SHARED_OF_CHECKSUM, parameters)
        launch("gw_quantised_seal", 1, THREADS, SHARED_OF_CHECKSUM, parameters)
        return n_bytes

    @property
    def _per_group(self) -> int:
        """Scales of a group."""
        return 2 if self._rule == TWO_SCALES else 1

    def _grouping(self, layout: _Layout, n_elements: int, cuts: Sequence[int], device: torch.device) -> dict[str, Any]:
        """`Grouping` of gpu/source/grouped.hpp."""
        table = layout.groups
        if table is None:
            return {}
        return {
            "groups": self._uploads.get(device, (n_elements, tuple(cuts)), lambda: table),
            "n_pieces": len(table) - 1,
            "group_values": self.scale_values,
            "per_group": self._per_group,
        }

    def _layout(self, n_elements: int, cuts: Sequence[int]) -> _Layout:
        key = n_elements, tuple(cuts)
        if key not in self._layouts:
            self._layouts[key] = self._lay_out(*key)
        return self._layouts[key]

    def _lay_out(self, n_elements: int, cuts: tuple[int, ...]) -> _Layout:
        if self.scale_values is None:
            n_bytes = self.max_encoded_bytes(n_elements, torch.float32)
            return _Layout(n_bytes, parts(n_elements, self._block or _CPU_BLOCK))
        bounds = [0, *cuts, n_elements] if n_elements or cuts else [0]
        if any(start >= end for start, end in itertools.pairwise(bounds)):
            raise InvalidArgument(f"cuts ascend and lie from 1 to {n_elements - 1}, got {list(cuts)[:8]}")
        rows = [[0, 0, 0]]
        for start, end in itertools.pairwise(bounds):
            _, first_group, first_word = rows[-1]
            n = end - start
            rows.append([end, first_group + parts(n, self.scale_values), first_word + parts(n, self._per_word)])
        _, n_groups, n_words = rows[-1]
        scale_bytes = 4 * parts(2 * self._per_group * n_groups, 4)
        n_bytes = _HEADER_BYTES + 4 + 4 * len(cuts) + scale_bytes + 4 * n_words
        return _Layout(n_bytes, n_groups, n_words, torch.tensor(rows, dtype=torch.int64, device="cpu"))


def check_scale_values(scale_values: int | None) -> int | None:
    """Values to a scale: None, or a power of two from 64 to 4,096. Raises: InvalidArgument."""
    if scale_values is None:
        return None
    is_count = isinstance(scale_values, int) and not isinstance(scale_values, bool)
    if not is_count or not 64 <= scale_values <= 4096 or scale_values & (scale_values - 1):
        raise InvalidArgument(
            f"scale_values is 64, 128, ..., 4096, or None for one scale a message, not {scale_values!r}"
        )
    return scale_values


def describe(message: Tensor) -> dict[str, Any]:
    """What a quantiser's message says of itself, as plain values; the codes are checked against the checksum only.

    Keys: codec, format_version, n_elements, message_bytes, is_finite, levels, block, first_scale, second_scale.
    Raises: InvalidArgument, CorruptMessage, IncompatibleVersion.
    """
    check_tensor("message", message, torch.uint8)
    return _native.quantiser_describe(bytes_of(message))
