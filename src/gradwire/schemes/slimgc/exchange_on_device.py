"""The mean of a bucket's tensors by push and pull, where they are: the messages and bits of `FusedExchange` in host memory.

Every tensor's piece of every part is a message of its own, so that a scale belongs to one tensor, as in
native/exchange/pieces.hpp; a part's messages travel together, in rows of one length.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch
from torch import Tensor

from gradwire.codecs.quantised import Quantised
from gradwire.core.device_times import DeviceTimes
from gradwire.core.site import DeviceSite
from gradwire.exchange.groups import Cut
from gradwire.exchange.on_device import Chunk, DeviceOwners, Left
from gradwire.wire.communicator import Communicator


class DevicePieces(DeviceOwners):
    """Means over the ranks of one site; see `DeviceOwners`.

    Attributes:
        times: where the parts of an exchange are noted: "encode", "communicate", "decode"; None: nowhere.
    """

    def __init__(self, site: DeviceSite, codec: Quantised, communicator: Communicator, chunk_elements: int) -> None:
        super().__init__(site, codec, communicator, chunk_elements)
        self.times: DeviceTimes | None = None

    def mean_of_pieces(
        self,
        values: Tensor,
        cut: Cut,
        first_draw: int,
        residual: Tensor | None = None,
        unsent: Tensor | None = None,
        loss_scale: float = 1.0,
    ) -> int:
        """Replace what `cut` has of `values` (n,) by its mean; on the lane, with the site's stream current.

        Args:
            first_draw: the message that begins at value k draws by this + k.
            residual, unsent: (n,) float32 on the device, of which the second is written; None: no error feedback.
        Returns: bytes sent, which are those received.
        """
        parts, rank = [self._chunks_of(cut, part) for part in range(self._world)], self._rank

        def encode(chunk_values: Tensor, part: int, index: int, row: Tensor) -> None:
            chunk = parts[part][index]
            # Of the own part the residual is in the sum already.
            left = Left(None if part == rank else residual, unsent, loss_scale)
            self._encode(chunk_values, chunk, row, first_draw + chunk.values.start, left)

        def own(chunk: Chunk) -> Tensor:
            mine = values[chunk.values]
            return mine if residual is None else torch.add(mine.float(), residual[chunk.values], alpha=loss_scale)

        return self._through_owners(values, parts, encode, own)

    def _timing(self, kind: str) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.times is None else self.times.timing(kind)

    def _chunks_of(self, cut: Cut, part: int) -> list[Chunk]:
        """The pieces of a part, one after the other."""
        spans = []
        for group in cut.groups[part]:
            edges = itertools.pairwise(itertools.accumulate(map(abs, group.sizes), initial=group.start))
            spans += [edge for edge, size in zip(edges, group.sizes, strict=True) if size > 0]
        chunks, at = [], 0
        for first, last in spans:
            room = self._codec.message_room(last - first)
            chunks.append(Chunk(slice(first, last), slice(at, at + room), ()))
            at += room
        return chunks
