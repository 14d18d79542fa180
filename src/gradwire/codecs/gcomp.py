"""GComp's codec: Huffman-coded exponents, and of the mantissas what can matter (docs/format.md#gcomp).

How many bits of a mantissa travel is said by two bits a value in format 1; in format 2 the receiver derives it from the
exponent and the importance byte, which every rank can compute.
"""

import threading
from typing import Any

import torch
from torch import Tensor

from gradwire import _native
from gradwire.checks import choice as check_choice
from gradwire.checks import count as check_count
from gradwire.codecs.huffman import LOOK_UP_BITS, HuffmanTable, exponent_bits_of
from gradwire.codecs.tensors import bytes_in, check_room, check_size, check_tensor, dtype_code
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.gpu.kernels import Kernels, kernels_for, kernels_on
from gradwire.gpu.launching import SHARED_OF_CHECKSUM, THREADS, WARP, fill_struct, grid, parts

__all__ = ["GCompCodec", "HuffmanTable", "describe"]

_MANTISSA_BITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
_ROUNDINGS = ("nearest", "truncate")
# Of a header's byte 5 bits say how many mantissa bits are kept at most, and those above how many at least.
_KEPT_BITS, _MOST_LEAST_BITS = 5, 7
_MODE_CODES = {"none": 0, "paper": 1, "uniform": 2, "truncate": 3}
# The table in use, the next one (agreed, not switched to yet) and the one before (messages still under way), for each
# of two exponent widths; priors are always known besides.
_MAX_TABLES = 6
# Of the kernels (gpu/source/gcomp.hpp): values to a chunk, and the streams and lanes that each is coded in; bytes of memory
# that the threads of a block share, and of what is known of a chunk before it is written.
_CHUNK_VALUES, _STREAMS, _LANES = 16_384, 4, 16
_SHARED_OF_MEASURES = SHARED_OF_CHECKSUM + 4 * (_LANES + _STREAMS + 2)
_SHARED_OF_PLACES = 4 * (THREADS + 1)
_SHARED_OF_EXPONENTS = 4 * THREADS + _CHUNK_VALUES + SHARED_OF_CHECKSUM
_SHARED_OF_COUNTS = 4 * 256 * THREADS // WARP
_SHARED_OF_STREAMS = (2 << LOOK_UP_BITS) + 4 * 32 * WARP
_SHARED_OF_PACK = (3 * 4 + 1) * THREADS
_SHARED_OF_UNPACK = _CHUNK_VALUES + (2 * 4 + 1) * THREADS + 4 * (THREADS // _LANES + 1)
_LENGTHS_BYTES = 40

_PRIORS = {bits: HuffmanTable.prior(dtype) for bits, dtype in ((8, torch.float32), (5, torch.float16))}


class GCompCodec:
    """The codec of GComp (Li et al., SoCC 2024, sections 4 to 6).

    Lossless but for the mantissa bits that `importance` lets go of, for subnormals of float32 and bfloat16 (format 1:
    of float16, too) and for the sign of zero: these values become +0. Inf and NaN keep every bit. Thread-safe.

    When not to use it: where the network is faster than about 3 GB/s a core, or the values are not floats with
    clustered exponents.

    On a device `histogram` works too, messages are of format 2, and all calls are made on one stream.
    """

    name = "gcomp"
    feeds_back = True

    def __init__(
        self,
        importance: str = "paper",
        bits: int | None = None,
        table: HuffmanTable | None = None,
        rounding: str = "nearest",
        format: int = 2,
        least_bits: int = 0,
    ) -> None:
        """
        Args:
            importance: which mantissa bits travel. "paper": per value, by the importance bytes given to `encode`;
                "none": all; "uniform": the `bits` highest, rounded to nearest even; "truncate": all but the `bits`
                lowest, towards zero.
            bits: with "uniform" the mantissa bits to keep, with "truncate" those to drop (18 if not given); with
                "paper" (format 2) no value keeps more. 0 to 23 for float32, 7 for bfloat16, 10 for float16.
            table: Huffman table to encode with from the start; the built-in prior if not given.
            rounding: what "paper" does with the bits it lets go of: "nearest" (ties to even; about 25 times closer at
                the same bytes) or "truncate" (towards zero, as published).
            least_bits: with "paper" and format 2, the mantissa bits that every value keeps, 0 to 7, whatever its importance.
            format: of the messages: 2, or 1 as published: four levels, which travel (18 to 30 % longer). Both are read.
        """
        check_choice("importance", importance, _MODE_CODES)
        check_choice("format", format, (1, 2))
        if importance == "truncate" and bits is None:
            bits = 18
        if importance == "uniform" and bits is None:
            raise InvalidArgument(
                'importance="uniform" needs bits: how many mantissa bits to keep, for example bits=10'
            )
        if importance == "none" and bits is not None:
            raise InvalidArgument(f'bits={bits} means nothing with importance="none": use "uniform" or "truncate"')
        if importance == "paper" and bits is not None and format == 1:
            raise InvalidArgument(f"bits={bits} means nothing with the four levels of format 1: use format=2")
        if bits is not None and not 0 <= bits <= max(_MANTISSA_BITS.values()):
            raise InvalidArgument(f"bits is from 0 to 23 (float32's mantissa), not {bits}")
        check_choice("rounding", rounding, _ROUNDINGS)
        if least_bits and (importance != "paper" or format == 1):
            raise InvalidArgument(f'least_bits={least_bits} is for importance="paper" and format=2')
        self.least_bits = check_count("least_bits", least_bits, 0, _MOST_LEAST_BITS)
        self.importance, self.bits, self.rounding, self.format = importance, bits, rounding, format
        self._lock = threading.Lock()
        self._tables: dict[int, HuffmanTable] = {}  # by id, oldest first; replaced, never changed in place
        self._in_use = dict(_PRIORS)  # by exponent bits
        if table is not None:
            self.use_table(table)

    def check_device(self, device: torch.device) -> Kernels:
        if self.format != 2:
            raise Unsupported("kernels read and write GComp messages of format 2: leave format=1 out")
        return kernels_on(device)

    def max_encoded_bytes(self, n_elements: int, dtype: torch.dtype) -> int:
        """As `Codec.max_encoded_bytes`: about 1.1 of float32's size, 1.2 to 1.4 of the 16-bit types', and 300 bytes."""
        check_size(n_elements)
        return _native.gcomp_max_encoded_bytes(n_elements, dtype_code(dtype), _MODE_CODES[self.importance], self.format)

    def encode(self, gradient: Tensor, out: Tensor, importance: Tensor | None = None, *, step: int = 0) -> int | Tensor:
        """As `DeviceCodec.encode`; `importance`, with "paper", is the bytes of `gradwire.schemes.gcomp.importance`."""
        code, n, device = dtype_code(gradient.dtype), gradient.numel(), gradient.device
        importance = self._needed(importance)
        mode, kept_bits = _MODE_CODES[self.importance], self._kept_bits(gradient.dtype)
        if kernels_for(device) is None:
            values = bytes_in("gradient", gradient)
            weights = None if importance is None else bytes_in("importance", importance, torch.uint8, n)
            room = check_room(self.name, out, self.max_encoded_bytes(n, gradient.dtype))
            table, truncates = self.table_in_use(gradient.dtype).native, self.rounding == "truncate"
            return _native.gcomp_encode(
                values, weights, code, mode, kept_bits, truncates, self.format, table, room, self._least_bits()
            )
        launch, wide, n_chunks = self.check_device(device).launch, self.table_of_width(8), parts(n, _CHUNK_VALUES)
        n_bytes = torch.empty(1, dtype=torch.int64, device=device)
        exponents = torch.empty(n_chunks * _CHUNK_VALUES, dtype=torch.uint8, device=device)
        lengths = torch.empty(n_chunks * _LENGTHS_BYTES, dtype=torch.uint8, device=device)
        parameters = fill_struct(
            "GCompEncode", values=gradient, importance=importance, table=wide.on_device(device), message=out,
            n_bytes=n_bytes, exponents=exponents, chunks=lengths, n=n, table_id=wide.id, dtype=code, mode=mode,
            kept_bits=kept_bits | self._least_bits() << _KEPT_BITS,
            rounds=self.importance == "uniform" or (importance is not None and self.rounding == "nearest"),
        )  # fmt: skip
        launch("gw_gcomp_measure", n_chunks, THREADS, _SHARED_OF_MEASURES, parameters)
        launch("gw_gcomp_place", 1, THREADS, _SHARED_OF_PLACES, parameters)
        launch("gw_gcomp_pack", n_chunks, THREADS, _SHARED_OF_PACK, parameters)
        launch("gw_gcomp_exponents", n_chunks, THREADS, _SHARED_OF_EXPONENTS, parameters)
        launch("gw_gcomp_seal", 1, THREADS, SHARED_OF_CHECKSUM, parameters)
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
        """As `DeviceCodec.decode`, with a divisor or adding; on a device also of this codec's table alone.

        Args:
            importance: the bytes that the sender encoded by, for messages of format 2 with importance="paper".
        Raises: also CorruptMessage (an unknown table: see `add_table`), RankMismatch (other importance bytes).
        """
        code, n, device = dtype_code(out.dtype), out.numel(), out.device
        if adds and divisor != 1:
            raise InvalidArgument("values are added without a divisor")
        if divisor < 1:
            raise InvalidArgument(f"divisor is at least 1, got {divisor}")
        if kernels_for(device) is None:
            encoded, values = bytes_in("message", message, torch.uint8), bytes_in("out", out)
            weights = None if importance is None else bytes_in("importance", importance, torch.uint8, n)
            _native.gcomp_decode(encoded, code, self._known_tables(), weights, adds, float(divisor), values)
            return
        launch, table, n_chunks = self.check_device(device).launch, self.table_of_width(8), parts(n, _CHUNK_VALUES)
        error = torch.zeros(1, dtype=torch.int32, device=device) if error is None else error
        exponents = torch.empty(n_chunks * _CHUNK_VALUES, dtype=torch.uint8, device=device)
        is_bad = torch.empty(n_chunks * _STREAMS, dtype=torch.uint8, device=device)
        is_right = torch.empty(1, dtype=torch.int32, device=device)
        parameters = fill_struct(
            "GCompDecode", message=message, importance=self._needed(importance), table=table.on_device(device), out=out,
            exponents=exponents, stream_is_bad=is_bad, are_headers_right=is_right, error=error, n=n,
            n_bytes=message.numel(), table_id=table.id, divisor=divisor, dtype=code, mode=_MODE_CODES[self.importance],
            kept_bits=self._kept_bits(out.dtype) | self._least_bits() << _KEPT_BITS,
            adds=adds, placeholder=table.placeholder,
        )  # fmt: skip
        launch("gw_gcomp_check", 1, THREADS, SHARED_OF_CHECKSUM + 4, parameters)
        launch("gw_gcomp_checksums", n_chunks, THREADS, SHARED_OF_CHECKSUM, parameters)
        launch("gw_gcomp_streams", parts(_STREAMS * n_chunks, WARP), WARP, _SHARED_OF_STREAMS, parameters)
        launch("gw_gcomp_unpack", n_chunks, THREADS, _SHARED_OF_UNPACK, parameters)

    def exponent_bits(self, dtype: torch.dtype) -> int:
        """Width of the exponents that this codec's tables code: 8; in format 1, 5 for float16."""
        n_bits = exponent_bits_of(dtype)
        return n_bits if self.format == 1 else 8

    def add_table(self, table: HuffmanTable) -> None:
        """Make messages written with `table` readable; of more than six tables, the oldest that is not in use is dropped."""
        with self._lock:
            tables = {key: known for key, known in self._tables.items() if key != table.id}
            tables[table.id] = table
            in_use = {used.id for used in self._in_use.values()}
            droppable = [key for key in tables if key not in in_use and key != table.id]
            while len(tables) > _MAX_TABLES and droppable:
                del tables[droppable.pop(0)]
            self._tables = tables

    def use_table(self, table: HuffmanTable) -> None:
        """Encode with `table` from now on, for the dtypes that it fits; it becomes known as with `add_table`."""
        self.add_table(table)
        with self._lock:
            self._in_use = {**self._in_use, table.exponent_bits: table}

    def table_in_use(self, dtype: torch.dtype) -> HuffmanTable:
        """The table that gradients of `dtype` are encoded with."""
        return self._in_use[self.exponent_bits(dtype)]

    def table_of_width(self, exponent_bits: int) -> HuffmanTable:
        """The table in use for exponents of 8 or 5 bits."""
        return self._in_use[exponent_bits]

    def histogram(self, gradient: Tensor, out: Tensor) -> None:
        """Add the exponent fields of `gradient` to the counts in `out`, for `HuffmanTable.from_histogram`: (256,) int64, or
        (32,) for float16 in format 1."""
        code = dtype_code(gradient.dtype)
        if kernels_for(gradient.device) is not None:
            parameters = fill_struct("GCompCount", values=gradient, counts=out, n=gradient.numel(), dtype=code)
            launch = self.check_device(gradient.device).launch
            launch("gw_gcomp_count", grid(gradient.numel()), THREADS, _SHARED_OF_COUNTS, parameters)
            return
        values = bytes_in("gradient", gradient)
        check_tensor("out", out, torch.int64)
        n_counts = 1 << self.exponent_bits(gradient.dtype)
        if out.numel() != n_counts:
            raise InvalidArgument(f"a histogram of {gradient.dtype} has {n_counts} counts, out has {out.numel()}")
        _native.gcomp_count_exponents(values, code, self.format, out)

    def exchange_codec(
        self, dtype: torch.dtype, importance: _native.BucketImportance | None, counts: Tensor | None = None
    ) -> _native.ExchangeCodec:
        """This codec as exchanges call it, with the tables known now, for one bucket of `dtype`; `counts`, as `out` of
        `histogram`, gets the exponents of all that is encoded."""
        mode = dtype_code(dtype), _MODE_CODES[self.importance], self._kept_bits(dtype), self.rounding == "truncate"
        tables = self.table_in_use(dtype).native, self._known_tables()
        weights = importance if self.importance == "paper" else None
        return _native.gcomp_exchange_codec(*mode, self.format, *tables, weights, counts, self._least_bits())

    def _least_bits(self) -> int:
        """0 in messages of format 1, which a scheme may change to."""
        return self.least_bits if self.format == 2 else 0

    def _needed(self, importance: Tensor | None) -> Tensor | None:
        """`importance`, with "paper"; the scheme may hand it to every codec alike. Raises: InvalidArgument (missing)."""
        if self.importance != "paper":
            return None
        if importance is None:
            raise InvalidArgument(
                'importance="paper" needs the importance bytes: encode(gradient, out, importance) with one uint8 a value, '
                'or GCompCodec(importance="none") to keep every mantissa bit'
            )
        return importance

    def _kept_bits(self, dtype: torch.dtype) -> int:
        n_mantissa = _MANTISSA_BITS[dtype]
        if self.bits is None:
            return n_mantissa
        if self.importance == "paper":
            return min(self.bits, n_mantissa)
        if self.bits > n_mantissa:
            raise InvalidArgument(f"bits={self.bits}, but the mantissa of {dtype} has {n_mantissa} bits")
        return self.bits if self.importance == "uniform" else n_mantissa - self.bits

    def _known_tables(self) -> list[_native.HuffmanTable]:
        return [table.native for table in (*_PRIORS.values(), *self._tables.values())]


def describe(message: Tensor) -> dict[str, Any]:
    """What a message's headers say, as plain values: its bytes by part, and the bits a value that these come to, 0 of
    none. Raises: as `decode`, for headers only."""
    parts: dict[str, Any] = _native.gcomp_describe(bytes_in("message", message, torch.uint8))
    n_values = max(1, parts["n_elements"])
    for part in ("exponent", "level", "mantissa", "message"):
        parts[f"{part}_bits"] = 8 * parts[f"{part}_bytes"] / n_values if parts["n_elements"] else 0.0
    return parts
