"""Embedded floats: any first bits decode, any further bits refine (docs/format.md#embedded-float)."""

from typing import Any

import torch
from torch import Tensor

from gradwire import _native
from gradwire.checks import choice as check_choice
from gradwire.checks import count as check_count
from gradwire.codecs.floats import Floats
from gradwire.codecs.tensors import PARTITIONS, bytes_in, check_room, check_size, check_tensor, dtype_code
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.gpu.kernels import Kernels

N_BITS = 32
DEFAULT_PARTITION = 256
FORMATS = (1, 2)


class EmbeddedFloat(Floats):
    """Shared exponent a partition, sign and root of the magnitude in bit planes, the most significant first.

    With L bits of 2 to 31 known, a value x of a partition whose largest magnitude has the binary exponent e (it lies in
    [2^e, 2^(e+1))) decodes to within 2^(e + 2 - L): the midpoint of all roots with these bits, or 0 where the bits are
    all 0. e is at least -96. A value 4^k times smaller decodes to within 2^(e - k + 2 - L) (in `format` 1, as published,
    all are cut alike). After all 32 bits every value is bit-exact: what 31 bits of magnitude do not hold (values more
    than 2^13 below their partition's largest, in format 1 2^7, with low bits set; subnormals) follows raw in the last
    message. float16 and bfloat16 are converted to float32 first, which is exact, and rounded back to the nearest.

    Inf and NaN: all values of their partition decode as NaN until all 32 bits are known, when they are exact again.

    AQGB (Luo et al.), section 4.4, in the form that float32's exponent allows to refine.

    When not to use it: where values of one partition span many binades that all matter (use `truncated-float`), or where
    they are spread evenly up to the largest, as no gradient's are (then `format=1` is nearer).
    """

    name = "embedded-float"
    _kernels = "embedded"
    _decode_natively = staticmethod(_native.embedded_float_decode)

    def __init__(self, bits: int = 8, partition: int = DEFAULT_PARTITION, format: int = 2) -> None:
        """
        Args:
            bits: of every value, 2 to 32, that `encode` writes; `encode_planes` writes any.
            partition: values that share an exponent of one byte: a power of two from 32 to 1024.
            format: of the messages: 2, or 1 as published: magnitudes instead of their roots. `decode` reads both.
        """
        self.bits = check_count("bits", bits, 2, N_BITS)
        self.partition = check_choice("partition", partition, PARTITIONS)
        self.format = check_choice("format", format, FORMATS)

    def max_encoded_bytes(self, n_elements: int, dtype: torch.dtype) -> int:
        return self.max_plane_bytes(n_elements, dtype, 0, self.bits)

    def check_device(self, device: torch.device) -> Kernels:
        if self.bits == N_BITS:
            raise Unsupported(
                "kernels write embedded floats of 2 to 31 bits; bits=32 needs escapes: leave placement out"
            )
        return super().check_device(device)

    def _encode_natively(self, gradient: Tensor, out: Tensor, step: int) -> int:
        return self.encode_planes(gradient, 0, self.bits, out)

    def _format(self, dtype: torch.dtype) -> dict[str, int]:
        code = dtype_code(dtype)
        return {"kind": 1, "dtype": code, "n_bits": self.bits, "partition": self.partition, "version": self.format}

    def exchange_codec(self, dtype: torch.dtype, importance: _native.BucketImportance | None) -> _native.ExchangeCodec:
        """This codec as exchanges call it."""
        return _native.embedded_float_exchange_codec(dtype_code(dtype), self.partition, self.format, self.bits)

    def max_plane_bytes(self, n_elements: int, dtype: torch.dtype, first_bit: int, n_bits: int) -> int:
        """Bytes that no message with bits [first_bit, first_bit + n_bits) of `n_elements` values exceeds: exactly that many
        unless it ends with bit 31, when up to 6 bytes a value of escapes come on top: 5 % of a gradient's values, as a rule."""
        dtype_code(dtype)
        check_size(n_elements)
        return _native.embedded_float_max_bytes(n_elements, self.partition, first_bit, n_bits)

    def encode_planes(self, gradient: Tensor, first_bit: int, n_bits: int, out: Tensor) -> int:
        """Write bits [first_bit, first_bit + n_bits) of every value as one message into `out` (>=
        max_plane_bytes(...),) uint8. Bit 0 is the sign, bit 1 the most significant of the magnitude. The gradient must
        be the same at every call."""
        code, values = dtype_code(gradient.dtype), bytes_in("gradient", gradient)
        room = check_room(self.name, out, self.max_plane_bytes(gradient.numel(), gradient.dtype, first_bit, n_bits))
        return _native.embedded_float_encode(values, code, self.partition, self.format, first_bit, n_bits, room)

    def quantise(self, gradient: Tensor, n_bits: int, out: Tensor) -> None:
        """Put into `out`, which may be `gradient`, what each receiver of its first `n_bits` bits (1 to 32) has, bit for bit."""
        code, values = dtype_code(gradient.dtype), bytes_in("gradient", gradient)
        room = bytes_in("out", out, gradient.dtype)
        _native.embedded_float_quantise(values, code, self.partition, self.format, n_bits, room)

    def receive(self, n_elements: int, dtype: torch.dtype) -> "EmbeddedValues":
        """An empty receiver for the messages of one gradient."""
        return EmbeddedValues(n_elements, dtype, self.partition, self.format)


class EmbeddedValues:
    """A receiver's knowledge of one gradient: 4 bytes a value and one a partition, refined message by message.

    Attributes:
        n_bits: bits known of every value, 0 to 32.
    """

    def __init__(self, n_elements: int, dtype: torch.dtype, partition: int, format: int) -> None:
        check_size(n_elements)
        self.n_bits, self._dtype = 0, dtype
        self._codes = torch.empty(n_elements, dtype=torch.int32, device="cpu")
        self._exponents = torch.empty(-(-n_elements // partition), dtype=torch.uint8, device="cpu")
        self._settings = dtype_code(dtype), partition, format

    def reset(self) -> None:
        """Know nothing again: the next message begins with bit 0. Keeps the memory."""
        self.n_bits = 0

    def add_planes(self, message: Tensor) -> int:
        """Take in the message with the bits that follow; returns `n_bits` after it. Raises: as `decode`, also if it has
        other bits than the next ones; nothing has changed then."""
        encoded = bytes_in("message", message, torch.uint8)
        self.n_bits = _native.embedded_float_refine(encoded, self._codes, self._exponents, *self._settings, self.n_bits)
        return self.n_bits

    def write(self, out: Tensor) -> None:
        """Put the values as they are known into `out`, (n,) of the sender's dtype."""
        _native.embedded_float_write(*self._known(), bytes_in("out", out, self._dtype))

    def add_to(self, sums: Tensor) -> None:
        """sums += the values as they are known; (n,) float32, one rounding a value."""
        check_tensor("sums", sums, torch.float32)
        _native.embedded_float_add(*self._known(), sums.detach())

    def _known(self) -> tuple[Tensor, Tensor, int, int, int, int]:
        if self.n_bits == 0:
            raise InvalidArgument("no message has come yet: add_planes first")
        return self._codes, self._exponents, *self._settings, self.n_bits


def describe(message: Tensor) -> dict[str, Any]:
    """What a message's header says, as plain values. Raises: as `decode`, for the header only."""
    return _native.embedded_float_header(bytes_in("message", message, torch.uint8))
