"""The largest elements of values, and sums of them: in host memory, or on a device, enqueued by nobody who waits.

On both the same elements are taken in the same order. What a device finds wrong with elements is kept in an error word;
in host memory, where the same word is used, it can be read at once.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire import _native
from gradwire.errors import CorruptMessage, InvalidArgument
from gradwire.gpu.kernels import Kernels, kernels_for, table_of, upload, upload_once
from gradwire.gpu.launching import THREADS, fill_struct, grid, parts

CHECKSUM, OUTSIDE = 3, 2  # error words, by gpu/source/device.hpp
_WRONG = {
    CHECKSUM: "its checksum does not match: bytes were changed on the way",
    OUTSIDE: "it has more elements than it has room for, or indices outside of the bucket or out of order",
}
_MOST_ELEMENTS = (1 << 31) - 1  # as indices are int32

# A threshold from a sample is good enough if it selects between these multiples of what was asked for.
_FEWEST, _MOST = 0.8, 1.3
_ADAPTATIONS = 10

# Of kernels.
_TILE = 16_384  # values that a block looks through
_BINS = 2048
_CHOICE_BYTES, _PIECES_BYTES = 80, 8 * 8  # a segment's and a tile's
_SCAN_BYTES = 8 * THREADS
_NO_SAMPLES = -1
_PASSES = ((20, 11), (10, 10), (0, 10))  # bits of a magnitude: where they begin, how many


class Sample(NamedTuple):
    """The values of a span that its threshold is taken from."""

    places: Tensor | None  # (m,) int64 in the span, in host memory; None: all of it
    n_top: int  # of which so many, at least one, lie from the threshold up


_EXACTLY = Sample(None, 0)  # no sample: exactly as many as are wanted


def take_largest(values: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Take the k largest magnitudes, of equal ones the first, out of `values` (n,) float32, where zeros are left. NaN
    counts as larger than all numbers. Returns: (k,) int32, their places, ascending; (k,) float32; and () bool: whether
    all values were finite. Raises: InvalidArgument (more than there are, too many values)."""
    _check_size(values)
    kernels = kernels_for(values.device)
    if kernels is not None:
        is_finite = values.isfinite().all()
        _, indices, taken = _take(kernels, values, [(0, values.numel())], [k], [_EXACTLY], None)
        return indices, taken, is_finite
    indices = torch.empty(k, dtype=torch.int32, device="cpu")
    is_finite = torch.tensor(_native.select_largest(values, indices) == 0, dtype=torch.bool, device="cpu")
    places = indices.long()
    taken = values[places]
    values[places] = 0
    return indices, taken, is_finite


