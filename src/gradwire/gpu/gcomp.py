"""GComp's messages of format 2 on a device: the bytes of the CPU's codec, enqueued by nobody who waits."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from gradwire.codecs.gcomp import GCompCodec
from gradwire.codecs.huffman import HuffmanTable
from gradwire.codecs.tensors import dtype_code
from gradwire.errors import (
    CorruptMessage,
    GradwireError,
    IncompatibleVersion,
    InvalidArgument,
    RankMismatch,
    Unsupported,
)
from gradwire.gpu.kernels import Kernels
from gradwire.gpu.tensors import THREADS, address, check_on_device, check_work, grid, parts

_CHUNK_VALUES = 16_384
_STREAMS = 4
_LANES = 16
_WARP = 32  # threads a block where each works long: so that there are blocks for all multiprocessors
_LOOK_UP_BITS = 11
_NO_PLACEHOLDER = 256
_SHARED_OF_CHECKSUM = 4 * (256 + 8)
_SHARED_OF_CHECK = _SHARED_OF_CHECKSUM + 4
_SHARED_OF_STREAMS = 2 << _LOOK_UP_BITS
_SHARED_OF_MEASURES = _SHARED_OF_CHECKSUM + 4 * (_LANES + _STREAMS + 2)
_SHARED_OF_PLACES = 4 * (THREADS + 1)
_SHARED_OF_EXPONENTS = 4 * THREADS + _CHUNK_VALUES
_SHARED_OF_COUNTS = 4 * 256 * THREADS // _WARP
_LENGTHS_BYTES = 40
_OTHER_IMPORTANCE = 7  # as an error word; the others are this less the first of what is wrong

_WRONG: dict[int, tuple[type[GradwireError], str]] = {
    1: (CorruptMessage, "it does not begin with GWGC: another kind of message, or bytes were lost"),
    2: (IncompatibleVersion, "it is of another format version: use the same gradwire release on every rank"),
    3: (CorruptMessage, "it has another length or number of values than expected"),
    4: (CorruptMessage, "a checksum does not match: bytes were changed on the way"),
    5: (CorruptMessage, "it was written with other options or another Huffman table, or its headers are impossible"),
    6: (CorruptMessage, "its exponents or mantissas are none that an encoder writes"),
    0: (
        RankMismatch,
        "the sender derives other importance bytes: load one checkpoint on all ranks, and change learning rates on all of "
        "them alike",
    ),
}


class _Encode(ctypes.Structure):
    """`Encode` of source/gcomp_encode.hpp."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("values", "importance", "table", "message", "n_bytes", "exponents", "chunks")
        ),
        *((name, ctypes.c_uint64) for name in ("n", "table_id")),
        *((name, ctypes.c_uint32) for name in ("dtype", "mode", "kept_bits", "rounds")),
    ]


class _Count(ctypes.Structure):
    """`Count` of source/gcomp_encode.hpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("values", "counts")),
        ("n", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("dtype", "pad")),
    ]


class _Decode(ctypes.Structure):
    """`Decode` of source/gcomp_decode.hpp."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                "message",
                "importance",
                "table",
                "out",
                "exponents",
                "stream_is_bad",
                "are_headers_right",
                "error",
            )
        ),
        *((name, ctypes.c_uint64) for name in ("n", "n_bytes", "table_id")),
        ("divisor", ctypes.c_float),
        *((name, ctypes.c_uint32) for name in ("dtype", "mode", "kept_bits", "adds", "placeholder")),
    ]


