"""Truncated floats: the first bits of every value (docs/format.md#truncated-float)."""

import hashlib
from typing import Any

import torch
from torch import Tensor

from gradwire import _native
from gradwire.checks import choice as check_choice
from gradwire.codecs.floats import Floats
from gradwire.codecs.tensors import PARTITIONS, bytes_in, check_64_bits, check_room, check_size, dtype_code
from gradwire.errors import InvalidArgument

_FORMATS = {"native": 0, "fp16": 1, "fp8-e4m3": 2, "fp8-e5m2": 3, "fp4-e2m1": 4, "fp6-e3m2": 5}
_FORMAT_WIDTHS = {"fp16": 16, "fp8-e4m3": 8, "fp8-e5m2": 8, "fp4-e2m1": 4, "fp6-e3m2": 6}
# The format that leaves the most mantissa bits among the first k: native float32 has k - 9, FP16 k - 6, E4M3 k - 5, E3M2
# k - 4. Each holds every number of the one before it, so that more bits are never worse; native does from 19 bits on.
_AUTO = (("fp4-e2m1", 4), ("fp6-e3m2", 6), ("fp8-e4m3", 8), ("fp16", 18))
_ROUNDINGS = {"truncate": 0, "nearest": 1, "stochastic": 2}


class TruncatedFloat(Floats):
    """TFP of AQGB (Luo et al.), section 4.4: the first `bits` bits of every value's word.

    Bits that are cut off decode as 0. "nearest" therefore writes the nearest number that the kept bits can tell, ties to
    even; "truncate" is the paper's: the word's first bits, towards zero. Where a format is kept whole the two are the
    same. A compact format is converted to first, to nearest, with a scale a partition: without, gradients of 1e-5 would
    underflow in FP8. Scales are powers of two (for FP4: bfloat16 numbers) that bring the partition's largest value just
    below the largest code, so that nothing saturates; they cost 2 bytes a partition. "stochastic" rounds the value
    itself, without a conversion before, up with probability (x - down) / (up - down): unbiased, with a carry out of the
    largest finite code held back.

    Error, with m mantissa bits among the first `bits` (native: bits - 9, float16 and FP16: bits - 6): at most 2^-(m + 1)
    of the value with "nearest", below 2^-m else, and, in compact formats, of the smallest normal
    number times the scale. Subnormal float32 values count as 0 in compact formats, and where native's exponent is cut.

    Inf and NaN: all values of their partition decode as NaN; where all bits of the native word are kept, every value is
    exact instead. Random numbers are Philox4x32-10's, a function of (seed, step, index) alone (native/random/counter.hpp).

    When not to use it: where more bits may follow later (`embedded-float`); "truncate" in training without error
    feedback at few bits, since it shrinks every value.
    """

    name = "truncated-float"
    _kernels = "truncated"
    _decode_natively = staticmethod(_native.truncated_float_decode)

    def __init__(
        self, bits: int = 8, format: str = "auto", rounding: str = "nearest", seed: int = 0, partition: int = 256
    ) -> None:
        """
        Args:
            bits: kept of every value: 2 to 32, at most the format's width.
            format: what is truncated: "native" (the value's own word), "fp16", "fp8-e4m3", "fp8-e5m2", "fp6-e3m2",
                "fp4-e2m1", or "auto": native where all its bits are kept or more than 18, else the smallest of FP4 E2M1,
                FP6 E3M2, FP8 E4M3 and FP16 that has as many bits. For 17 and 18 bits "auto" sends FP16's 16: native's
                first 18 hold less.
            rounding: "nearest", "truncate" (as published) or "stochastic".
            seed: of stochastic rounding, 0 to 2^64 - 1.
            partition: values that share a scale: a power of two from 32 to 1024.
        """
        check_choice("format", format, ("auto", *_FORMATS))
        widest = _FORMAT_WIDTHS.get(format, 32)
        if not 2 <= bits <= widest:
            raise InvalidArgument(f"bits is from 2 to {widest} with format {format!r}, not {bits}")
        check_choice("rounding", rounding, _ROUNDINGS)
        self.bits, self.format, self.rounding = bits, format, rounding
        self.native_rounding = _ROUNDINGS[rounding]
        self.seed = check_64_bits("seed", seed)
        self.partition = check_choice("partition", partition, PARTITIONS)

    def format_for(self, dtype: torch.dtype) -> str:
        """The format that values of `dtype` are written in: what "auto" comes to."""
        if self.format != "auto":
            return self.format
        if self.bits >= 8 * dtype.itemsize:
            return "native"
        return next((name for name, width in _AUTO if self.bits <= width), "native")

    def max_encoded_bytes(self, n_elements: int, dtype: torch.dtype) -> int:
        check_size(n_elements)
        return _native.truncated_float_max_bytes(n_elements, *self.native_settings(dtype))

    def _encode_natively(self, gradient: Tensor, out: Tensor, step: int) -> int:
        settings, values = self.native_settings(gradient.dtype), bytes_in("gradient", gradient)
        room = check_room(self.name, out, self.max_encoded_bytes(gradient.numel(), gradient.dtype))
        return _native.truncated_float_encode(
            values, *settings, self.native_rounding, self.seed, check_64_bits("step", step), room
        )

    def _format(self, dtype: torch.dtype) -> dict[str, int]:
        code, number_format, n_bits, partition = self.native_settings(dtype)
        return {"dtype": code, "format": number_format, "n_bits": n_bits, "partition": partition, "version": 1}

    def exchange_codec(
        self, dtype: torch.dtype, importance: _native.BucketImportance | None, first_step: int = 0
    ) -> _native.ExchangeCodec:
        """This codec as exchanges call it, whose n-th message draws by step `first_step` + n."""
        return _native.truncated_float_exchange_codec(
            *self.native_settings(dtype), self.native_rounding, self.seed, first_step
        )

    def native_settings(self, dtype: torch.dtype) -> tuple[int, int, int, int]:
        """Codes of dtype and format, bits, partition. Raises: InvalidArgument (more bits than the dtype has)."""
        code, format_name = dtype_code(dtype), self.format_for(dtype)
        if format_name == "native" and self.bits > 8 * dtype.itemsize:
            raise InvalidArgument(
                f"bits={self.bits}, but {dtype} has {8 * dtype.itemsize}: bits={8 * dtype.itemsize} keeps all of it"
            )
        return code, _FORMATS[format_name], min(self.bits, _FORMAT_WIDTHS.get(format_name, 32)), self.partition


def first_draw(*key: int) -> int:
    """The step that the first of the messages named by `key` (rank, step, bucket) draws by."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")


def draw_after(first: int, n_messages: int) -> int:
    """The step that a message draws by that comes so many messages after the first."""
    return (first + n_messages) & 0xFFFFFFFFFFFFFFFF


def describe(message: Tensor) -> dict[str, Any]:
    """What a message's header says, as plain values. Raises: as `decode`, for the header only."""
    return _native.truncated_float_header(bytes_in("message", message, torch.uint8))
