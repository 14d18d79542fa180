"""Steps on a device: what the lane enqueues, and what it does with what the device has found.

No host waits within a step. Whether residuals are kept, which on a CPU is known when the step ends, is read when the next
one begins, by when the device has long been past it.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import Any

import torch

from gradwire.codecs.quantised import Quantised
from gradwire.codecs.ternary import Ternary
from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.core.site import DeviceSite, ResidentBucket
from gradwire.errors import Unsupported
from gradwire.exchange.on_device import DeviceOwners
from gradwire.gpu.kernels import kernels_on
from gradwire.schemes.apart import Apart
from gradwire.schemes.base import Scheme
from gradwire.schemes.compressed import Compressed
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


class StepsOnDevice(ABC):
    """One attachment's compressed steps on its device; used on the lane.

    Attributes:
        n_not_finite: steps in which something was not finite: all ranks got NaN, and kept their residuals.
        waits_in_step: whether the lane waits for the device within a step, and so for peers: each bucket then looks
            whether they are all there.
    """

    acts_alone = False  # whether one rank's gradient is changed too
    waits_in_step = False

    def __init__(self, session: Session, site: DeviceSite) -> None:
        self._session, self._site = session, site
        self._kept = [session.feedback]  # what counts from the end of a step on
        self._check = StepCheck(session.communicator)
        self.n_not_finite = 0

    def begin(self) -> None:
        """Before the first bucket of a step, be the one before over or given up."""
        self.settle()
        self._discard()
        self._site.begin_step()

    def reduce(
        self, bucket: Bucket, resident: ResidentBucket, preamble: Preamble, is_plain: bool, facts: tuple[Any, ...]
    ) -> None:
        """Enqueue a bucket's reduction: plainly, or with the `facts` that `_enqueue` takes."""
        if self._session.communicator.world_size == 1 and not self.acts_alone:
            return
        if bucket.is_last or self.waits_in_step:
            self._check.start(preamble, bucket.record)
            self._check.fail_early()
        if bucket.n_elements == 0:
            return
        with resident.at_work():
            if is_plain:
                self._site.mean(bucket.buffer, bucket.record)
            else:
                self._enqueue(bucket, *facts)

    @abstractmethod
    def _enqueue(self, bucket: Bucket, *facts: Any) -> None:
        """Replace the bucket by its mean, with the site's stream current."""

    def end(self) -> None:
        """After the last bucket."""
        self._site.end_step()

    def settle(self) -> None:
        """Wait for the step that ended last, and keep its residuals if all of it was finite. Raises: CorruptMessage."""
        found = self._site.found()
        if found is None:
            return
        self._raise_error(found.error)
        if found.is_finite:
            with self._site.stream:
                self._commit()
            return
        self._discard()
        if not self.n_not_finite:
            _log.warning("gradwire: a gradient was not finite: all ranks get NaN for the messages that it was in")
        self.n_not_finite += 1

    def _commit(self) -> None:
        """The step counts; with the site's stream current."""
        for kept in self._kept:
            kept.commit()

    def _discard(self) -> None:
        """The step does not count, or was given up half-way."""
        for kept in self._kept:
            kept.discard()

    def _raise_error(self, code: int) -> None:
        """Raise what the error word of messages says, if anything."""


class ApartOnDevice(StepsOnDevice):
    """Steps that compress some of a bucket's tensors, as a bucket of their own.

    Attributes:
        apart: what is sent of these.
    """

    apart = Apart()

    @abstractmethod
    def _compress(self, bucket: Bucket) -> None:
        """Replace all of the bucket by its mean, compressed, with the site's stream current."""

    def _compress_apart(self, bucket: Bucket, chosen: Selection) -> None:
        """The chosen tensors compressed, as a bucket of their own, and the others plainly."""
        site, flat = self._site, bucket.buffer
        if chosen.n_compressed:
            part = Bucket(
                site.scratch("chosen", chosen.n_compressed, self.apart.part_dtype(bucket)), chosen.slots, chosen.offsets,
                index=bucket.index, step=bucket.step, record=bucket.record, resident=bucket.resident,
            )  # fmt: skip
            self.apart.fill(part, bucket, chosen)
            self._compress(part)
            self.apart.take(part, bucket, chosen)
        if chosen.n_raw:
            raw = site.scratch("others", chosen.n_raw, flat.dtype)
            torch.cat([run.in_bucket(flat) for run in chosen.raw_runs], out=raw)
            site.mean(raw, bucket.record)
            site.note_finite(raw)
            for run in chosen.raw_runs:
                run.in_bucket(flat).copy_(run.in_fused(raw))


