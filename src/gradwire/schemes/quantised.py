"""The frame of schemes that quantise: pushed to each part's owner, added there, and pulled, with error feedback."""

from __future__ import annotations

from typing import Any

from gradwire.codecs.quantised import Quantised
from gradwire.core.bucket import Bucket
from gradwire.errors import InvalidArgument
from gradwire.exchange.parts import QUANTISED_CHUNK_ELEMENTS
from gradwire.exchange.quantised import Exchange, quantised_mean
from gradwire.schemes.optimistic import Optimistic
from gradwire.schemes.usage import Withheld, bucket_spans, holds_nonzero, stream_of

_PULLS = ("compressed", "raw")


class QuantisedDirect(Optimistic):
    """Mean over the ranks of what a quantiser makes of each rank's gradient + residual.

    Each rank owns a part of the bucket, adds what the others pushed of it to its own, unquantised share, and sends the
    sum to all: quantised again, where what the message leaves out goes into the owner's residual ("compressed"), or as
    it is ("raw"). With one rank the mean is the gradient, and nothing is changed.

    Args:
        codec: the quantiser.
        error_feedback: add what messages left out to the next gradient.
        pull: how sums travel back.
        chunk_elements: values to a message; each message has its own scales.
    """

    state_is_per_world = True

    def __init__(
        self,
        codec: Quantised,
        error_feedback: bool,
        pull: str = "compressed",
        chunk_elements: int = QUANTISED_CHUNK_ELEMENTS,
    ) -> None:
        super().__init__(bool(error_feedback))
        if pull not in _PULLS:
            raise InvalidArgument(f"pull is one of {', '.join(_PULLS)}, not {pull!r}")
        if chunk_elements < 1:
            raise InvalidArgument(f"chunk_elements must be at least 1, got {chunk_elements}")
        self.codec = codec
        self.pull = pull
        self.chunk_elements = chunk_elements

    @property
    def configuration(self) -> dict[str, Any]:
        return {"error_feedback": self.error_feedback, "pull": self.pull, "chunk_elements": self.chunk_elements}

    def _send(self, bucket: Bucket) -> bool:
        communicator = self.session.communicator
        if communicator.world_size == 1:  # the mean of one is itself: nothing to send, so nothing to leave out
            return True
        residual, new_residual = self._residual.flat_pair(bucket) if self.error_feedback else (None, None)
        spans = bucket_spans(bucket)
        is_used = [holds_nonzero(bucket.buffer[start:end]) for start, end in spans]
        withheld = Withheld(spans, is_used, residual)
        results = communicator.scratch("quantised results", bucket.original_bytes).view(bucket.buffer.dtype)
        exchange = Exchange(
            bucket.buffer,
            results,
            residual,
            new_residual,
            self.session.loss_scale(),
            spans,
            is_used,
            lambda part, chunk, is_final: stream_of(bucket, communicator.rank, part, chunk, is_final),
            self.pull == "raw",
        )
        try:
            used_by_any = quantised_mean(
                communicator, self.codec, exchange, self.facts(bucket), bucket.record, self.chunk_elements
            )
        finally:
            withheld.put_back(residual)
        if used_by_any is None:
            return False
        if new_residual is not None:
            withheld.keep(new_residual, used_by_any, self._owned(bucket))
            self._residual.stage_flat(bucket)
        bucket.buffer.copy_(results)
        return True

    def _owned(self, bucket: Bucket) -> tuple[int, int]:
        """The part whose sums this rank sends, as the collective cuts it."""
        world, rank = self.session.communicator.world_size, self.session.communicator.rank
        return bucket.n_elements * rank // world, bucket.n_elements * (rank + 1) // world
