"""Which tensors of a bucket travel raw and which compressed, and where each lies in the two buffers they are fused in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from gradwire.core.bucket import Bucket
from gradwire.core.slot import Slot
from gradwire.exchange.groups import Cut


class Span(NamedTuple):
    """Tensor number `position`: `n_elements` values from `offset` of the bucket and `fused` of the buffer it is fused in.

    `slot` is None in a bucket that has none: the whole of it counts as one tensor, without error feedback.
    """

    slot: Slot | None
    offset: int
    n_elements: int
    fused: int
    position: int

    def in_bucket(self, buffer: torch.Tensor) -> torch.Tensor:
        """Its view of the bucket's buffer."""
        return buffer[self.offset : self.offset + self.n_elements]

    def in_fused(self, buffer: torch.Tensor) -> torch.Tensor:
        """Its view of the fused buffer, fp_buf or bit_buf."""
        return buffer[self.fused : self.fused + self.n_elements]


class Plan:
    """The decision for one bucket layout and one threshold; the same on all ranks.

    Args:
        keeps_places: bit_buf is laid out as the bucket, with gaps where raw tensors lie, so that it can be the bucket.

    Attributes:
        raw, compressed: the tensors of each kind, in the bucket's order.
        n_raw, n_compressed: values of each kind.
        n_bit_buf: values that bit_buf extends over: the compressed ones, and the gaps.
        raw_runs, compressed_runs: the same, neighbours joined into one run: what is copied at a time.
        cut: how the compressed values are cut over the ranks.
    """

    def __init__(
        self, bucket: Bucket, threshold_bytes: int, world_size: int, group_elements: int, keeps_places: bool
    ) -> None:
        element_bytes = bucket.buffer.element_size()
        raw: list[Span] = []
        compressed: list[Span] = []
        self.n_raw = self.n_compressed = 0
        for position, (slot, offset, n_elements) in enumerate(tensors_of(bucket)):
            if n_elements and n_elements * element_bytes >= threshold_bytes:
                fused = offset if keeps_places else self.n_compressed
                compressed.append(Span(slot, offset, n_elements, fused, position))
                self.n_compressed += n_elements
            else:
                raw.append(Span(slot, offset, n_elements, self.n_raw, position))
                self.n_raw += n_elements
        self.raw, self.compressed = tuple(raw), tuple(compressed)
        self.raw_runs, self.compressed_runs = tuple(_join(raw)), tuple(_join(compressed))
        self.keeps_places = keeps_places
        self.n_bit_buf = bucket.n_elements if keeps_places else self.n_compressed
        self.cut = Cut([(span.fused, span.fused + span.n_elements) for span in compressed], world_size, group_elements)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The compressed slots; with `offsets`, where they lie in the fused buffer."""
        return tuple(span.slot for span in self.compressed if span.slot is not None)

    @property
    def part_edges(self) -> tuple[int, ...]:
        """Where the ranks' parts of a bit_buf without gaps end, 0 first."""
        assert not self.keeps_places
        n_parts = len(self.cut.groups)
        return tuple(self.n_compressed * part // n_parts for part in range(n_parts + 1))

    @property
    def offsets(self) -> tuple[int, ...]:
        """Offset in the fused buffer of each compressed slot."""
        return tuple(span.fused for span in self.compressed if span.slot is not None)


def tensors_of(bucket: Bucket) -> Sequence[tuple[Slot | None, int, int]]:
    """(slot, offset, number of values) of each tensor of the bucket."""
    if not bucket.slots:
        return [(None, 0, bucket.n_elements)]
    return [(slot, offset, slot.numel()) for slot, offset in zip(bucket.slots, bucket.offsets, strict=True)]


def _join(spans: Sequence[Span]) -> list[Span]:
    runs: list[Span] = []
    for span in spans:
        if runs and runs[-1].offset + runs[-1].n_elements == span.offset:
            runs[-1] = runs[-1]._replace(slot=None, n_elements=runs[-1].n_elements + span.n_elements)
        elif span.n_elements:
            runs.append(span._replace(slot=None))
    return runs
