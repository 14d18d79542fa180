"""The frame of schemes that quantise: pushed to each part's owner, added there, and pulled, with error feedback."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import torch

from gradwire.codecs.quantised import Quantised
from gradwire.control.checks import choice as check_choice
from gradwire.core.bucket import Bucket
from gradwire.core.session import Session
from gradwire.core.site import DeviceSite
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.exchange.parts import QUANTISED_CHUNK_ELEMENTS
from gradwire.exchange.patterns import Owners
from gradwire.schemes.on_device import Placed, QuantisedOnDevice
from gradwire.schemes.selection import ByName, Selection
from gradwire.wire.wire import Wire

_PULLS = ("compressed", "raw")
_log = logging.getLogger(__name__)


class QuantisedDirect(Placed):
    """Mean over the ranks of what a quantiser makes of each rank's gradient + residual.

    Each rank owns a part of the bucket, adds what the others pushed of it to its own, unquantised share, and sends the
    sum to all: quantised again, where what the message leaves out goes into the owner's residual ("compressed"), or as
    it is ("raw"). With one rank the mean is the gradient, and nothing is changed.

    Args:
        codec: the quantiser.
        error_feedback: add what messages left out to the next gradient.
        pull: how sums travel back.
        chunk_elements: values to a message.
        warmup_steps: the first steps of the training, which are reduced plainly; 0, as published.
        select: which tensors are compressed; the others are reduced plainly.
    """

    # The option that says for how long steps are plain.
    settled_by: ClassVar[str] = "warmup_steps"

    def __init__(
        self,
        codec: Quantised,
        error_feedback: bool,
        pull: str = "compressed",
        chunk_elements: int = QUANTISED_CHUNK_ELEMENTS,
        warmup_steps: int = 0,
        select: ByName | None = None,
    ) -> None:
        check_choice("pull", pull, _PULLS)
        if chunk_elements < 1:
            raise InvalidArgument(f"chunk_elements must be at least 1, got {chunk_elements}")
        super().__init__(codec, Owners(pull == "raw", chunk_elements), error_feedback)
        self.codec, self.pull, self.chunk_elements = codec, pull, chunk_elements
        self.warmup_steps = check_steps("warmup_steps", warmup_steps)
        self.select = select or ByName()
        self._last_step = -1

    @property
    def configuration(self) -> dict[str, Any]:
        shared = {"error_feedback": self.error_feedback, "pull": self.pull, "chunk_elements": self.chunk_elements}
        shared |= {"warmup_steps": self.warmup_steps} if self.warmup_steps else {}
        shared |= {"scale_values": self.codec.scale_values} if self.codec.scale_values else {}
        return shared | self.select.configuration

    @property
    def settling_steps(self) -> int:
        """Steps that are reduced plainly."""
        return self.warmup_steps

    @property
    def is_settled(self) -> bool:
        """Whether the next step is compressed."""
        return self._last_step + 1 >= self.warmup_steps

    def bind(self, session: Session) -> None:
        """As every scheme's; the log has the plain steps. Raises: InvalidArgument (names of no tensor)."""
        self._last_step = -1
        self.select.bind(session)
        super().bind(session)
        if self.settling_steps:
            _log.info("gradwire %s: steps before %d are reduced plainly", self.name, self.settling_steps)

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        self._last_step = step

    # ---- on a device

    def _go_to(self, site: DeviceSite, session: Session) -> QuantisedOnDevice:
        """Raises: Unsupported (what needs the host)."""
        if self.pull == "raw":
            raise Unsupported(f'{self.name} with pull="raw" works on host memory: leave that or placement out')
        return QuantisedOnDevice(session, site, self.codec, self.error_feedback, self.chunk_elements)

    def _facts_on_device(self, bucket: Bucket) -> tuple[Any, ...]:
        return bucket.step < self.settling_steps, self._choose(bucket)

    # ---- in host memory

    def _send(self, bucket: Bucket, wire: Wire) -> bool:
        if bucket.step < self.warmup_steps:
            wire.mean_plainly(bucket.buffer)
            return True
        chosen = self._choose(bucket)
        return super()._send(bucket, wire) if chosen is None else self._send_apart(bucket, chosen, wire)

    def _choose(self, bucket: Bucket) -> Selection | None:
        """Which of the bucket's tensors are compressed; None: the bucket, as it lies."""
        chosen = Selection(bucket, self.select) if self.select else None
        return chosen if chosen is not None and chosen.raw else None

    def _part_dtype(self, bucket: Bucket) -> torch.dtype:
        """Of what is sent for the chosen tensors."""
        return bucket.buffer.dtype

    def _fill(self, fused: torch.Tensor, bucket: Bucket, chosen: Selection) -> None:
        """Write what is sent for the chosen tensors, one after the other, to `fused`."""
        torch.cat([run.in_bucket(bucket.buffer) for run in chosen.compressed_runs], out=fused)

    def _take(self, fused: torch.Tensor, bucket: Bucket, chosen: Selection) -> None:
        """Write the means in `fused` to where the chosen tensors lie."""
        for run in chosen.compressed_runs:
            run.in_bucket(bucket.buffer).copy_(run.in_fused(fused))

    def _send_apart(self, bucket: Bucket, chosen: Selection, wire: Wire) -> bool:
        """The chosen tensors compressed, as a bucket of their own, and the others plainly."""
        fused = wire.scratch("chosen", chosen.n_compressed, self._part_dtype(bucket))
        if chosen.n_compressed:
            self._fill(fused, bucket, chosen)
            part = Bucket(
                fused, chosen.slots, chosen.offsets, index=bucket.index, step=bucket.step, record=bucket.record
            )
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
            self._take(fused, bucket, chosen)
        return True

    def close(self) -> None:
        """As every scheme's; tells of a training that was over before anything was compressed."""
        if self._last_step >= 0 and not self.is_settled:
            _log.warning(
                "gradwire %s: nothing was compressed: the last step was %d, and those before %d are plain; lower %s",
                self.name, self._last_step, self.settling_steps, self.settled_by,
            )  # fmt: skip
        super().close()


def check_steps(name: str, steps: Any) -> int:
    """A count of steps, from 0. Raises: InvalidArgument."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise InvalidArgument(f"{name} must be a count, got {steps!r}")
    return steps


def or_none(value: int | str | None) -> Any:
    """The value; "none", as a command line says it, is None."""
    return None if value == "none" else value
