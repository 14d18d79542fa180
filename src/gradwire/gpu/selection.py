"""The largest elements on a device: those that the CPU takes, in its order, enqueued by nobody who waits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.errors import CorruptMessage, InvalidArgument
from gradwire.gpu.kernels import Kernels
from gradwire.gpu.tensors import THREADS, address, check_on_device, check_work, grid, parts

_TILE = 16_384  # values that a block looks through
_BINS = 2048
_CHOICE_BYTES, _PIECES_BYTES = 80, 8 * 8  # a segment's and a tile's
_SCAN_BYTES = 2 * 8 * THREADS
_NO_SAMPLES = -1
_PASSES = ((20, 11), (10, 10), (0, 10))  # bits of a magnitude: where they begin, how many
_ADAPTATIONS = 10
_MOST_ELEMENTS = (1 << 31) - 1  # as indices are int32

CHECKSUM, OUTSIDE = 3, 2  # error words, by source/device.hpp
_WRONG = {
    CHECKSUM: "its checksum does not match: bytes were changed on the way",
    OUTSIDE: "it has more elements than it has room for, or indices outside of the bucket or out of order",
}


class _Select(ctypes.Structure):
    """`Select` of source/selection.hpp."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                "values", "beside", "segments", "samples", "choices", "bins", "pieces", "n_taken", "indices", "taken",
            )
        ),
        *((name, ctypes.c_uint64) for name in ("n_segments", "n_tiles", "room")),
        *((name, ctypes.c_uint32) for name in ("shift", "n_bits", "round", "of_samples", "takes_zeros", "pad")),
    ]  # fmt: skip