class QuantisedOnDevice(ApartOnDevice):
    """Steps of a quantiser, whose messages go to each part's owner and back.

    Raises: Unsupported (DDP looks for unused parameters; a codec without kernels).
    """

    def __init__(
        self,
        session: Session,
        site: DeviceSite,
        codec: Quantised,
        error_feedback: bool,
        chunk_elements: int,
        pulls_raw: bool,
    ) -> None:
        refuse_unused_parameters(session)
        super().__init__(session, site)
        self._error_feedback = error_feedback
        self._owners = DeviceOwners(site, codec, session.communicator, chunk_elements, pulls_raw)

    def _enqueue(self, bucket: Bucket, *facts: Any) -> None:
        """facts: which tensors are compressed, or None: the bucket, as it lies."""
        (chosen,) = facts
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

    def _raise_error(self, code: int) -> None:
        self._owners.raise_error(code)


class SummedOnDevice(StepsOnDevice):
    """Steps of integers by scales that all ranks share, summed by the backend. Raises: Unsupported (no kernels here)."""

    def __init__(self, session: Session, site: DeviceSite, codec: Ternary, per: str) -> None:
        super().__init__(session, site)
        self._codec, self._per = codec, per
        kernels_on(site.device)  # raises, where there are none

    def _enqueue(self, bucket: Bucket, *facts: Any) -> None:
        site, record, codec, values = self._site, bucket.record, self._codec, bucket.buffer
        rank, world = self._session.communicator.rank, self._session.communicator.world_size
        shares = codec.share(bucket.n_elements, spans_of_scales(bucket, self._per), site.device)
        scales = site.scratch("scales", shares.n_spans, torch.float32)
        codec.write_scales(values, shares, scales)
        site.largest(scales.view(torch.int32), record)
        site.note_finite(scales)
        counts = site.scratch("counts", codec.count_bytes(bucket.n_elements, world), torch.uint8)
        codec.write_counts(values, shares, scales, world, counts, bucket.draw(rank))
        site.sum(counts, record)
        codec.read_counts(counts, shares, scales, world, values)


class Placing(Scheme):
    """A scheme that works in host memory as its other base does, or on the device as `_go_to` says."""

    works_on_device = True
    _on_device: StepsOnDevice | None = None

    @abstractmethod
    def _go_to(self, site: DeviceSite, session: Session) -> StepsOnDevice:
        """How it works on the device. Raises: Unsupported (what needs the host)."""

    def _facts_on_device(self, bucket: Bucket) -> tuple[Any, ...]:
        """What its compressed steps on the device have to know of a bucket."""
        return ()

    def bind(self, session: Session) -> None:
        super().bind(session)
        self._on_device = self._go_to(session.site, session) if session.site is not None else None

    def begin_step(self, step: int) -> None:
        if self._on_device is not None:  # first: what the step before has staged is kept before anything is discarded
            self.session.communicator.submit(self._on_device.begin)
        super().begin_step(step)

    def reduce(self, bucket: Bucket) -> torch.futures.Future:
        if self._on_device is None or bucket.resident is None:
            return super().reduce(bucket)  # type: ignore[safe-super]  # it is the other base that is asked
        is_plain = self._is_plain(bucket)
        facts = () if is_plain else self._facts_on_device(bucket)
        submit, reduce = self.session.communicator.submit, self._on_device.reduce
        return submit(reduce, bucket, bucket.resident, self.preamble(bucket), is_plain, facts)

    def end_step(self, step: int) -> None:
        if self._on_device is None:
            super().end_step(step)
        else:
            self._on_device.end()

    def settle(self) -> None:
        if self._on_device is not None:
            self._on_device.settle()

    def stats(self) -> dict[str, Any]:
        """As every scheme's; on a device, the steps that were not finite."""
        return super().stats() if self._on_device is None else {"n_steps_not_finite": self._on_device.n_not_finite}

    def close(self) -> None:
        self._on_device = None
        super().close()


class Placed(Placing, Compressed):
    """`Placing`, of a scheme that is `Compressed` in host memory."""


def spans_of_scales(bucket: Bucket, per: str) -> list[tuple[int, int]]:
    """What shares a scale: by "layer" each tensor, by "bucket" (or without slots) all of it."""
    return bucket.spans if per == "layer" and bucket.slots else [(0, bucket.n_elements)]
