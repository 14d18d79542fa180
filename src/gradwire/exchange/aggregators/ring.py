"""The aggregator `ring`: gradwire's own connections (native/exchange/sum.hpp)."""

from __future__ import annotations

from typing import Any

import torch

from gradwire import _native
from gradwire.codecs.tensors import bytes_of
from gradwire.errors import InvalidArgument, Unsupported
from gradwire.exchange.parts import count_chunks
from gradwire.telemetry.recorder import BucketRecord, Recorder
from gradwire.wire.communicator import Communicator
from gradwire.wire.facts import Facts

_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int32: 3, torch.int64: 4}
_SUM, _OR, _MAXIMUM = 0, 1, 2
# What is smaller is summed when it is waited for: it takes about as long as to start a thread.
_MIN_THREAD_BYTES = 1 << 16


class Ring:
    """Sums, ORs and maxima round a ring: 2 (N-1)/N of the bytes are sent.

    What is large is summed by a thread of its own, so that its caller can do something else meanwhile.
    """

    name = "ring"
    sums_floats = True

    def __init__(self) -> None:
        self._communicator: Communicator

    def bind(self, communicator: Communicator, recorder: Recorder) -> None:
        self._communicator = communicator

    def or_words(self, words: torch.Tensor, record: BucketRecord) -> None:
        self._start(words, record, _OR).wait()

    def max_int32(self, values: torch.Tensor, record: BucketRecord) -> None:
        self._start(values, record, _MAXIMUM).wait()

    def start_sum(self, values: torch.Tensor, record: BucketRecord) -> _RingSum:
        return self._start(values, record, _SUM, values.numel() * values.element_size() >= _MIN_THREAD_BYTES)

    def start_or_and_sum(
        self, words: torch.Tensor, values: torch.Tensor, record: BucketRecord
    ) -> tuple[_RingSum, _RingSum]:
        """See `Aggregator`: both are on their way at once."""
        summed = self.start_sum(values, record)
        return self._start(words, record, _OR), summed

    def stats(self) -> dict[str, Any]:
        """Nothing of its own: the recorder has the bytes."""
        return {}

    def close(self) -> None:
        """Nothing is held."""

    def _start(self, values: torch.Tensor, record: BucketRecord, operation: int, now: bool = False) -> _RingSum:
        if values.dtype not in _ELEMENTS or (operation != _SUM and values.dtype != torch.int32):
            raise Unsupported(f"the aggregator ring does not take {values.dtype} here")
        if values.dim() != 1 or not values.is_contiguous():
            raise InvalidArgument(f"an aggregator takes (n,) contiguous tensors, got shape {tuple(values.shape)}")
        return _RingSum(self._communicator, values, record, operation, now)


class _RingSum:
    """A combination that is on its way (`now`), or due when it is waited for."""

    def __init__(
        self, communicator: Communicator, values: torch.Tensor, record: BucketRecord, operation: int, now: bool
    ) -> None:
        self._record, self._arguments, self._running = record, None, None
        if communicator.world_size == 1 or values.numel() == 0:
            return
        n_chunks = count_chunks(-(-values.numel() // communicator.world_size))
        # What ranks have to agree on was compared before, or is part of what is combined.
        self._arguments = (
            communicator.mesh, communicator.next_stream(), Facts(0, 0, 0, 0), bytes_of(values), _ELEMENTS[values.dtype],
            operation, n_chunks,
        )  # fmt: skip
        self._running = _native.SumOnItsWay(*self._arguments) if now else None

    def wait(self) -> None:
        if self._arguments is None:
            return
        account = _native.ring_combine(*self._arguments) if self._running is None else self._running.wait()
        self._arguments = self._running = None
        self._record.add_account(*account)
