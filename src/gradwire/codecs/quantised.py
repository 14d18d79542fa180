"""What the quantisers' codecs share: checks, the native calls, error feedback in the same sweep as encoding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradwire import _native
from gradwire.codecs.tensors import bytes_of, check_room, check_size, check_step, check_tensor, dtype_code
from gradwire.errors import InvalidArgument

# A rule of native/quantisers/codec.hpp: two scales for the same values.
TWO_SCALES = 2


class Quantised:
    """A codec that keeps a few bits of every value (docs/format.md#quantised).

    Messages do not say the dtype of what was encoded: they decode to float32, rounded to the dtype of `out`. A gradient
    with Inf or NaN becomes a message that says so and decodes to NaN everywhere.
    """

    name: ClassVar[str]
    # Whether what a message leaves out has to be sent later for training to converge.
    _kind: ClassVar[int]
    # What the native encoder is told; see native/quantisers/codec.hpp.
    _rule = 1
    _parameter = 0.0
    _levels = 0
    _block = 0
    seed = 0
    # Values to a scale, where they are less than a message's; such a codec wants to know where tensors begin (`cuts`).
    scale_values: int | None = None

    def max_encoded_bytes(self, n_elements: int, dtype: torch.dtype, n_cuts: int = 0) -> int:
        """Bytes of a message of `n_elements` finite values with up to `n_cuts` cuts; no message is longer.

        Raises: InvalidArgument (dtype, negative n_elements).
        """
        dtype_code(dtype)
        check_size(n_elements)
        return _native.quantiser_max_bytes(self._kind, self._levels, self._block, n_elements, n_cuts)

    def encode(
        self,
        gradient: Tensor,
        out: Tensor,
        importance: Tensor | None = None,
        *,
        step: int = 0,
        cuts: Sequence[int] = (),
    ) -> int:
        """Write `gradient` as one message.

        Args:
            gradient: (n,) float32, bfloat16 or float16, contiguous, CPU; any n from 0.
            out: (>= max_encoded_bytes(n, dtype),) uint8, contiguous, CPU.
            importance: not used.
            step: what stochastic rounding draws by, beside the codec's seed: from 0 to 2^64 - 1. Messages whose errors
                have to be independent (of other steps, ranks, chunks) need steps of their own.
            cuts: where tensors begin in `gradient`, ascending, from 1 to n - 1; only for codecs with `scale_values`,
                none of whose scales then serves two tensors.
        Returns: bytes written.
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
    ) -> int:
        """Error feedback in one sweep: encode gradient + residual, and keep what the message left out of it.

        Args:
            gradient: (n,) float32, bfloat16 or float16, contiguous, CPU; not changed.
            residual: (n,) float32, contiguous, CPU: what earlier messages left out, divided by `residual_scale`. None
                for nothing; then `new_residual` has to be given.
            out, step, cuts: as in `encode`.
            new_residual: (n,) float32: where the new residual goes; `residual` itself if not given. Given another
                tensor, `residual` is not changed, so that a step may still be thrown away.
            residual_scale: what the gradient is multiplied by and the residual is not (AMP's loss scale); positive.
        Returns: bytes written. If a value is not finite, the message says only that, and the residual stays.
        Raises: InvalidArgument, BufferTooSmall.
        Cost: as `encode`; the sums, the decoded values and their difference stay in the first-level cache.
        """
        if residual is not None:
            check_tensor("residual", residual, torch.float32, gradient.numel())
        target = residual if new_residual is None else new_residual
        if target is None:
            raise InvalidArgument("without a residual, say where the new one goes: new_residual=tensor")
        check_tensor("new_residual", target, torch.float32, gradient.numel())
        if not (residual_scale > 0 and math.isfinite(residual_scale)):
            raise InvalidArgument(f"residual_scale must be positive and finite, got {residual_scale}")
        return self._encode(gradient, residual, residual_scale, target, out, step, cuts)

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Read exactly one message of this quantiser, whatever options it was written with, into `out`.

        Args:
            message: (n_bytes,) uint8, contiguous, CPU.
            out: (n,) float32, bfloat16 or float16, contiguous, CPU; n is the sender's. Undefined after an error.
        Raises: InvalidArgument, CorruptMessage, IncompatibleVersion.
        Cost: one pass, no allocation, releases the GIL.
        """
        check_tensor("message", message, torch.uint8)
        code = dtype_code(out.dtype)
        check_tensor("out", out)
        _native.quantiser_decode(bytes_of(message), self._kind, code, bytes_of(out))

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
    ) -> int:
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
