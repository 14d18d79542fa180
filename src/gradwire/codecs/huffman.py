"""The Huffman tables of exponents that GComp codes with (docs/format.md#huffman-table)."""

import torch

from gradwire import _native
from gradwire.codecs.tensors import dtype_code
from gradwire.errors import InvalidArgument
from gradwire.gpu.kernels import upload_once

LOOK_UP_BITS = 11  # of the longest code
_NO_PLACEHOLDER = 256


def exponent_bits_of(dtype: torch.dtype) -> int:
    """Width of the exponent field: 8 (float32, bfloat16) or 5 (float16)."""
    dtype_code(dtype)
    return 5 if dtype == torch.float16 else 8


class HuffmanTable:
    """A canonical Huffman code of exponents, at most 11 bits long, with an escape for those that have no code.

    Immutable. Equal histograms give equal tables, ids and bytes on every machine.

    Attributes:
        native: as native functions take it.
        id: 64-bit hash of `to_bytes()`: what messages carry.
        exponent_bits: 8 (float32, bfloat16) or 5 (float16).
        lengths: bits of the code of every exponent, the escape's last; 0: no code (an exponent is then escaped).
    """

    __slots__ = ("exponent_bits", "id", "lengths", "native")

    def __init__(self, native: _native.HuffmanTable) -> None:
        self.native, self.id, self.exponent_bits = native, native.id, native.exponent_bits
        self.lengths = tuple(native.lengths)

    @classmethod
    def from_histogram(cls, histogram: torch.Tensor) -> "HuffmanTable":
        """The best code for values with these exponents; the rarest exponents are escaped where that is shorter.

        Args:
            histogram: (256,) for float32 and bfloat16 or (32,) for float16, int64, on the CPU: how often each exponent field
                occurred; not all zero, sum below 2^52.
        """
        if histogram.dtype != torch.int64 or histogram.device.type != "cpu" or histogram.shape not in ((256,), (32,)):
            raise InvalidArgument(
                "expected a histogram of int64 on the CPU with shape (256,) or (32,), got "
                f"{histogram.dtype} on {histogram.device} with shape {tuple(histogram.shape)}"
            )
        return cls(_native.HuffmanTable.from_histogram(histogram.contiguous()))

    @classmethod
    def prior(cls, dtype: torch.dtype) -> "HuffmanTable":
        """The table to begin with, before any gradient was seen; built in, the same in every release of the format."""
        return cls(_native.HuffmanTable.prior(exponent_bits_of(dtype)))

    @classmethod
    def from_bytes(cls, data: bytes) -> "HuffmanTable":
        """Reads what `to_bytes` wrote. Raises: CorruptMessage, IncompatibleVersion."""
        return cls(_native.HuffmanTable.from_bytes(data))

    def to_bytes(self) -> bytes:
        """The code lengths with a header and a checksum: 141 bytes (8-bit exponents) or 29 (5-bit)."""
        return self.native.to_bytes()

    @property
    def placeholder(self) -> int:
        """The exponent that an escape's code decodes to in kernels: the lowest without a code, or a number that is none."""
        return self.lengths[:-1].index(0) if self.lengths[-1] else _NO_PLACEHOLDER

    def on_device(self, device: torch.device) -> torch.Tensor:
        """`Table` of gpu/source/gcomp.hpp, for the current stream; copied there at the first call, without a wait."""
        return upload_once(device, self._laid_out)

    def _laid_out(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.native.for_kernels()), dtype=torch.uint8)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HuffmanTable) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return self.id

    def __repr__(self) -> str:
        return f"HuffmanTable(id={self.id:#018x}, exponent_bits={self.exponent_bits})"