class DeviceGComp:
    """GComp on a device: calls enqueue kernels on the current stream and return.

    Messages are those of the CPU's codec, byte for byte. The Huffman table is the one that `codec` uses at the call; the
    first call with a table copies it to the device, and waits for that. All calls are made on one stream.

    Args:
        codec: of format 2, with its options.
        kernels: where they run.
    Raises: Unsupported (format 1).
    """

    def __init__(self, codec: GCompCodec, kernels: Kernels) -> None:
        if codec.format != 2:
            raise Unsupported("kernels read and write GComp messages of format 2: leave format=1 out")
        self.codec = codec
        self._kernels = kernels
        self._table: tuple[int, Tensor] | None = None  # its id; `Table` of source/gcomp.hpp

    def work_bytes(self, n_elements: int) -> int:
        """Of the memory that calls use on the side, at a multiple of 8 bytes: a little more than a byte a value."""
        return _Work(n_elements).n_bytes

    def message_bytes(self, n_elements: int, dtype: torch.dtype) -> int:
        """Bytes that no message of `n_elements` exceeds."""
        return self.codec.max_encoded_bytes(n_elements, dtype)

    def encode(
        self, values: Tensor, out: Tensor, n_bytes: Tensor, work: Tensor, *, importance: Tensor | None = None
    ) -> None:
        """As `GCompCodec.encode`.

        Args:
            values: (n,) float32, bfloat16 or float16.
            out: (message_bytes(n, dtype),) uint8, at a multiple of 4 bytes.
            n_bytes: (1,) int64: gets the length of the message.
            work: at least (work_bytes(n),) uint8.
            importance: (n,) uint8 with importance="paper", else not looked at.
        All contiguous on the kernels' device. Raises: InvalidArgument, and what a launch raises.
        """
        n, device = values.numel(), self._kernels.device
        code = dtype_code(values.dtype)
        check_on_device("values", values, values.dtype, n, device, values.element_size())
        check_on_device("out", out, torch.uint8, self.message_bytes(n, values.dtype), device, 4)
        check_on_device("n_bytes", n_bytes, torch.int64, 1, device, 8)
        check_work(work, self.work_bytes(n), device)
        importance = self._importance(importance, n)
        mode, kept_bits = self.codec.native_mode(values.dtype)
        table, places = self.codec.table_of_width(8), _Work(n)
        parameters = _Encode(
            values.data_ptr(),
            address(importance),
            self._on_device(table),
            out.data_ptr(),
            n_bytes.data_ptr(),
            work.data_ptr() + places.exponents,
            work.data_ptr() + places.lengths,
            n,
            table.id,
            code,
            mode,
            kept_bits,
            self.codec.rounds,
        )
        launch, n_chunks = self._kernels.launch, parts(n, _CHUNK_VALUES)
        launch("gw_gcomp_measure", n_chunks, THREADS, _SHARED_OF_MEASURES, parameters)
        launch("gw_gcomp_place", 1, THREADS, _SHARED_OF_PLACES, parameters)
        launch("gw_gcomp_pack", parts(_LANES * n_chunks, _WARP), _WARP, 0, parameters)
        launch("gw_gcomp_exponents", n_chunks, THREADS, _SHARED_OF_EXPONENTS, parameters)
        launch("gw_gcomp_seal_chunks", n_chunks, THREADS, _SHARED_OF_CHECKSUM, parameters)
        launch("gw_gcomp_seal", 1, THREADS, _SHARED_OF_CHECKSUM, parameters)

    def histogram(self, values: Tensor, counts: Tensor) -> None:
        """Add the exponents of (n,) `values` to (256,) int64 `counts`, as `GCompCodec.histogram`. Raises: InvalidArgument."""
        device = self._kernels.device
        check_on_device("values", values, values.dtype, values.numel(), device, values.element_size())
        check_on_device("counts", counts, torch.int64, 256, device, 8)
        parameters = _Count(values.data_ptr(), counts.data_ptr(), values.numel(), dtype_code(values.dtype))
        self._kernels.launch("gw_gcomp_count", grid(values.numel()), THREADS, _SHARED_OF_COUNTS, parameters)

    def decode(
        self,
        message: Tensor,
        out: Tensor,
        error: Tensor,
        work: Tensor,
        *,
        importance: Tensor | None = None,
        divisor: float = 1.0,
        adds: bool = False,
    ) -> None:
        """Read a message that was written with the same options and table.

        Args:
            message: (n_bytes,) uint8, exactly one message, at a multiple of 4 bytes.
            out: (n,) of the sender's dtype: gets the values / divisor, or has them added. NaN where the message is not
                whole, and in chunks of what no encoder writes.
            error: (1,) int32: keeps the worst of what was wrong since it was 0; see `raise_error`. No message counts as whole
                beside one that was not.
            work: at least (work_bytes(n),) uint8.
            importance: (n,) uint8 with importance="paper", else not looked at: what the sender encoded by.
            divisor: not together with `adds`.
        All contiguous on the kernels' device. Raises: InvalidArgument, and what a launch raises.
        """
        n, device = out.numel(), self._kernels.device
        code = dtype_code(out.dtype)
        check_on_device("message", message, torch.uint8, message.numel(), device, 4)
        check_on_device("out", out, out.dtype, n, device, out.element_size())
        check_on_device("error", error, torch.int32, 1, device, 4)
        check_work(work, self.work_bytes(n), device)
        importance = self._importance(importance, n)
        if adds and divisor != 1:
            raise InvalidArgument("values are added without a divisor")
        mode, kept_bits = self.codec.native_mode(out.dtype)
        table, places = self.codec.table_of_width(8), _Work(n)
        parameters = _Decode(
            message.data_ptr(),
            address(importance),
            self._on_device(table),
            out.data_ptr(),
            work.data_ptr() + places.exponents,
            work.data_ptr() + places.streams,
            work.data_ptr() + places.flag,
            error.data_ptr(),
            n,
            message.numel(),
            table.id,
            divisor,
            code,
            mode,
            kept_bits,
            adds,
            _placeholder(table),
        )
        launch, n_chunks = self._kernels.launch, parts(n, _CHUNK_VALUES)
        launch("gw_gcomp_check", 1, THREADS, _SHARED_OF_CHECK, parameters)
        launch("gw_gcomp_checksums", n_chunks, THREADS, _SHARED_OF_CHECKSUM, parameters)
        launch("gw_gcomp_streams", parts(_STREAMS * n_chunks, _WARP), _WARP, _SHARED_OF_STREAMS, parameters)
        launch("gw_gcomp_unpack", parts(_LANES * n_chunks, _WARP), _WARP, 0, parameters)

    def raise_error(self, code: int) -> None:
        """Raise what the error word says, if anything. Raises: CorruptMessage, IncompatibleVersion, RankMismatch."""
        if code == 0:
            return
        error, text = _WRONG[_OTHER_IMPORTANCE - code]
        raise error(f"{self.codec.name} message on {self._kernels.device}: {text}")

    def _importance(self, importance: Tensor | None, n: int) -> Tensor | None:
        if self.codec.importance != "paper":
            return None
        if importance is None:
            raise InvalidArgument('importance="paper" needs the importance bytes: one uint8 a value')
        check_on_device("importance", importance, torch.uint8, n, self._kernels.device, 1)
        return importance

    def _on_device(self, table: HuffmanTable) -> int:
        if self._table is None or self._table[0] != table.id:
            self._table = table.id, _laid_out(table).to(self._kernels.device)
        return self._table[1].data_ptr()


