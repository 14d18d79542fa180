"""One bucket's end of the group: the one place that counts its bytes and times and lets its messages say what ranks share.

Three collectives, each with its own way to carry what ranks must agree on (scheme, options, layout, step) and whether a
gradient was not finite: in a message's head, under a maximum, and as bits in a sum of floats. All ranks read the same
numbers, so all come to the same verdict.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from gradwire import _native
from gradwire.errors import CorruptMessage, RankMismatch
from gradwire.telemetry.recorder import BucketRecord
from gradwire.wire.communicator import Communicator, ring_bytes
from gradwire.wire.facts import Facts
from gradwire.wire.preamble import Preamble, compare_preambles

_HEAD_WORDS = 3  # int32: checksum of the facts, 1 if the gradient is not finite, CRC32C of the rest
_FACT_BITS = 31
_INFINITY = 0x7F80_0000  # float32: patterns from here on are not finite


class Wire:
    """One rank's end of the exchange of one bucket in one step; used on the lane.

    Attributes:
        facts: what ranks must share, for streams whose frames compare it.
        checksum: 31 bits over the same, for collectives.
    """

    def __init__(self, communicator: Communicator, preamble: Preamble, record: BucketRecord) -> None:
        self.communicator, self.record = communicator, record
        self.rank, self.world_size = communicator.rank, communicator.world_size
        self.facts = Facts(preamble.configuration, preamble.layout, preamble.step & 0xFFFFFFFF, preamble.bucket)
        self.checksum = zlib.crc32(repr(tuple(self.facts)).encode()) & 0x7FFFFFFF
        self._preamble = preamble

    def timing(self, kind: str) -> AbstractContextManager[None]:
        """`with wire.timing("encode"):` counts the time inside."""
        return self.record.timing(kind)

    def scratch(self, name: str, n_elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """(n_elements,) of work space that lives until the next call with this name."""
        return self.communicator.scratch(name, n_elements * dtype.itemsize).view(dtype)

    def gather(self, payload: Tensor, is_finite: bool) -> Tensor | None:
        """Every rank's `payload` (n,) int32: (world, n), by rank; None, on all ranks, if one's gradient is not finite.

        Raises: RankMismatch (scheme, options, model or step), CorruptMessage (a payload is not what its rank sent).
        """
        message = torch.empty(_HEAD_WORDS + payload.numel(), dtype=torch.int32)
        message[_HEAD_WORDS:] = payload
        crc = _crc_of(message[_HEAD_WORDS:])
        message[:_HEAD_WORDS] = torch.tensor([self.checksum, int(not is_finite), crc], dtype=torch.int32)
        with self.timing("communicate"):
            messages = self.communicator.all_gather(message)
        self.record.count_exchanged((self.world_size - 1) * 4 * message.numel())
        if bool((messages[:, 0] != messages[0, 0]).any()):
            self.name_mismatch()
        for rank, received in enumerate(messages):
            if int(received[2]) != _crc_of(received[_HEAD_WORDS:]):
                raise CorruptMessage(
                    f"the message of rank {rank} for bucket {self.facts.bucket} of step {self.facts.step} was altered on "
                    "its way (checksum); restart from the last checkpoint"
                )
        return None if bool(messages[:, 1].any()) else messages[:, _HEAD_WORDS:]

    def largest(
        self, flags: Sequence[bool], n_scales: int, write_scales: Callable[[Tensor], None]
    ) -> tuple[list[bool], Tensor] | None:
        """Which flags any rank has set, and the largest of every scale over the ranks; None if one is not finite.

        Floats that are not negative are ordered as their bits are, so one maximum of integers carries everything.

        Args:
            write_scales: fills (n_scales,) float32, not negative; not finite if this rank's gradient is not.
        Raises: RankMismatch.
        """
        head = array("i", [self.checksum, -self.checksum, *flags])  # the two maxima cancel if all are alike
        words = self.scratch("agreement", len(head) + n_scales, torch.int32)
        words[: len(head)].copy_(torch.frombuffer(head, dtype=torch.int32))
        scales = words[len(head) :].view(torch.float32)
        with self.timing("encode"):
            write_scales(scales)
        self.sum(words, ReduceOp.MAX)
        if int(words[0]) != -int(words[1]):
            self.name_mismatch()
        if int(words[len(head) :].max()) >= _INFINITY:
            return None
        return [flag != 0 for flag in words[2 : len(head)].tolist()], scales

    def sum_floats(self, values: Tensor, is_finite: bool) -> Tensor | None:
        """(n,) the sum of all ranks' `values` (n,) float32; None if a rank's gradient, or the sum, is not finite.

        Raises: RankMismatch.
        """
        head = [float(not is_finite), *(float(self.checksum >> bit & 1) for bit in range(_FACT_BITS))]
        message = torch.cat([torch.tensor(head), values])
        self.sum(message)
        facts = message[1 : len(head)]
        if not bool(((facts == 0) | (facts == self.world_size)).all()):
            self.name_mismatch()
        return message[len(head) :] if message[0] == 0 and bool(message.isfinite().all()) else None

    def sum(self, values: Tensor, op: Any = ReduceOp.SUM) -> Tensor:
        """Reduce `values` over all ranks, in place. Nothing is checked: what travels with it must tell."""
        with self.timing("communicate"):
            self.communicator.all_reduce(values, op)
        self.record.count_exchanged(ring_bytes(values.numel() * values.element_size(), self.world_size))
        return values

    def mean_plainly(self, values: Tensor) -> None:
        """The mean over all ranks as DDP takes it, in place and in the dtype of `values`."""
        # DDP multiplies by 1/N before it sums, which keeps float16 sums in range; the same product gives its bits.
        self.sum(values.mul_(1.0 / self.world_size))

    def name_mismatch(self) -> NoReturn:
        """The full exchange, which every rank comes to. Raises: RankMismatch."""
        compare_preambles(self.communicator, self._preamble, self.record)
        raise RankMismatch(
            f"ranks sent different checksums for bucket {self.facts.bucket} of step {self.facts.step}, but agree on "
            "scheme, options, model and step: a message was altered on its way; restart from the last checkpoint"
        )


def _crc_of(payload: Tensor) -> int:
    """CRC32C of (n,) int32, as an int32 holds it."""
    crc = _native.crc32c(payload.view(torch.uint8))
    return crc - (1 << 32) if crc >> 31 else crc
