"""Quantised steps on a device: what the lane enqueues, and what it does with what the device has found.

No host waits within a step. Whether residuals are kept, which on a CPU is known when the step ends, is read when the next
one begins, by when the device has long been past it.
"""

from __future__ import annotations

import logging

import torch

from gradwire.codecs.quantised import Quantised
from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.core.site import DeviceSite, ResidentBucket
from gradwire.errors import Unsupported
from gradwire.exchange.on_device import DeviceOwners
from gradwire.schemes.selection import Selection
from gradwire.wire.preamble import Preamble
from gradwire.wire.step_check import StepCheck

_log = logging.getLogger(__name__)


def refuse_unused_parameters(session: Session) -> None:
    """Raises: Unsupported (DDP looks for unused parameters)."""
    if getattr(session.module, "find_unused_parameters", False):
        raise Unsupported(
            "find_unused_parameters=True: which parameters a rank used is known to the host only; leave placement out"
        )


class QuantisedOnDevice:
    """One attachment's quantised steps on its device; used on the lane.

    Raises: Unsupported (DDP looks for unused parameters; a codec without kernels).

    Attributes:
        n_not_finite: steps in which something was not finite: all ranks got NaN, and kept their residuals.
    """

    def __init__(
        self, session: Session, site: DeviceSite, codec: Quantised, error_feedback: bool, chunk_elements: int
    ) -> None:
        refuse_unused_parameters(session)
        self._session, self._site, self._error_feedback = session, site, error_feedback
        self._owners = DeviceOwners(site, codec, session.communicator, chunk_elements)
        self._check = StepCheck(session.communicator)
        self.n_not_finite = 0

    def begin(self) -> None:
        """Before the first bucket of a step, be the one before over or given up."""
        self.settle()
        self._session.feedback.discard()
        self._site.begin_step()

    def reduce(
        self,
        bucket: Bucket,
        resident: ResidentBucket,
        preamble: Preamble,
        is_plain: bool,
        chosen: Selection | None,
    ) -> None:
        """Enqueue a bucket's reduction.

        Args:
            is_plain: nothing is compressed in this step. chosen: which tensors are; None: the bucket, as it lies.
        """
        if self._session.communicator.world_size == 1:
            return
        if bucket.is_last:
            self._check.start(preamble, bucket.record)
            self._check.fail_early()
        if bucket.n_elements == 0:
            return
        with resident.at_work() as site:
            if is_plain:
                site.mean(bucket.buffer, bucket.record)
                return
            if chosen is None:
                self._compress(bucket)
            else:
                self._compress_apart(bucket, chosen)

    def _compress(self, bucket: Bucket) -> None:
        feedback = self._session.feedback
        residual, unsent = feedback.pair(bucket) if self._error_feedback else (None, None)
        n_bytes = self._owners.mean(bucket, residual, unsent, self._session.loss_scale())
        bucket.record.count_exchanged(n_bytes)
        if unsent is not None:
            feedback.stage_bucket(bucket, unsent)

    def _compress_apart(self, bucket: Bucket, chosen: Selection) -> None:
        """The chosen tensors compressed, as a bucket of their own, and the others plainly."""
        site, flat, dtype = self._site, bucket.buffer, bucket.buffer.dtype
        if chosen.n_compressed:
            fused = site.scratch("chosen", chosen.n_compressed, dtype)
            torch.cat([run.in_bucket(flat) for run in chosen.compressed_runs], out=fused)
            part = Bucket(
                fused, chosen.slots, chosen.offsets,
                index=bucket.index, step=bucket.step, record=bucket.record, resident=bucket.resident,
            )  # fmt: skip
            self._compress(part)
            for run in chosen.compressed_runs:
                run.in_bucket(flat).copy_(run.in_fused(fused))
        if chosen.n_raw:
            raw = site.scratch("others", chosen.n_raw, dtype)
            torch.cat([run.in_bucket(flat) for run in chosen.raw_runs], out=raw)
            site.mean(raw, bucket.record)
            site.note_finite(raw)
            for run in chosen.raw_runs:
                run.in_bucket(flat).copy_(run.in_fused(raw))

    def end(self) -> None:
        """After the last bucket."""
        self._site.end_step()

    def settle(self) -> None:
        """Wait for the step that ended last, and keep its residuals if all of it was finite. Raises: CorruptMessage."""
        found = self._site.found()
        if found is None:
            return
        self._owners.raise_error(found.error)
        if found.is_finite:
            with self._site.stream:
                self._session.feedback.commit()
            return
        self._session.feedback.discard()
        if not self.n_not_finite:
            _log.warning("gradwire: a gradient was not finite: all ranks get NaN for the messages that it was in")
        self.n_not_finite += 1