class _Work:
    """Where the parts of the work memory begin."""

    def __init__(self, n_elements: int) -> None:
        n_chunks = parts(n_elements, _CHUNK_VALUES)
        self.exponents = 8
        self.flag = 0
        self.streams = self.exponents + n_chunks * _CHUNK_VALUES  # decode
        self.lengths = self.streams  # encode
        self.n_bytes = self.lengths + _LENGTHS_BYTES * n_chunks


def _codes(table: HuffmanTable) -> list[tuple[int, int]]:
    """By symbol, the escape last: length and code, its first bit lowest (docs/format.md#huffman-table)."""
    codes = [(0, 0)] * len(table.lengths)
    following = 0
    for length in range(1, _LOOK_UP_BITS + 1):
        following <<= 1
        for symbol, n_bits in enumerate(table.lengths):
            if n_bits == length:
                codes[symbol] = length, int(f"{following:0{length}b}"[::-1], 2)
                following += 1
    return codes


def _laid_out(table: HuffmanTable) -> Tensor:
    """`Table` of source/gcomp.hpp, as bytes on the CPU."""
    codes = _codes(table)
    look_up = torch.zeros(1 << _LOOK_UP_BITS, dtype=torch.int32)
    for symbol, (length, code) in enumerate(codes):
        if length:
            look_up[code :: 1 << length] = length | (symbol if symbol < 256 else _placeholder(table)) << 8
    escape_length, escape_code = codes[-1]
    entries = [
        length << 16 | code if length else 1 << 31 | escape_length << 16 | escape_code for length, code in codes[:-1]
    ]
    by_exponent = torch.tensor(entries, dtype=torch.int64)
    halves = torch.stack([look_up & 0xFF, look_up >> 8], dim=1).to(torch.uint8).view(-1)
    words = torch.stack([by_exponent >> 8 * byte & 0xFF for byte in range(4)], dim=1).to(torch.uint8).view(-1)
    return torch.cat([halves, words])


def _placeholder(table: HuffmanTable) -> int:
    """What an escape's code decodes to: the lowest exponent without a code, or a number that is none."""
    return table.lengths[:-1].index(0) if table.lengths[-1] else _NO_PLACEHOLDER
