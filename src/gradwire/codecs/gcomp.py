"""GComp's codec: Huffman-coded exponents, two-bit levels, what is left of the mantissas (docs/format.md#gcomp)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from gradwire import _native
from gradwire.codecs.huffman import HuffmanTable, exponent_bits_of
from gradwire.errors import BufferTooSmall, CorruptMessage, InvalidArgument

__all__ = ["GComp", "HuffmanTable", "Truncate", "describe", "message_holds_nonfinite"]

_DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_MANTISSA_BITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
_ROUNDINGS = ("nearest", "truncate")
_MODE_CODES = {"none": 0, "paper": 1, "uniform": 2, "truncate": 3}

# The table in use, the next one (agreed, not switched to yet) and the one before (messages still under way), for each
# of two exponent widths; priors are always known besides.
_MAX_TABLES = 6

_PRIORS = {bits: HuffmanTable.prior(dtype) for bits, dtype in ((8, torch.float32), (5, torch.float16))}


class GComp:
    """The codec of GComp (Li et al., SoCC 2024, sections 4 to 6).

    Lossless but for the mantissa bits that `importance` lets go of, for subnormals and for the sign of zero: values
    with exponent field 0 become +0. Inf and NaN keep every bit. Thread-safe.

    When not to use it: where the network is faster than about 2 GB/s a core, or the values are not floats with
    clustered exponents.
    """

    name = "gcomp"

    def __init__(
        self,
        importance: str = "paper",
        bits: int | None = None,
        table: HuffmanTable | None = None,
        rounding: str = "nearest",
    ) -> None:
        """
        Args:
            importance: which mantissa bits travel. "paper": per value, by the importance bytes given to `encode`;
                "none": all; "uniform": the `bits` highest, rounded to nearest even; "truncate": all but the `bits`
                lowest, towards zero.
            bits: only with "uniform" (mantissa bits to keep) and "truncate" (mantissa bits to drop; 18 if not given);
                0 to 23 for float32, 7 for bfloat16, 10 for float16.
            table: Huffman table to encode with from the start; the built-in prior if not given.
            rounding: what "paper" does with the bits it lets go of: "nearest" (ties to even; about 25 times closer at
                the same bytes) or "truncate" (towards zero, as published).
        Raises: InvalidArgument.
        """
        if importance not in _MODE_CODES:
            raise InvalidArgument(f"importance is one of {', '.join(_MODE_CODES)}, not {importance!r}")
        if importance == "truncate" and bits is None:
            bits = 18
        if importance == "uniform" and bits is None:
            raise InvalidArgument(
                'importance="uniform" needs bits: how many mantissa bits to keep, for example bits=10'
            )
        if importance in ("paper", "none") and bits is not None:
            raise InvalidArgument(
                f'bits={bits} means nothing with importance="{importance}": use "uniform" or "truncate"'
            )
        if bits is not None and not 0 <= bits <= max(_MANTISSA_BITS.values()):
            raise InvalidArgument(f"bits is from 0 to 23 (float32's mantissa), not {bits}")
        if rounding not in _ROUNDINGS:
            raise InvalidArgument(f"rounding is one of {', '.join(_ROUNDINGS)}, not {rounding!r}")
        self.importance = importance
        self.bits = bits
        self.rounding = rounding
        self._lock = threading.Lock()
        self._tables: dict[int, HuffmanTable] = {}  # by id, oldest first; replaced, never changed in place
        self._in_use = dict(_PRIORS)  # by exponent bits
        if table is not None:
            self.use_table(table)

    def max_encoded_bytes(self, n_elements: int, dtype: torch.dtype) -> int:
        """Bytes that no message of `n_elements` values of `dtype` exceeds: what `encode` asks of `out`.

        About 1.06 of the original size for float32, 1.1 to 1.3 for the 16-bit types, and 80 bytes.
        Raises: InvalidArgument (dtype, negative n_elements).
        """
        if n_elements < 0:
            raise InvalidArgument(f"n_elements is not negative, got {n_elements}")
        return _native.gcomp_max_encoded_bytes(n_elements, _dtype_code(dtype), _MODE_CODES[self.importance])

    def encode(self, gradient: torch.Tensor, out: torch.Tensor, importance: torch.Tensor | None = None) -> int:
        """Write `gradient` as one GComp message.

        Args:
            gradient: (n,) float32, bfloat16 or float16, contiguous, CPU; any n from 0.
            out: (>= max_encoded_bytes(n, dtype),) uint8, contiguous, CPU.
            importance: (n,) uint8, contiguous, CPU, with importance="paper" only: the importance bytes of
                `gradwire.schemes.gcomp.importance`.
        Returns: bytes written.
        Raises: InvalidArgument (shape, dtype, device, missing importance), BufferTooSmall.
        Cost: about two passes, no allocation once warm, releases the GIL.
        """
        dtype_code = _dtype_code(gradient.dtype)
        _check_buffer("gradient", gradient)
        _check_buffer("out", out, torch.uint8)
        if self.importance == "paper":
            if importance is None:
                raise InvalidArgument(
                    'importance="paper" needs the importance bytes: encode(gradient, out, importance) with one uint8 '
                    'a value, or GComp(importance="none") to keep every mantissa bit'
                )
            _check_buffer("importance", importance, torch.uint8)
            if importance.numel() != gradient.numel():
                raise InvalidArgument(
                    f"importance has {importance.numel()} bytes for a gradient of {gradient.numel()} values"
                )
        else:
            importance = None  # the scheme may hand it to every codec alike
        n_needed = self.max_encoded_bytes(gradient.numel(), gradient.dtype)
        if out.numel() < n_needed:
            raise BufferTooSmall(
                f"out has {out.numel()} bytes; a message of {gradient.numel()} values may need {n_needed} "
                "(max_encoded_bytes)"
            )
        table = self._in_use[exponent_bits_of(gradient.dtype)]
        return _native.gcomp_encode(
            _bytes_of(gradient),
            None if importance is None else _bytes_of(importance),
            dtype_code,
            _MODE_CODES[self.importance],
            self._kept_bits(gradient.dtype),
            self.rounding == "truncate",
            table.native,
            _bytes_of(out),
        )

    def decode(self, message: torch.Tensor, out: torch.Tensor) -> None:
        """Read `message`, whatever importance it was written with, into `out`.

        Args:
            message: exactly one message, uint8, contiguous, CPU.
            out: (n,) of the dtype and size that the sender's gradient had, contiguous, CPU; undefined after an error.
        Raises: InvalidArgument (out or message is no such buffer), CorruptMessage (failed checks, another dtype or
            size, or a table that is not known: see `add_table`), IncompatibleVersion.
        Cost: about two passes, no allocation once warm, releases the GIL.
        """
        dtype_code = _dtype_code(out.dtype)
        _check_buffer("message", message, torch.uint8)
        _check_buffer("out", out)
        table_id = _native.gcomp_read_header(_bytes_of(message))[0]
        _native.gcomp_decode(
            _bytes_of(message), dtype_code, self._table_by_id(table_id, out.dtype).native, _bytes_of(out)
        )

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
        """The table that gradients of `dtype` are encoded with. Raises: InvalidArgument (dtype)."""
        return self._in_use[exponent_bits_of(dtype)]

    def histogram(self, gradient: torch.Tensor, out: torch.Tensor) -> None:
        """Add the exponent fields of `gradient` to the counts in `out`, for `HuffmanTable.from_histogram`.

        Args:
            gradient: (n,) float32, bfloat16 or float16, contiguous, CPU.
            out: (256,) int64, or (32,) for float16, contiguous, CPU; added to, so start from zeros.
        Raises: InvalidArgument.
        Cost: one pass, no allocation, releases the GIL.
        """
        dtype_code = _dtype_code(gradient.dtype)
        _check_buffer("gradient", gradient)
        _check_buffer("out", out, torch.int64)
        n_counts = 1 << exponent_bits_of(gradient.dtype)
        if out.numel() != n_counts:
            raise InvalidArgument(f"a histogram of {gradient.dtype} has {n_counts} counts, out has {out.numel()}")
        _native.gcomp_count_exponents(_bytes_of(gradient), dtype_code, out)

    def _kept_bits(self, dtype: torch.dtype) -> int:
        n_mantissa = _MANTISSA_BITS[dtype]
        if self.bits is None:
            return n_mantissa
        if self.bits > n_mantissa:
            raise InvalidArgument(f"bits={self.bits}, but the mantissa of {dtype} has {n_mantissa} bits")
        return self.bits if self.importance == "uniform" else n_mantissa - self.bits

    def _table_by_id(self, table_id: int, dtype: torch.dtype) -> HuffmanTable:
        prior = _PRIORS[exponent_bits_of(dtype)]
        if table_id == prior.id:
            return prior
        table = self._tables.get(table_id)
        if table is None:
            known = ", ".join(f"{key:#018x}" for key in [prior.id, *self._tables])
            raise CorruptMessage(
                f"the message was written with Huffman table {table_id:#018x}; known here: {known}. "
                "Every rank has to add_table() a new table before any rank may use it"
            )
        return table


class Truncate(GComp):
    """GComp's message with the `bits` lowest mantissa bits always cut off: the comparator of the paper's Fig. 18."""

    name = "truncate"

    def __init__(self, bits: int = 18, table: HuffmanTable | None = None) -> None:
        """See `GComp`. Raises: InvalidArgument."""
        super().__init__(importance="truncate", bits=bits, table=table)


def message_holds_nonfinite(message: torch.Tensor) -> bool:
    """Whether some value in a GComp message is Inf or NaN, from its header alone.

    Raises: InvalidArgument, CorruptMessage (headers only; the values are not checked), IncompatibleVersion.
    """
    _check_buffer("message", message, torch.uint8)
    return _native.gcomp_read_header(_bytes_of(message))[3]


def describe(message: torch.Tensor) -> dict[str, Any]:
    """Where the bytes of a GComp message go, as plain values.

    Keys: codec, format_version, dtype, importance, kept_mantissa_bits, table_id, n_elements, n_chunks, n_raw_chunks,
    holds_nonfinite, message_bytes, header_bytes, exponent_bytes, level_bytes, mantissa_bytes, and per value
    exponent_bits, level_bits, mantissa_bits, message_bits (0 for an empty message).
    Raises: InvalidArgument, CorruptMessage (headers only), IncompatibleVersion.
    """
    _check_buffer("message", message, torch.uint8)
    parts: dict[str, Any] = _native.gcomp_describe(_bytes_of(message))
    n_values = max(1, parts["n_elements"])
    for part in ("exponent", "level", "mantissa", "message"):
        parts[f"{part}_bits"] = 8 * parts[f"{part}_bytes"] / n_values if parts["n_elements"] else 0.0
    return parts


def _dtype_code(dtype: torch.dtype) -> int:
    exponent_bits_of(dtype)
    return _DTYPE_CODES[dtype]


def _check_buffer(what: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    checks: tuple[tuple[bool, Callable[[], str]], ...] = (
        (dtype is None or tensor.dtype == dtype, lambda: f"expected {dtype}, got {tensor.dtype}"),
        (tensor.device.type == "cpu", lambda: f"expected a CPU tensor, got one on {tensor.device}: copy it first"),
        (tensor.dim() == 1, lambda: f"expected one dimension, got shape {tuple(tensor.shape)}: flatten it"),
        (tensor.is_contiguous(), lambda: "it is not contiguous: call .contiguous()"),
    )
    for fulfilled, say in checks:
        if not fulfilled:
            raise InvalidArgument(f"{what}: {say()}")


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory; a contiguous tensor of one value or none may have any stride, which a view refuses."""
    flat = tensor.detach()
    return (flat if flat.stride(0) == 1 else flat.as_strided(flat.shape, (1,))).view(torch.uint8)
