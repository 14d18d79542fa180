"""The frame of most schemes: a codec, an exchange and, where the codec loses something, error feedback.

A bucket is sent compressed; if a gradient of any rank is not finite, or too large with its residual or in the sum, it is sent
again uncompressed, so that a GradScaler sees it. Residuals are committed once a step, if all its means are finite.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import Any

import torch

from gradwire.core.bucket import Bucket
from gradwire.core.checkpoint import not_the_state
from gradwire.core.feedback import Feedback, Withheld, holds_nonzero
from gradwire.exchange.patterns import Exchange, Values
from gradwire.schemes.base import Scheme
from gradwire.wire.wire import Wire

_log = logging.getLogger(__name__)
FALLBACK = "non-finite gradient: this bucket was sent uncompressed"


class Redoing(Scheme):
    """Reduces bucket by bucket on the lane, and those that are not finite once more, plainly.

    With one rank the mean is the gradient: nothing is sent, so nothing is left out.
    """

    acts_alone = False  # whether one rank's gradient is changed too

    def __init__(self, error_feedback: bool) -> None:
        self.error_feedback = error_feedback
        self._is_step_finite = True
        self._n_redone = 0

    def begin_step(self, step: int) -> None:
        self.session.communicator.submit(self._begin_on_lane)

    def _begin_on_lane(self) -> None:
        """Nothing of a backward pass that was given up half-way may live on."""
        self.session.feedback.discard()
        self._is_step_finite = True

    def reduce(self, bucket: Bucket) -> torch.futures.Future:
        return self.session.communicator.submit(self._reduce_on_lane, bucket)

    def _reduce_on_lane(self, bucket: Bucket) -> None:
        wire = self.wire(bucket)
        if bucket.n_elements == 0 or (wire.world_size == 1 and not self.acts_alone):
            return
        if wire.world_size > 1:
            self._agree_while_settling(bucket)
        if self._is_plain(bucket):
            wire.mean_plainly(bucket.buffer)
        elif not self._send(bucket, wire):
            self._redo(bucket, wire)

    @abstractmethod
    def _send(self, bucket: Bucket, wire: Wire) -> bool:
        """Replace the bucket by its reduction; False, on all ranks, and the bucket as it was, if it is not finite."""

    def _redo(self, bucket: Bucket, wire: Wire) -> None:
        self._note_redone(bucket)
        wire.mean_plainly(bucket.buffer)
        self._is_step_finite &= bool(bucket.buffer.isfinite().all())
        self._forget(bucket)

    def _note_redone(self, bucket: Bucket) -> None:
        if not self._n_redone:
            _log.warning("gradwire %s: %s (step %d)", self.name, FALLBACK, bucket.step)
        self._n_redone += 1
        bucket.record.fallbacks.append(FALLBACK)

    def _forget(self, bucket: Bucket) -> None:
        """Stage nothing of a bucket that was sent plainly."""
        self.session.feedback.discard(bucket.slots)

    def end_step(self, step: int) -> None:
        if self._is_step_finite:
            self.session.feedback.commit()
        else:
            self.session.feedback.discard()

    def close(self) -> None:
        """The model is let go: what is bound again begins anew, without residuals."""
        self.session.feedback.clear()

    # ---- between steps

    def stats(self) -> dict[str, Any]:
        """Buckets that were redone uncompressed."""
        return {"n_buckets_redone": self._n_redone}

    def state_dict(self) -> dict[str, Any]:
        return {"residuals": self.session.feedback.state_by_name(self.session.slots)} if self.error_feedback else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: InvalidArgument."""
        if self.error_feedback:
            if not isinstance(state.get("residuals"), dict):
                raise not_the_state(f"scheme {self.name}", "it lacks residuals")
            self.session.feedback.load_by_name(state["residuals"], self.session.slots)


class WithMomenta(Redoing):
    """Keeps a momentum of every slot, each rank its own, which counts from the end of a step on as residuals do."""

    per_rank_state = ("residuals", "momenta")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._momenta = Feedback()

    def _begin_on_lane(self) -> None:
        super()._begin_on_lane()
        self._momenta.discard()

    def end_step(self, step: int) -> None:
        if self._is_step_finite:
            self._momenta.commit()
        else:
            self._momenta.discard()
        super().end_step(step)

    def _forget(self, bucket: Bucket) -> None:
        super()._forget(bucket)
        self._momenta.discard(bucket.slots)

    def close(self) -> None:
        super().close()
        self._momenta.clear()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "momenta": self._momenta.state_by_name(self.session.slots)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: InvalidArgument."""
        if not isinstance(state.get("momenta"), dict):
            raise not_the_state(f"scheme {self.name}", "it lacks momenta")
        super().load_state_dict(state)
        self._momenta.load_by_name(state["momenta"], self.session.slots)


class Compressed(Redoing):
    """Mean over the ranks through `payload` (a codec, of the kind that `exchange` takes) and `exchange`.

    Args:
        error_feedback: add what was not sent to the next gradient.
    """

    def __init__(self, payload: Any, exchange: Exchange, error_feedback: bool = False) -> None:
        super().__init__(bool(error_feedback))
        self.state_is_per_world = self.error_feedback
        self._payload, self._exchange = payload, exchange

    def _send(self, bucket: Bucket, wire: Wire) -> bool:
        feedback, spans = self.session.feedback, bucket.spans
        residual, unsent = feedback.pair(bucket) if self.error_feedback else (None, None)
        is_used = [holds_nonzero(bucket.buffer[start:end]) for start, end in spans]
        withheld = Withheld(spans, is_used, residual)
        try:
            values = Values(bucket, is_used, residual, unsent, self.session.loss_scale())
            reached = self._exchange.mean(self._payload, values, wire)
        finally:
            withheld.put_back()
        if reached is None:
            return False
        if unsent is not None:
            withheld.keep(unsent, reached.used_by_any, reached.counted)
            feedback.stage_bucket(bucket, unsent)
        return True


def count_of(share: float, n_elements: int) -> int:
    """How many of `n_elements` are sent: at least one, as long as there is one."""
    return min(n_elements, max(1, round(share * n_elements)))
