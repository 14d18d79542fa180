"""Steps on a device of schemes that send some elements: those that all ranks draw alike, or each rank's own choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.selection import CHECKSUM, add_elements, raise_error, take_largest
from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.core.site import DeviceSite
from gradwire.gpu.kernels import kernels_on
from gradwire.schemes.compressed import count_of
from gradwire.schemes.on_device import StepsOnDevice, refuse_unused_parameters

_BLOCK_BITS, _IN_BLOCK = 16, 0xFFFF
_HEAD_WORDS = 2  # int32: the sum of all other words, 1 if the gradient is not finite


class SparseOnDevice(StepsOnDevice):
    """What such steps share: the sum of gradient and residual, of which some elements are sent.

    Args:
        error_feedback: add what was not sent to the next gradient.
    Raises: Unsupported (DDP looks for unused parameters).
    """

    def __init__(self, session: Session, site: DeviceSite, error_feedback: bool) -> None:
        refuse_unused_parameters(session)
        super().__init__(session, site)
        self._error_feedback = error_feedback

    def _summed(self, bucket: Bucket) -> Tensor:
        """(n,) float32, to be changed: gradient + residual x loss scale."""
        if not self._error_feedback:
            return self._site.scratch("summed", bucket.n_elements, torch.float32).copy_(bucket.buffer)
        residual, unsent = self._session.feedback.pair(bucket)
        return unsent.copy_(bucket.buffer).add_(residual, alpha=self._session.loss_scale())

    def _keep(self, bucket: Bucket, unsent: Tensor) -> None:
        """Stage what stays of `_summed`, without the loss scale."""
        if self._error_feedback:
            self._session.feedback.stage_bucket(bucket, self._site.divide(unsent, self._session.loss_scale()))


class RandomOnDevice(SparseOnDevice):
    """Steps of elements that all ranks draw alike, summed by the backend.

    Args:
        places: (count,) int64 on the CPU: which elements of a bucket are sent.
    """

    def __init__(
        self, session: Session, site: DeviceSite, places: Callable[[Bucket], Tensor], error_feedback: bool
    ) -> None:
        super().__init__(session, site, error_feedback)
        self._places = places

    def _enqueue(self, bucket: Bucket, *facts: object) -> None:
        site, out, world = self._site, bucket.buffer, self._session.communicator.world_size
        places, unsent = site.upload(self._places(bucket)), self._summed(bucket)
        # Before the values goes NaN where anything is not finite, drawn or not: so its sum tells all ranks.
        message = site.scratch("message", 1 + places.numel(), torch.float32)
        message[:1].zero_().masked_fill_(unsent.isfinite().all().logical_not(), float("nan"))
        total = message[1:]
        torch.index_select(unsent, 0, places, out=total)
        unsent.index_fill_(0, places, 0.0)
        self._keep(bucket, unsent)
        site.sum(message, bucket.record)
        site.note_finite(message)
        share = 1.0 if self._error_feedback else places.numel() / bucket.n_elements
        site.divide(total, world * share)
        out.zero_().index_copy_(0, places, total.to(out.dtype))
        out.masked_fill_(message.isfinite().all().logical_not(), float("nan"))


class Gathered(NamedTuple):
    """Every rank's message, by rank.

    Attributes:
        payloads: (world, n) int32.
        error: (1,) int32: the error word of what was received; kernels that read payloads add to it.
        not_finite: (1,) int32: 1 if a rank's gradient is not finite.
    """

    payloads: Tensor
    error: Tensor
    not_finite: Tensor


class Elements:
    """Each rank's choice of its elements: taken by kernels, gathered in messages of equal size, added in rank order.

    Args:
        has_count: payloads begin with how many of their elements count; they are (indices, values) of all that there is room
            for.
    Raises: Unsupported (no kernels here).
    """

    def __init__(self, session: Session, site: DeviceSite, has_count: bool) -> None:
        self._site, self._world_size = site, session.communicator.world_size
        self._has_count = int(has_count)
        kernels_on(site.device)  # raises, where there are none

    def take(self, values: Tensor, k: int) -> Tensor:
        """Take the k largest of `values` (n,) float32 out of them: this rank's message, (words,) int32."""
        indices, taken, is_finite = take_largest(values, k)
        return self.seal([indices, taken.view(torch.int32)], is_finite)

    def seal(self, payload: list[Tensor], is_finite: Tensor) -> Tensor:
        """A message of int32 words. is_finite: () bool: whether all of this rank's gradient is."""
        n_words = _HEAD_WORDS + sum(part.numel() for part in payload)
        message = self._site.scratch("message", n_words, torch.int32)
        torch.cat(payload, out=message[_HEAD_WORDS:])
        message[1:2].copy_(is_finite.logical_not())
        message[:1].copy_(message[1:].sum(dtype=torch.int64))
        return message

    def gather(self, message: Tensor, bucket: Bucket) -> Gathered:
        """Every rank's; what the bytes alone tell is noted."""
        site, n_words = self._site, message.numel()
        received = site.scratch("received", self._world_size * n_words, torch.int32).view(self._world_size, n_words)
        site.group.all_gather(received, message)
        bucket.record.count_exchanged((self._world_size - 1) * 4 * n_words)
        are_changed = received[:, 1:].sum(1, dtype=torch.int64).to(torch.int32) != received[:, 0]
        error = are_changed.any().to(torch.int32).mul_(CHECKSUM).view(1)
        return Gathered(received[:, _HEAD_WORDS:], error, (received[:, 1] != 0).any().to(torch.int32).view(1))

    def alone(self, is_finite: Tensor) -> Gathered:
        """What a rank without peers gathers: no elements, and what it found itself."""
        nothing = torch.zeros((2, 1), dtype=torch.int32, device=self._site.device)
        return Gathered(nothing[:0], nothing[0], nothing[1].copy_(is_finite.logical_not()))

    def add_up(self, gathered: Gathered, sums: Tensor) -> None:
        """Add every rank's elements to `sums` (n,) float32, in rank order: the same everywhere."""
        for payload in gathered.payloads:
            n_taken, indices, taken = self._cut(payload)
            add_elements(indices, taken, sums, gathered.error, n_taken)

    def conclude(self, gathered: Gathered, out: Tensor) -> None:
        """Note what was found, and have `out` be NaN if that is anything."""
        flags = self._site.flags
        torch.maximum(flags[:1], gathered.error, out=flags[:1])
        flags[1:].bitwise_or_(gathered.not_finite)
        out.masked_fill_((gathered.error + gathered.not_finite) != 0, float("nan"))

    def _cut(self, payload: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        """How many elements count, or None; their indices, int32; and values, float32."""
        count, indices, taken = payload.tensor_split([self._has_count, (self._has_count + payload.numel()) // 2])
        return count if self._has_count else None, indices, taken.view(torch.float32)


class ShortElements(Elements):
    """As `Elements`, in 4 bytes each, as `LargestInShort` has them; what bfloat16 loses of a value stays.

    A payload: how many are in each block of 65,536 elements, int32; places in their block, int16; values, bfloat16.
    """

    def __init__(self, session: Session, site: DeviceSite) -> None:
        super().__init__(session, site, has_count=False)

    def take(self, values: Tensor, k: int) -> Tensor:
        indices, taken, is_finite = take_largest(values, k)
        short = taken.to(torch.bfloat16)
        values.index_copy_(0, indices.long(), taken - short.float())
        counts = torch.zeros(_n_blocks(values.numel()), dtype=torch.int32, device=values.device)
        counts.index_add_(0, indices >> _BLOCK_BITS, torch.ones_like(indices))
        halves = torch.cat([(indices & _IN_BLOCK).to(torch.int16), short.view(torch.int16)])
        return self.seal([counts, halves.view(torch.int32)], is_finite)

    def add_up(self, gathered: Gathered, sums: Tensor) -> None:
        n_blocks = _n_blocks(sums.numel())
        for payload in gathered.payloads:
            counts, halves = payload.tensor_split([n_blocks])
            places, sent = halves.view(torch.int16).chunk(2)
            ends = counts.cumsum(0)
            is_wrong = (counts < 0).any().logical_or(ends[-1:] != places.numel())
            torch.maximum(gathered.error, is_wrong.to(torch.int32).mul_(CHECKSUM), out=gathered.error)
            # Whatever the counts are: the kernel writes nothing outside.
            element = torch.arange(places.numel(), dtype=torch.int64, device=payload.device)
            blocks = torch.searchsorted(ends, element, right=True).to(torch.int32)
            indices = (places.to(torch.int32) & _IN_BLOCK) + (blocks << _BLOCK_BITS)
            add_elements(indices, sent.view(torch.bfloat16).float(), sums, gathered.error)


def _n_blocks(n_elements: int) -> int:
    return -(-n_elements >> _BLOCK_BITS)


class LargestOnDevice(SparseOnDevice):
    """Steps of each rank's largest elements.

    Args:
        share: of a bucket's elements that are sent, at least one.
        elements: how they travel; None: as (indices, values).
    Raises: Unsupported (no kernels here).
    """

    def __init__(
        self,
        session: Session,
        site: DeviceSite,
        share: float,
        error_feedback: bool,
        elements: Elements | None = None,
    ) -> None:
        super().__init__(session, site, error_feedback)
        self._share = share
        self._elements = Elements(session, site, has_count=False) if elements is None else elements

    def _enqueue(self, bucket: Bucket, *facts: object) -> None:
        elements, unsent = self._elements, self._summed(bucket)
        message = elements.take(unsent, count_of(self._share, bucket.n_elements))
        self._keep(bucket, unsent)
        gathered = elements.gather(message, bucket)
        mean = self._site.scratch("mean", bucket.n_elements, torch.float32).zero_()
        elements.add_up(gathered, mean)
        bucket.buffer.copy_(self._site.divide(mean, self._session.communicator.world_size))
        elements.conclude(gathered, bucket.buffer)

    def _raise_error(self, code: int) -> None:
        raise_error(code)