def take_by_sample(
    values: Tensor,
    spans: Sequence[tuple[int, int]],
    counts: Sequence[int],
    samples: Sequence[Sample],
    beside: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Take about the `counts` largest magnitudes, and no more, out of the spans of `values`, where zeros are left.

    The threshold of a sample is moved up to ten times until it selects from 0.8 to 1.3 times as many; of too many the
    largest stay. One that never settles gives way to an exact one. Zeros are not taken. Of values that are not finite some
    are taken, but not the same everywhere. `beside`, (n,) float32 as `values`, becomes zero at the same places.

    Returns: (1,) int32, how many there are; (sum(counts),) int32, their places, ascending in each span, span after span;
        (sum(counts),) float32. What is left free is zero.
    """
    _check_size(values)
    kernels = kernels_for(values.device)
    if kernels is not None:
        return _take(kernels, values, spans, counts, samples, beside)
    indices = torch.zeros(sum(counts), dtype=torch.int32, device="cpu")
    taken = torch.zeros_like(indices, dtype=torch.float32)
    n_taken = 0
    for (start, end), k, sample in zip(spans, counts, samples, strict=True):
        if k:
            found = _select_by_sample(values[start:end], k, sample)
            indices[n_taken : n_taken + found.numel()] = found + start
            n_taken += found.numel()
    places = indices[:n_taken].long()
    taken[:n_taken] = values[places]
    for emptied in (values,) if beside is None else (values, beside):
        emptied[places] = 0
    return torch.tensor([n_taken], dtype=torch.int32, device="cpu"), indices, taken


def add_elements(indices: Tensor, taken: Tensor, sums: Tensor, error: Tensor, n_taken: Tensor | None = None) -> None:
    """Add a rank's elements, (m,) int32 and float32, of which the first `n_taken` (1,) int32 count, to `sums` (n,)
    float32. `error` (1,) int32 becomes OUTSIDE, unless it says worse, if indices do not ascend in `sums` or are not
    enough."""
    room = indices.numel()
    kernels = kernels_for(sums.device)
    if kernels is not None:
        parameters = fill_struct(
            "Scatter", n_taken=n_taken, indices=indices, taken=taken, sums=sums, error=error, n=sums.numel(), room=room,
        )  # fmt: skip
        kernels.launch("gw_select_add", grid(room), THREADS, 0, parameters)
        return
    count = room if n_taken is None else int(n_taken)
    places = indices[: max(0, count)].long()
    are_inside = not places.numel() or (int(places[0]) >= 0 and int(places[-1]) < sums.numel())
    if not 0 <= count <= room or not are_inside or not bool((places[1:] > places[:-1]).all()):
        error.clamp_(min=OUTSIDE)
    else:
        sums.index_add_(0, places, taken[:count])


def raise_error(code: int) -> None:
    """Raise CorruptMessage if an error word of gathered elements says so."""
    if code:
        said = _WRONG.get(code, f"it is of no kind that is known (error word {code})")
        raise CorruptMessage(f"a message of elements cannot be read: {said}; restart from the last checkpoint")


def _check_size(values: Tensor) -> None:
    if values.numel() > _MOST_ELEMENTS:
        raise InvalidArgument(f"at most {_MOST_ELEMENTS} values are selected from, got {values.numel()}")


def _select_by_sample(values: Tensor, k: int, sample: Sample) -> Tensor:
    """(at most k,) int32: the places in `values` of a span that `take_by_sample` takes, in host memory."""
    tried = values if sample.places is None else values[sample.places]
    threshold = float(tried.abs().topk(sample.n_top).values[-1].nan_to_num(nan=math.inf, posinf=math.inf))
    found = torch.empty(min(values.numel(), 2 * k + 1), dtype=torch.int32, device="cpu")
    lowest, highest = 0.0, math.inf  # thresholds known to select too many, too few
    count = _native.select_from(values, threshold, found)
    for _ in range(_ADAPTATIONS):
        if count > _MOST * k:
            lowest = max(threshold, torch.finfo(torch.float32).tiny)
        elif count < _FEWEST * k and threshold > 0:
            highest = threshold
        else:
            break
        # As published by a factor, until it has been passed on both sides.
        is_bracketed = lowest > 0 and highest < math.inf
        threshold = (lowest + highest) / 2 if is_bracketed else lowest * _MOST or highest * _FEWEST
        count = _native.select_from(values, threshold, found)
    if count > found.numel() or (count < _FEWEST * k and threshold > 0):
        found = torch.empty(k, dtype=torch.int32, device="cpu")
        _native.select_largest(values, found)
        return found[values[found.long()] != 0]
    found = found[:count]
    if count > k:  # of equal magnitudes the first
        kept = torch.empty(k, dtype=torch.int32, device="cpu")
        _native.select_largest(values[found.long()], kept)
        found = found[kept.long()]
    return found


def _take(
    kernels: Kernels,
    values: Tensor,
    spans: Sequence[tuple[int, int]],
    counts: Sequence[int],
    samples: Sequence[Sample],
    beside: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `take_by_sample`, on a device; where there is no sample, zeros are taken too."""
    device, room = values.device, sum(counts)
    rows, places, n_tiles, n_sample_tiles, n_places = [], [], 0, 0, 0
    for (start, end), count, (drawn, n_top) in zip(spans, counts, samples, strict=True):
        if count:
            first, n_samples = _NO_SAMPLES, end - start if n_top else 0
            if drawn is not None:
                places.append(drawn)
                first, n_samples = n_places, drawn.numel()
                n_places += n_samples
            rows.append((start, end, n_tiles, count, first, n_samples, n_sample_tiles, n_top))
            n_tiles += parts(end - start, _TILE)
            n_sample_tiles += parts(n_samples, _TILE)
    segments = upload_once(device, table_of, *rows)
    drawn_places = upload(torch.cat(places).to(torch.int32), device) if places else None
    n_segments = len(rows)
    work_sizes = _CHOICE_BYTES * n_segments, 4 * _BINS * n_segments, _PIECES_BYTES * n_tiles
    choices, bins, pieces = torch.empty(sum(work_sizes), dtype=torch.uint8, device=device).split(work_sizes)
    n_taken, indices = (torch.zeros(n, dtype=torch.int32, device=device) for n in (1, room))
    taken = torch.zeros(room, device=device, dtype=torch.float32)
    parameters = fill_struct(
        "Select", values=values, beside=beside, segments=segments, samples=drawn_places, choices=choices, bins=bins,
        pieces=pieces, n_taken=n_taken, indices=indices, taken=taken, n_segments=n_segments, n_tiles=n_tiles, room=room,
        takes_zeros=n_sample_tiles == 0,
    )  # fmt: skip

    def launch(name: str, n_blocks: int, shared_bytes: int = 0) -> None:
        kernels.launch(f"gw_select_{name}", n_blocks, THREADS, shared_bytes, parameters)

    def narrow(n_tiles: int, of_samples: bool) -> None:
        parameters.of_samples = of_samples
        for parameters.shift, parameters.n_bits in _PASSES:
            launch("count", n_tiles, 4 * _BINS)
            launch("narrow", n_segments, 4 * THREADS)

    launch("begin", grid(_BINS * n_segments))
    if n_sample_tiles:
        narrow(n_sample_tiles, of_samples=True)
        for parameters.round in range(_ADAPTATIONS + 2):
            if parameters.round:
                launch("try", n_tiles)
            launch("adapt", grid(n_segments))
    narrow(n_tiles, of_samples=False)
    launch("measure", n_tiles)
    launch("place", n_segments, _SCAN_BYTES)
    launch("bases", 1, _SCAN_BYTES)
    launch("write", n_tiles)
    return n_taken, indices, taken
