"""Packed sums on a device: the index of the non-zeros is made, united and counted there, and so are the values at it.

How many values the ranks are going to sum is known to the device only. The lane waits for that number, once a bucket, and
learns with it what the ranks' heads say: so what is not finite or too dense is sent plainly, as through host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.codecs import packed_values
from gradwire.codecs.count_sketch import index_words
from gradwire.codecs.packed_values import HEAD_WORDS, PAST_THE_END, Head, read_head
from gradwire.codecs.selection import take_largest
from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.core.site import DeviceSite
from gradwire.errors import CorruptMessage
from gradwire.gpu.kernels import kernels_on
from gradwire.schemes.compressed import count_of
from gradwire.schemes.homomorphic.by_bucket import DenseBuckets, is_too_dense
from gradwire.schemes.on_device import StepsOnDevice, refuse_unused_parameters
from gradwire.telemetry.recorder import BucketRecord
from gradwire.wire.communicator import ring_bytes
from gradwire.wire.wire import Wire


class Policy(NamedTuple):
    """What the scheme decides, and is told.

    Attributes:
        density: share of the largest values that are sent; None: all.
        dense: which buckets are sent plainly in this step.
        note_redone, note_too_dense: called for a bucket that is sent plainly.
    """

    density: float | None
    error_feedback: bool
    dense: DenseBuckets
    note_redone: Callable[[Bucket], None]
    note_too_dense: Callable[[Bucket], None]


class ToSend(NamedTuple):
    """Values that are sent, and (n,) float32 where what is left out of them is to be kept, with error feedback."""

    values: Tensor
    left_out: Tensor | None


class PackedOnDevice(StepsOnDevice):
    """Steps of mode "packed". Raises: Unsupported (DDP looks for unused parameters, with error feedback; no kernels)."""

    waits_in_step = True

    def __init__(self, session: Session, site: DeviceSite, policy: Policy) -> None:
        if policy.error_feedback:
            refuse_unused_parameters(session)
        super().__init__(session, site)
        self._policy = policy
        kernels_on(site.device)  # raises, where there are none

    def _enqueue(self, bucket: Bucket, *facts: Any) -> None:
        """facts: the bucket's key, and its wire, for what ranks have to share."""
        key, wire = facts
        dense = self._policy.dense
        if dense.is_known(key):
            self._send_plainly(bucket)
            return
        kept = self._values_to_send(bucket)
        index, ends, head, n_values = self._unite(kept.values, bucket, wire)
        if not head.is_finite:
            self._send_plainly(bucket, is_redone=True)
        elif is_too_dense(bucket, kept.values.element_size(), n_values):
            dense.note(key)
            self._send_plainly(bucket)
        else:
            self._sum(bucket, kept, index, ends, n_values)

    def _values_to_send(self, bucket: Bucket) -> ToSend:
        """As `unsent.values_to_send`; a parameter whose gradient is all zeros sends its residual."""
        site, n, policy = self._site, bucket.n_elements, self._policy
        if policy.density is None:
            return ToSend(bucket.buffer, None)
        corrected = site.scratch("corrected", n, torch.float32).copy_(bucket.buffer)
        unsent = None
        if policy.error_feedback:
            residual, unsent = self._session.feedback.pair(bucket)
            corrected.add_(residual, alpha=self._session.loss_scale())
        largest, taken, _ = take_largest(corrected, count_of(policy.density, n))
        kept = site.scratch("kept", n, torch.float32).zero_().index_copy_(0, largest.long(), taken)
        return ToSend(kept, None if unsent is None else unsent.copy_(corrected))

    def _unite(self, values: Tensor, bucket: Bucket, wire: Wire) -> tuple[Tensor, Tensor, Head, int]:
        """The ranks' indices ORed, with counts; what their heads say, and how many values are in the union.

        Raises: RankMismatch, CorruptMessage, and what the group has failed of while the lane waited.
        """
        site, n, record = self._site, values.numel(), bucket.record
        world, n_words = wire.world_size, HEAD_WORDS + index_words(n)
        shard = -(-n_words // world)
        whole = site.scratch("index", world * shard, torch.int32)
        whole[n_words:].zero_()
        message = whole[:n_words]
        packed_values.write_index(values, message, wire.checksum)
        self._or_by_shards(whole.view(world, shard), record)
        index, own_head = message[HEAD_WORDS:], message[:HEAD_WORDS]
        ends = packed_values.count(index, n, own_head)
        numbers = torch.cat([own_head, ends[-1:]]).long()
        with record.timing("communicate"):
            *head_words, n_values = site.read(numbers)
        self._session.communicator.raise_if_failed()  # what was read then is not what ranks have sent
        head = read_head(head_words)
        if not head.ranks_agree:
            wire.name_mismatch()
        if head.flags & PAST_THE_END:
            raise CorruptMessage(
                f"the index of bucket {bucket.index} in step {bucket.step} has bits set past its {n} values: it was altered on "
                "its way; restart from the last checkpoint"
            )
        return index, ends, head, n_values

    def _or_by_shards(self, rows: Tensor, record: BucketRecord) -> None:
        """Replace `rows` (world, n) by its OR over the ranks: each ORs one row, and all gather them. NCCL knows no OR."""
        site, rank = self._site, self._session.communicator.rank
        theirs = site.scratch("theirs", rows.numel(), torch.int32).view(rows.shape)
        site.group.all_to_all(theirs, rows)
        own = site.scratch("own", rows.shape[1], torch.int32).copy_(theirs[rank])
        for other in range(len(rows)):
            if other != rank:
                own.bitwise_or_(theirs[other])
        site.group.all_gather(rows, own)
        record.count_exchanged(ring_bytes(4 * rows.numel(), len(rows)))

    def _sum(self, bucket: Bucket, kept: ToSend, index: Tensor, ends: Tensor, n_values: int) -> None:
        site, values, buffer = self._site, kept.values, bucket.buffer
        packed = site.scratch("packed", n_values, values.dtype)
        if n_values:
            packed_values.pack(values, index, packed, ends)
            site.mean(packed, bucket.record)
        if values.dtype == buffer.dtype:
            packed_values.unpack(packed, index, buffer, ends)
        else:
            mean = site.scratch("mean", bucket.n_elements, values.dtype)
            packed_values.unpack(packed, index, mean, ends)
            buffer.copy_(mean)
        if kept.left_out is not None:
            site.note_finite(buffer)
            self._session.feedback.stage_bucket(bucket, site.divide(kept.left_out, self._session.loss_scale()))

    def _send_plainly(self, bucket: Bucket, is_redone: bool = False) -> None:
        note = self._policy.note_redone if is_redone else self._policy.note_too_dense
        note(bucket)
        self._site.mean(bucket.buffer, bucket.record)
        if is_redone or self._policy.error_feedback:
            self._site.note_finite(bucket.buffer)

    def _commit(self) -> None:
        super()._commit()
        self._policy.dense.end_step(is_finite=True)

    def _discard(self) -> None:
        super()._discard()
        self._policy.dense.end_step(is_finite=False)
