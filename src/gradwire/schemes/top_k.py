"""The scheme `top-k`: every rank sends its largest elements and their places; the rest waits (Shi et al., MLSys 2021).

The published selection bisects a threshold in 20 rounds over the gradient and fills up from just below it. A histogram
of magnitudes finds the same threshold in one pass, and exactly.

When not to use this: on fast networks, with many ranks (each receives the elements of every other), or where a share
large enough to converge is no longer small.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from gradwire.codecs.selection import add_elements, take_largest
from gradwire.control.checks import share as check_share
from gradwire.core.session import Session
from gradwire.core.site import DeviceSite
from gradwire.errors import CorruptMessage
from gradwire.exchange.patterns import Gather, Values
from gradwire.schemes.compressed import count_of
from gradwire.schemes.on_device import Placed, StepsOnDevice
from gradwire.schemes.plain_first import ADAM_WARMUP_STEPS
from gradwire.schemes.selective import Selective
from gradwire.schemes.sparse_on_device import LargestOnDevice
from gradwire.wire.wire import Wire

_BLOCK_BITS = 16


class LargestElements:
    """Payload: indices, then values, of the `share` of largest elements."""

    def __init__(self, share: float) -> None:
        self.share = share

    def encode(self, values: Values, wire: Wire) -> tuple[Tensor, bool]:
        unsent = values.summed(wire)
        indices, taken, is_finite = take_largest(unsent, count_of(self.share, unsent.numel()))
        payload, sent = self._pack(indices, taken, unsent.numel())
        if sent is not taken:
            unsent[indices.long()] = taken - sent
        values.keep(unsent)
        return payload, bool(is_finite)

    def decode(self, payloads: Tensor, values: Values, wire: Wire) -> None:
        bucket = values.bucket
        mean = wire.scratch("mean", bucket.n_elements).zero_()
        for rank, payload in enumerate(payloads):  # in rank order: the same sum everywhere
            indices, chosen = self._unpack(payload, bucket.n_elements)
            error = torch.zeros(1, dtype=torch.int32)
            add_elements(indices, chosen, mean, error)
            if error or not indices.numel():
                raise CorruptMessage(
                    f"rank {rank} sent an index outside of bucket {bucket.index} ({bucket.n_elements} elements) in "
                    f"step {bucket.step}; restart from the last checkpoint"
                )
        bucket.buffer.copy_(mean.div_(wire.world_size))

    def _pack(self, indices: Tensor, chosen: Tensor, n_elements: int) -> tuple[Tensor, Tensor]:
        """The payload, (n,) int32, and which values (k,) float32 it holds; `indices` (k,) int32 ascend."""
        return torch.cat([indices, chosen.view(torch.int32)]), chosen

    def _unpack(self, payload: Tensor, n_elements: int) -> tuple[Tensor, Tensor]:
        """(k,) int32 indices, to be checked, and (k,) float32 values; no index if they cannot be told."""
        indices, chosen = payload.chunk(2)
        return indices, chosen.view(torch.float32)


class LargestInShort(LargestElements):
    """As `LargestElements`, at 4 bytes an element: half of its index, and its value as bfloat16; what that loses stays.

    Payload: how many are in each block of 65,536 elements, int32; places in their block, int16; values, bfloat16.
    """

    def _pack(self, indices: Tensor, chosen: Tensor, n_elements: int) -> tuple[Tensor, Tensor]:
        short = chosen.bfloat16()
        counts = torch.bincount(indices >> _BLOCK_BITS, minlength=_n_blocks(n_elements))
        halves = torch.cat([indices.to(torch.int16), short.view(torch.int16)])
        return torch.cat([counts.to(torch.int32), halves.view(torch.int32)]), short.float()

    def _unpack(self, payload: Tensor, n_elements: int) -> tuple[Tensor, Tensor]:
        counts, halves = payload.tensor_split([_n_blocks(n_elements)])
        places, short = halves.view(torch.int16).chunk(2)
        chosen = short.view(torch.bfloat16).float()
        if int(counts.min()) < 0 or int(counts.sum()) != places.numel():
            return counts[:0], chosen[:0]
        blocks = torch.arange(counts.numel(), dtype=torch.int32).repeat_interleave(counts) << _BLOCK_BITS
        return (places.to(torch.int32) & ((1 << _BLOCK_BITS) - 1)) + blocks, chosen


def _n_blocks(n_elements: int) -> int:
    return -(-n_elements >> _BLOCK_BITS)


class TopK(Placed, Selective):
    """Mean over the ranks of each rank's largest elements: (index int32, value float32) of each, with error feedback.

    Args:
        share: of a bucket's elements that are sent, at least one.
        error_feedback: add what was not sent to the next gradient.
        warmup_steps: the first steps of the training, which are reduced plainly. None: 50 beside Adam and its kin, else 0.
    """

    name = "top-k"
    published: ClassVar[Mapping[str, Any]] = MappingProxyType({"warmup_steps": 0})
    plain_beside_adam = ADAM_WARMUP_STEPS
    behind_plain = "0.18"

    def __init__(self, share: float = 0.001, error_feedback: bool = True, warmup_steps: int | None = None) -> None:
        self.share = check_share("share", share)
        super().__init__(LargestElements(self.share), Gather(), error_feedback, warmup_steps)

    @property
    def configuration(self) -> dict[str, Any]:
        shared = {"share": self.share, "error_feedback": self.error_feedback}
        return shared | self._selective_configuration

    def _go_to(self, site: DeviceSite, session: Session) -> StepsOnDevice:
        return LargestOnDevice(session, site, self.share, self.error_feedback)
