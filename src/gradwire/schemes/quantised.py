"""The frame of schemes that quantise: pushed to each part's owner, added there, and pulled, with error feedback."""

from __future__ import annotations

import logging
from typing import Any

from gradwire.codecs.quantised import Quantised
from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.errors import InvalidArgument
from gradwire.exchange.parts import QUANTISED_CHUNK_ELEMENTS
from gradwire.exchange.patterns import Owners
from gradwire.schemes.compressed import Compressed
from gradwire.wire.wire import Wire

_PULLS = ("compressed", "raw")
_log = logging.getLogger(__name__)


class QuantisedDirect(Compressed):
    """Mean over the ranks of what a quantiser makes of each rank's gradient + residual.

    Each rank owns a part of the bucket, adds what the others pushed of it to its own, unquantised share, and sends the
    sum to all: quantised again, where what the message leaves out goes into the owner's residual ("compressed"), or as
    it is ("raw"). With one rank the mean is the gradient, and nothing is changed.

    Args:
        codec: the quantiser.
        error_feedback: add what messages left out to the next gradient.
        pull: how sums travel back.
        chunk_elements: values to a message; each message has its own scales.
        warmup_steps: the first steps of the training, which are reduced plainly; 0, as published.
    """

    def __init__(
        self,
        codec: Quantised,
        error_feedback: bool,
        pull: str = "compressed",
        chunk_elements: int = QUANTISED_CHUNK_ELEMENTS,
        warmup_steps: int = 0,
    ) -> None:
        if pull not in _PULLS:
            raise InvalidArgument(f"pull is one of {', '.join(_PULLS)}, not {pull!r}")
        if chunk_elements < 1:
            raise InvalidArgument(f"chunk_elements must be at least 1, got {chunk_elements}")
        if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 0:
            raise InvalidArgument(f"warmup_steps must be a count, got {warmup_steps!r}")
        super().__init__(codec, Owners(pull == "raw", chunk_elements), error_feedback)
        self.codec, self.pull, self.chunk_elements = codec, pull, chunk_elements
        self.warmup_steps = warmup_steps
        self._last_step = -1

    @property
    def configuration(self) -> dict[str, Any]:
        shared = {"error_feedback": self.error_feedback, "pull": self.pull, "chunk_elements": self.chunk_elements}
        return shared | ({"warmup_steps": self.warmup_steps} if self.warmup_steps else {})

    @property
    def settling_steps(self) -> int:
        """Steps that are reduced plainly."""
        return self.warmup_steps

    @property
    def is_settled(self) -> bool:
        """Whether the next step is compressed."""
        return self._last_step + 1 >= self.warmup_steps

    def bind(self, session: Session) -> None:
        """As every scheme's; names the plain steps in the log."""
        self._last_step = -1
        super().bind(session)
        if self.warmup_steps:
            _log.info("gradwire %s: steps before %d are reduced plainly", self.name, self.warmup_steps)

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self._last_step = step

    def _send(self, bucket: Bucket, wire: Wire) -> bool:
        if bucket.step >= self.warmup_steps:
            return super()._send(bucket, wire)
        wire.mean_plainly(bucket.buffer)
        return True

    def close(self) -> None:
        """As every scheme's; tells of a training that was over before anything was compressed."""
        if 0 <= self._last_step < self.warmup_steps:
            _log.warning(
                "gradwire %s: nothing was compressed: the last step was %d, and those before %d are plain; lower warmup_steps",
                self.name, self._last_step, self.warmup_steps,
            )  # fmt: skip
        super().close()
