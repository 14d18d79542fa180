"""The frame of schemes that quantise: pushed to each part's owner, added there, and pulled, with error feedback."""

from __future__ import annotations

from typing import Any

from gradwire.codecs.quantised import Quantised
from gradwire.errors import InvalidArgument
from gradwire.exchange.parts import QUANTISED_CHUNK_ELEMENTS
from gradwire.exchange.patterns import Owners
from gradwire.schemes.compressed import Compressed

_PULLS = ("compressed", "raw")


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
    """

    def __init__(
        self,
        codec: Quantised,
        error_feedback: bool,
        pull: str = "compressed",
        chunk_elements: int = QUANTISED_CHUNK_ELEMENTS,
    ) -> None:
        if pull not in _PULLS:
            raise InvalidArgument(f"pull is one of {', '.join(_PULLS)}, not {pull!r}")
        if chunk_elements < 1:
            raise InvalidArgument(f"chunk_elements must be at least 1, got {chunk_elements}")
        super().__init__(codec, Owners(pull == "raw", chunk_elements), error_feedback)
        self.codec, self.pull, self.chunk_elements = codec, pull, chunk_elements

    @property
    def configuration(self) -> dict[str, Any]:
        return {"error_feedback": self.error_feedback, "pull": self.pull, "chunk_elements": self.chunk_elements}
