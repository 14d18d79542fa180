"""The frame of schemes that send one bucket at a time: optimistically, with error feedback, plainly if not finite."""

from __future__ import annotations

import logging
import time
import zlib
from abc import abstractmethod
from typing import Any

import torch

from gradwire import _native
from gradwire.core.bucket import Bucket
from gradwire.core.residual import Residual
from gradwire.errors import CorruptMessage, InvalidArgument, RankMismatch
from gradwire.schemes.base import Scheme
from gradwire.schemes.plain import all_reduce_plainly
from gradwire.wire.preamble import compare_preambles

_log = logging.getLogger(__name__)
_FALLBACK = "non-finite gradient: this bucket was sent uncompressed"
_HEADER_WORDS = 3  # int32: checksum of what all ranks must share, 1 if the gradient is not finite, CRC32C of the rest


class Optimistic(Scheme):
    """Reduces every bucket on the lane; residuals are committed once a step, if all of it was finite on all ranks."""

    def __init__(self, error_feedback: bool) -> None:
        self.error_feedback = error_feedback
        self._residual = Residual()
        self._is_step_finite = True
        self._n_redone = 0

    def reduce(self, bucket: Bucket) -> torch.futures.Future:
        return self.session.communicator.submit(self._reduce_on_lane, bucket)

    def _reduce_on_lane(self, bucket: Bucket) -> None:
        if bucket.index == 0:
            self._residual.discard()
            self._is_step_finite = True
        if bucket.n_elements == 0 or self._send(bucket):
            return
        if not self._n_redone:
            _log.warning("gradwire %s: %s (step %d)", self.name, _FALLBACK, bucket.step)
        self._n_redone += 1
        self._is_step_finite = False
        bucket.record.fallbacks.append(_FALLBACK)
        all_reduce_plainly(self.session.communicator, bucket)

    @abstractmethod
    def _send(self, bucket: Bucket) -> bool:
        """Replace the bucket by its reduction; False, on all ranks, and the bucket as it was, if it is not finite."""

    def end_step(self, step: int) -> None:
        if self._is_step_finite:
            self._residual.commit()
        else:
            self._residual.discard()

    # ---- error feedback

    def _corrected(self, bucket: Bucket) -> torch.Tensor:
        """(n,) float32, scratch: gradient + residual."""
        corrected = self.session.communicator.scratch("corrected", 4 * bucket.n_elements).view(torch.float32)
        self._residual.write_sum(bucket, corrected, self.session.loss_scale())
        return corrected

    def _stage(self, bucket: Bucket, left_out: torch.Tensor) -> None:
        """Keep `left_out` (n,), which is changed, for the next step; before the bucket is overwritten."""
        if self.error_feedback:
            loss_scale = self.session.loss_scale()
            self._residual.keep_unused(bucket, left_out, loss_scale)
            self._residual.stage(bucket, left_out, loss_scale)

    # ---- messages that every rank gets of every rank

    def _gather(self, bucket: Bucket, payload: torch.Tensor, is_finite: bool) -> torch.Tensor | None:
        """(world, n) int32: every rank's `payload` (n,) int32; None, on all ranks, if a rank's gradient is not finite.

        Raises: RankMismatch if ranks disagree on scheme, options, model or step; CorruptMessage if a payload is not
        what its rank sent.
        """
        communicator = self.session.communicator
        message = torch.empty(_HEADER_WORDS + payload.numel(), dtype=torch.int32)
        message[0] = self._facts_of(bucket)
        message[1] = int(not is_finite)
        message[_HEADER_WORDS:] = payload
        message[2] = _checksum(message[_HEADER_WORDS:])
        started = time.perf_counter_ns()
        messages = communicator.all_gather(message)
        bucket.record.add("communicate", started, time.perf_counter_ns())
        n_bytes = (communicator.world_size - 1) * 4 * message.numel()
        bucket.record.count_sent(n_bytes)
        bucket.record.count_received(n_bytes)
        if bool((messages[:, 0] != messages[0, 0]).any()):
            self._name_mismatch(bucket)
        for rank, received in enumerate(messages):
            if int(received[2]) != _checksum(received[_HEADER_WORDS:]):
                raise CorruptMessage(
                    f"the message of rank {rank} for bucket {bucket.index} of step {bucket.step} was altered on its way "
                    "(checksum); restart from the last checkpoint"
                )
        return None if bool(messages[:, 1].any()) else messages[:, _HEADER_WORDS:]

    def _facts_of(self, bucket: Bucket) -> int:
        """31 bits over what all ranks must share."""
        facts = (self.configuration_hash, bucket.layout_hash, bucket.step, bucket.index)
        return zlib.crc32(repr(facts).encode()) & 0x7FFFFFFF

    def _name_mismatch(self, bucket: Bucket) -> None:
        """The full exchange, which every rank comes to. Raises: RankMismatch."""
        compare_preambles(self.session.communicator, self.preamble(bucket), bucket.record)
        raise RankMismatch(
            f"ranks sent different checksums for bucket {bucket.index} of step {bucket.step}, but agree on scheme, "
            "options, model and step: a message was altered on its way; restart from the last checkpoint"
        )

    def close(self) -> None:
        """The model is let go: what is bound again begins anew, without residuals."""
        self._residual = Residual()

    # ---- between steps

    def stats(self) -> dict[str, Any]:
        """Buckets that were redone uncompressed."""
        return {"n_buckets_redone": self._n_redone}

    def state_dict(self) -> dict[str, Any]:
        return {"residuals": self._residual.state_by_name(self.session.names)} if self.error_feedback else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises: InvalidArgument."""
        if self.error_feedback:
            if not isinstance(state.get("residuals"), dict):
                raise InvalidArgument(f"this is not the state of scheme {self.name}: it lacks residuals")
            self._residual.load_by_name(state["residuals"], self.session.names)


def _checksum(payload: torch.Tensor) -> int:
    """CRC32C of (n,) int32, as an int32 holds it."""
    crc = _native.crc32c(payload.view(torch.uint8))
    return crc - (1 << 32) if crc >> 31 else crc


def check_share(name: str, share: float) -> float:
    """`share` if it is in (0, 1]. Raises: InvalidArgument."""
    if not 0 < share <= 1:
        raise InvalidArgument(f"{name} must be more than 0 and at most 1, got {share}")
    return float(share)


def count_of(share: float, n_elements: int) -> int:
    """How many of `n_elements` are sent: at least one, as long as there is one."""
    return min(n_elements, max(1, round(share * n_elements)))
