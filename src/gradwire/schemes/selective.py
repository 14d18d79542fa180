"""The frame of schemes that compress some of a bucket's tensors, from some step on; the others are reduced plainly."""

from __future__ import annotations

from typing import Any

import torch

from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.exchange.patterns import Exchange
from gradwire.schemes.apart import Apart
from gradwire.schemes.compressed import Compressed
from gradwire.schemes.plain_first import PlainFirst
from gradwire.schemes.selection import ByName, Selection
from gradwire.wire.wire import Wire


class Selective(Apart, PlainFirst, Compressed):
    """Mean over the ranks through `payload` and `exchange`, of the tensors that are chosen.

    Args:
        error_feedback: add what was not sent to the next gradient.
        warmup_steps: the first steps of the training, which are reduced plainly; 0: none. None: see `PlainFirst`.
        select: which tensors are compressed.
    """

    def __init__(
        self,
        payload: Any,
        exchange: Exchange,
        error_feedback: bool,
        warmup_steps: int | None = 0,
        select: ByName | None = None,
    ) -> None:
        super().__init__(payload, exchange, error_feedback)
        self._ask_plain_steps(warmup_steps)
        self.select = select or ByName()

    @property
    def _selective_configuration(self) -> dict[str, Any]:
        """Of the options of `Selective`, those that are not as published."""
        return ({self.settled_by: self.n_plain_steps} if self.n_plain_steps else {}) | self.select.configuration

    def bind(self, session: Session) -> None:
        """As every scheme's. Raises: InvalidArgument (names of no tensor)."""
        self.select.bind(session)
        super().bind(session)

    # ---- one bucket

    def _send(self, bucket: Bucket, wire: Wire) -> bool:
        chosen = self._choose(bucket)
        return super()._send(bucket, wire) if chosen is None else self._send_apart(bucket, chosen, wire)

    def _choose(self, bucket: Bucket) -> Selection | None:
        """Which of the bucket's tensors are compressed; None: the bucket, as it lies."""
        chosen = Selection(bucket, self.select) if self.select else None
        return chosen if chosen is not None and chosen.raw else None

    def _send_apart(self, bucket: Bucket, chosen: Selection, wire: Wire) -> bool:
        """The chosen tensors compressed, as a bucket of their own, and the others plainly."""
        fused = wire.scratch("chosen", chosen.n_compressed, self.part_dtype(bucket))
        part = Bucket(fused, chosen.slots, chosen.offsets, index=bucket.index, step=bucket.step, record=bucket.record)
        if chosen.n_compressed:
            self.fill(part, bucket, chosen)
            if not super()._send(part, wire):
                return False
        if chosen.n_raw:
            raw = wire.scratch("others", chosen.n_raw, bucket.buffer.dtype)
            torch.cat([run.in_bucket(bucket.buffer) for run in chosen.raw_runs], out=raw)
            wire.mean_plainly(raw)
            self._is_step_finite &= bool(raw.isfinite().all())
            for run in chosen.raw_runs:
                run.in_bucket(bucket.buffer).copy_(run.in_fused(raw))
        if chosen.n_compressed:
            self.take(part, bucket, chosen)
        return True