class _Scatter(ctypes.Structure):
    """`Scatter` of source/selection.hpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("n_taken", "indices", "taken", "sums", "error")),
        *((name, ctypes.c_uint64) for name in ("n", "room")),
    ]


class Sample(NamedTuple):
    """What a segment's threshold is taken from.

    Attributes:
        places: (m,) int64 in the segment; None: all of it.
        n_top: of which so many, at least one, lie from the threshold up.
    """

    places: Tensor | None
    n_top: int


class Segments(NamedTuple):
    """What is selected from, on the device.

    Attributes:
        n_elements: values, in some of which the segments lie.
        room: elements that are taken at most.
        table: (n_segments, 8) int64.
        samples: (m,) int32, or None.
    """

    n_elements: int
    n_segments: int
    n_tiles: int
    n_sample_tiles: int
    room: int
    table: Tensor
    samples: Tensor | None


class DeviceSelection:
    """The largest elements by magnitude, of equal ones the first; calls enqueue on the current stream and return."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def lay_out(
        self,
        n_elements: int,
        spans: Sequence[tuple[int, int]],
        counts: Sequence[int],
        upload: Callable[[Tensor], Tensor],
        samples: Sequence[Sample] | None = None,
    ) -> Segments:
        """Of each of `spans` of n values, which do not overlap, the largest `counts`; empty ones are left out.

        Args:
            upload: makes a tensor on the device of one of the host's.
            samples: one a span: take about as many, by the rule of `schemes.dgc.select_by_sample`, and no zeros.
        Raises: InvalidArgument (more than there are, too many values).
        """
        if n_elements > _MOST_ELEMENTS:
            raise InvalidArgument(f"at most {_MOST_ELEMENTS} values are selected from, got {n_elements}")
        rows, places, n_tiles, n_sample_tiles, n_places = [], [], 0, 0, 0
        for number, ((start, end), count) in enumerate(zip(spans, counts, strict=True)):
            if not 0 <= start <= end <= n_elements or not 0 <= count <= end - start:
                raise InvalidArgument(f"{count} elements cannot be taken from {start} to {end} of {n_elements} values")
            if count == 0:
                continue
            first, n_samples, n_top = _NO_SAMPLES, 0, 0
            if samples is not None:
                drawn, n_top = samples[number]
                n_samples = end - start
                if drawn is not None:
                    places.append(drawn)
                    first, n_samples = n_places, drawn.numel()
                    n_places += n_samples
            rows.append([start, end, n_tiles, count, first, n_samples, n_sample_tiles, n_top])
            n_tiles += parts(end - start, _TILE)
            n_sample_tiles += parts(n_samples, _TILE)
        table = upload(torch.tensor(rows, dtype=torch.int64).view(-1, 8))
        drawn_places = upload(torch.cat(places).to(torch.int32)) if places else None
        return Segments(n_elements, len(rows), n_tiles, n_sample_tiles, sum(counts), table, drawn_places)

    def work_bytes(self, segments: Segments) -> int:
        """Of the memory that `take` uses on the side, at a multiple of 8 bytes."""
        return (_CHOICE_BYTES + 4 * _BINS) * segments.n_segments + _PIECES_BYTES * segments.n_tiles

    def take(
        self,
        values: Tensor,
        segments: Segments,
        work: Tensor,
        indices: Tensor,
        taken: Tensor,
        *,
        beside: Tensor | None = None,
        n_taken: Tensor | None = None,
    ) -> None:
        """Take the largest elements out of `values`, where zeros are left.

        Args:
            values: (n,) float32. NaN counts as larger than all numbers.
            work: at least (work_bytes(segments),) uint8.
            indices: (segments.room,) int32: gets the elements' places, ascending in each span, span after span.
            taken: (segments.room,) float32: gets the elements. What samples leave free of both is not written.
            beside: (n,) float32 or None: becomes zero at the same places.
            n_taken: (1,) int32 or None: gets how many there are.
        All contiguous on the kernels' device. Raises: InvalidArgument, and what a launch raises.
        """
        n = segments.n_elements
        self._check("values", values, torch.float32, n)
        self._check("indices", indices, torch.int32, segments.room)
        self._check("taken", taken, torch.float32, segments.room)
        if beside is not None:
            self._check("beside", beside, torch.float32, n)
        if n_taken is not None:
            self._check("n_taken", n_taken, torch.int32, 1)
        check_work(work, self.work_bytes(segments), self._kernels.device)
        by_sample = segments.n_sample_tiles > 0
        bins_at = work.data_ptr() + _CHOICE_BYTES * segments.n_segments
        parameters = _Select(
            values=values.data_ptr(),
            beside=address(beside),
            segments=segments.table.data_ptr(),
            samples=address(segments.samples),
            choices=work.data_ptr(),
            bins=bins_at,
            pieces=bins_at + 4 * _BINS * segments.n_segments,
            n_taken=address(n_taken),
            indices=indices.data_ptr(),
            taken=taken.data_ptr(),
            n_segments=segments.n_segments,
            n_tiles=segments.n_tiles,
            room=segments.room,
            takes_zeros=not by_sample,
        )
        self._launch("begin", grid(_BINS * segments.n_segments), parameters)
        if by_sample:
            self._narrow(segments.n_sample_tiles, segments, parameters, of_samples=True)
            for number in range(_ADAPTATIONS + 2):
                parameters.round = number
                if number:
                    self._launch("try", segments.n_tiles, parameters)
                self._launch("adapt", grid(segments.n_segments), parameters)
        self._narrow(segments.n_tiles, segments, parameters, of_samples=False)
        self._launch("measure", segments.n_tiles, parameters)
        self._launch("place", segments.n_segments, parameters, _SCAN_BYTES)
        self._launch("bases", 1, parameters, _SCAN_BYTES)
        self._launch("write", segments.n_tiles, parameters)

    def add(
        self, indices: Tensor, taken: Tensor, sums: Tensor, error: Tensor, *, n_taken: Tensor | None = None
    ) -> None:
        """Add elements as `take` gives them to `sums` (n,) float32.

        Args:
            error: (1,) int32: gets OUTSIDE if indices do not ascend in `sums`, or there are more than (m,) `indices`.
            n_taken: (1,) int32: how many there are; None: all.
        Raises: InvalidArgument, and what a launch raises.
        """
        room = indices.numel()
        self._check("indices", indices, torch.int32, room)
        self._check("taken", taken, torch.float32, room)
        self._check("sums", sums, torch.float32, sums.numel())
        self._check("error", error, torch.int32, 1)
        if n_taken is not None:
            self._check("n_taken", n_taken, torch.int32, 1)
        addresses = address(n_taken), indices.data_ptr(), taken.data_ptr(), sums.data_ptr(), error.data_ptr()
        self._kernels.launch("gw_select_add", grid(room), THREADS, 0, _Scatter(*addresses, sums.numel(), room))

    def _narrow(self, n_tiles: int, segments: Segments, parameters: _Select, of_samples: bool) -> None:
        parameters.of_samples = of_samples
        for shift, n_bits in _PASSES:
            parameters.shift, parameters.n_bits = shift, n_bits
            self._launch("count", n_tiles, parameters, 4 * _BINS)
            self._launch("narrow", segments.n_segments, parameters, 4 * THREADS)

    def _launch(self, name: str, n_blocks: int, parameters: _Select, shared_bytes: int = 0) -> None:
        self._kernels.launch(f"gw_select_{name}", n_blocks, THREADS, shared_bytes, parameters)

    def _check(self, name: str, tensor: Tensor, dtype: torch.dtype, n: int) -> None:
        check_on_device(name, tensor, dtype, n, self._kernels.device, 4)


def raise_error(code: int) -> None:
    """Raise what an error word of gathered elements says, if anything. Raises: CorruptMessage."""
    if code:
        said = _WRONG.get(code, f"it is of no kind that is known (error word {code})")
        raise CorruptMessage(f"a message of elements cannot be read: {said}; restart from the last checkpoint")
