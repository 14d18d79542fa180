"""The frame of schemes that quantise: pushed to each part's owner, added there, and pulled, with error feedback."""

from __future__ import annotations

from typing import Any

from gradwire.codecs.quantised import Quantised
from gradwire.control.checks import choice as check_choice
from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.core.site import DeviceSite
from gradwire.errors import InvalidArgument
from gradwire.exchange.parts import QUANTISED_CHUNK_ELEMENTS
from gradwire.exchange.patterns import Owners
from gradwire.schemes.on_device import Placed, QuantisedOnDevice
from gradwire.schemes.selection import ByName
from gradwire.schemes.selective import Selective

_PULLS = ("compressed", "raw")


class QuantisedDirect(Placed, Selective):
    """Mean over the ranks of what a quantiser makes of each rank's gradient + residual.

    Each rank owns a part of the bucket, adds what the others pushed of it to its own, unquantised share, and sends the
    sum to all: quantised again, where what the message leaves out goes into the owner's residual ("compressed"), or as
    it is ("raw"). With one rank the mean is the gradient, and nothing is changed.

    Args:
        codec: the quantiser.
        error_feedback: add what messages left out to the next gradient.
        pull: how sums travel back.
        chunk_elements: values to a message.
        warmup_steps: the first steps of the training, which are reduced plainly; 0, as published. None: see `PlainFirst`.
        select: which tensors are compressed; the others are reduced plainly.
    """

    def __init__(
        self,
        codec: Quantised,
        error_feedback: bool,
        pull: str = "compressed",
        chunk_elements: int = QUANTISED_CHUNK_ELEMENTS,
        warmup_steps: int | None = 0,
        select: ByName | None = None,
    ) -> None:
        super().__init__(codec, owners_of(pull, chunk_elements), error_feedback, warmup_steps, select)
        self.codec, self.pull, self.chunk_elements = codec, pull, chunk_elements

    @property
    def configuration(self) -> dict[str, Any]:
        shared = {"error_feedback": self.error_feedback, "pull": self.pull, "chunk_elements": self.chunk_elements}
        shared |= {"scale_values": self.codec.scale_values} if self.codec.scale_values else {}
        return shared | self._selective_configuration

    # ---- on a device

    def _go_to(self, site: DeviceSite, session: Session) -> QuantisedOnDevice:
        """Raises: Unsupported (what needs the host)."""
        return QuantisedOnDevice(
            session, site, self.codec, self.error_feedback, self.chunk_elements, self.pull == "raw"
        )

    def _facts_on_device(self, bucket: Bucket) -> tuple[Any, ...]:
        return (self._choose(bucket),)


def owners_of(pull: str, chunk_elements: int) -> Owners:
    """The exchange of these options of `QuantisedDirect`. Raises: InvalidArgument."""
    check_choice("pull", pull, _PULLS)
    if chunk_elements < 1:
        raise InvalidArgument(f"chunk_elements must be at least 1, got {chunk_elements}")
    return Owners(pull == "raw", chunk_elements)


def or_none(value: int | str | None) -> Any:
    """The value; "none", as a command line says it, is None."""
    return None if value == "none" else value
